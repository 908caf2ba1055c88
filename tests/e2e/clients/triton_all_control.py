"""Checks that hold for all four clients of the tritonclient package: what is done around inference.

The server controls its models explicitly and has loaded all of tests/models_triton; it allows shared memory of
every key, and it has a trace file.
"""

import json

import numpy as np
import triton_all_common
from checks import Raises
from samples import assert_same, strings
from triton_all_subject import close
from tritonclient.utils import InferenceServerException, serialize_byte_tensor, shared_memory

DURATIONS = (
    "success", "fail", "queue", "compute_input", "compute_infer", "compute_output", "cache_hit", "cache_miss",
)  # fmt: skip


# --- shared memory ---


async def check_shared_memory(t):
    data = [np.arange(16, dtype=np.int32).reshape(1, 16), np.full((1, 16), 3, np.int32)]
    given = shared_memory.create_shared_memory_region("given", f"/given_{t.kind}", 128)
    answer = shared_memory.create_shared_memory_region("answer", f"/answer_{t.kind}", 128)
    try:
        shared_memory.set_shared_memory_region(given, data)
        await t.client.register_system_shared_memory("given", f"/given_{t.kind}", 128)
        await t.client.register_system_shared_memory("answer", f"/answer_{t.kind}", 128)
        mapped = {f"/given_{t.kind}", f"/answer_{t.kind}"}
        assert mapped <= set(shared_memory.mapped_shared_memory_regions())
        inputs = [t.empty(f"INPUT{at}", [1, 16], np.int32) for at in (0, 1)]
        outputs = [t.wanted(f"OUTPUT{at}") for at in (0, 1)]
        for at in (0, 1):
            inputs[at].set_shared_memory("given", 64, offset=64 * at)
            outputs[at].set_shared_memory("answer", 64, offset=64 * at)
        result = await t.client.infer("simple", inputs, outputs=outputs)
        output = result.get_output("OUTPUT0")
        assert list(output["shape"] if t.http else output.shape) == [1, 16]
        sums, differences = (
            shared_memory.get_contents_as_numpy(answer, np.int32, [1, 16], offset) for offset in (0, 64)
        )
        assert_same(sums, data[0] + 3)
        assert_same(differences, data[0] - 3)
        del sums, differences
        outputs[0].unset_shared_memory()
        result = await t.client.infer("simple", inputs, outputs=outputs[:1])
        assert_same(result.as_numpy("OUTPUT0"), data[0] + 3)
        await t.client.unregister_system_shared_memory("given")
        call = t.client.infer("simple", inputs)
        await t.refused(call, "Unable to find shared memory region: 'given'", grpc="NOT_FOUND", http=404)
        await t.client.unregister_system_shared_memory()
    finally:
        for region in (given, answer):
            shared_memory.destroy_shared_memory_region(region)


async def check_strings_in_shared_memory(t):
    text = strings([b"one", "zwölf".encode(), b""])
    packed = serialize_byte_tensor(text)
    size = len(packed.item())
    given = shared_memory.create_shared_memory_region("words", f"/words_{t.kind}", 2 * size)
    try:
        shared_memory.set_shared_memory_region(given, [packed])
        await t.client.register_system_shared_memory("words", f"/words_{t.kind}", 2 * size)
        tensor, wanted = t.empty("INPUT0", [1, 3], np.object_), t.wanted("OUTPUT0")
        tensor.set_shared_memory("words", size)
        wanted.set_shared_memory("words", size, offset=size)
        await t.client.infer("simple_identity", [tensor], outputs=[wanted])
        found = shared_memory.get_contents_as_numpy(given, np.object_, [1, 3], size)
        assert_same(found, text)
        await t.client.unregister_system_shared_memory("words")
    finally:
        shared_memory.destroy_shared_memory_region(given)


async def regions(t, method, name=""):
    answer = await t.json(method, *([name] if name else []))
    rows = answer if t.http else answer.get("regions", {}).values()
    return {row["name"]: row for row in rows}


async def check_the_status_of_shared_memory(t):
    region = shared_memory.create_shared_memory_region("seen", f"/seen_{t.kind}", 4096)
    try:
        register = t.client.register_system_shared_memory
        await register("seen", f"/seen_{t.kind}", 1024, offset=512)
        found = (await regions(t, "get_system_shared_memory_status", "seen"))["seen"]
        assert (found["key"], int(found["offset"]), int(found["byte_size"])) == (f"/seen_{t.kind}", 512, 1024)
        assert "seen" in await regions(t, "get_system_shared_memory_status")
        twice = register("seen", f"/seen_{t.kind}", 1024)
        await t.refused(twice, "seen", grpc="ALREADY_EXISTS", http=400)
        await t.refused(register("too_large", f"/seen_{t.kind}", 8192), "", grpc="INVALID_ARGUMENT", http=400)
        await t.client.unregister_system_shared_memory()
        assert await regions(t, "get_system_shared_memory_status") == {}
        await t.client.unregister_system_shared_memory()
    finally:
        shared_memory.destroy_shared_memory_region(region)


async def check_cuda_shared_memory_as_without_a_gpu(t):
    call = t.client.register_cuda_shared_memory("gpu", b"QUFB", 0, 64)
    text = "failed to register CUDA shared memory region: 'gpu', GPUs not supported"
    await t.refused(call, text, grpc="INVALID_ARGUMENT", http=400)
    assert await regions(t, "get_cuda_shared_memory_status") == {}
    await t.client.unregister_cuda_shared_memory()


# --- control ---


async def check_unload_and_load(t):
    await t.client.unload_model("simple_int8")
    assert await t.client.is_model_ready("simple_int8") is False
    with Raises(InferenceServerException):
        await t.client.infer("simple_int8", t.pair(1, 1, np.int8))
    await t.client.load_model("simple_int8")
    assert await t.client.is_model_ready("simple_int8") is True
    result = await t.client.infer("simple_int8", t.pair(1, 1, np.int8))
    assert result.as_numpy("OUTPUT0").tolist() == [[2] * 16]


async def check_load_with_a_partial_config(t):
    await t.client.load_model("auto_onnx", config=json.dumps({"max_batch_size": "16"}))
    found = await t.config("auto_onnx")
    assert found["max_batch_size"] == 16
    assert [tensor["name"] for tensor in found["output"]] == ["OUTPUT0", "OUTPUT1"]
    result = await t.client.infer("auto_onnx", t.pair(1, 2, np.float32))
    assert result.as_numpy("OUTPUT0").tolist() == [[3] * 16]
    call = t.client.load_model("auto_onnx", config='{"max_batch_sice": 3}')
    await t.refused(call, "max_batch_sice", grpc="INVALID_ARGUMENT", http=400)
    assert (await t.config("auto_onnx"))["max_batch_size"] == 16
    await t.client.load_model("auto_onnx")
    assert (await t.config("auto_onnx")).get("max_batch_size", 0) != 16


async def check_unload_of_a_step_and_its_dependents(t):
    await t.client.unload_model("words_to_numbers", unload_dependents=True)
    assert await t.client.is_model_ready("ensemble_sum_of_words") is False
    await t.client.load_model("ensemble_sum_of_words")
    assert await t.client.is_model_ready("words_to_numbers") is True
    await triton_all_common.check_ensembles(t)


# --- statistics ---


async def check_statistics(t):
    def duration(stats, name):
        counts = stats["inference_stats"].get(name, {})
        return counts.get("count", 0), counts.get("ns", 0)

    before = (await t.statistics("simple", "1"))[0]
    for _ in range(3):
        rows = [t.input(f"INPUT{at}", np.zeros((2, 16), np.int32)) for at in (0, 1)]
        await t.client.infer("simple", rows)
    (after,) = await t.statistics("simple")
    assert (after["name"], int(after["version"])) == ("simple", 1)
    for name in ("success", "queue", "compute_input", "compute_infer", "compute_output"):
        old, new = duration(before, name), duration(after, name)
        assert new[0] - old[0] == 3, (name, old, new)
        assert new[1] >= old[1]
    assert duration(after, "success")[1] > duration(before, "success")[1]
    assert after["inference_count"] - before.get("inference_count", 0) == 6
    assert after["execution_count"] - before.get("execution_count", 0) == 3
    sizes = {batch["batch_size"]: batch["compute_infer"]["count"] for batch in after["batch_stats"]}
    assert sizes[2] >= 3
    assert after["last_inference"] > 0
    assert after["last_inference"] >= before.get("last_inference", 0)
    if t.http:
        assert set(after["inference_stats"]) == set(DURATIONS)
        assert "memory_usage" in after
        assert "response_stats" in after


async def check_statistics_of_all_models(t):
    found = {stats["name"] for stats in await t.statistics("")}
    assert found == set(triton_all_common.MODELS)
    await t.refused(t.client.get_inference_statistics("nope"), "nope", grpc="NOT_FOUND", http=404)


# --- settings ---


async def check_trace_settings(t):
    before = await t.settings("get_trace_settings")
    assert {"trace_level", "trace_rate", "trace_count", "log_frequency", "trace_file"} <= set(before)
    changed = await t.settings(
        "update_trace_settings", "simple", {"trace_level": ["TIMESTAMPS"], "trace_rate": "1", "trace_count": "2"}
    )
    assert changed["trace_level"] in ("TIMESTAMPS", ["TIMESTAMPS"])
    assert (changed["trace_rate"], changed["trace_count"]) == ("1", "2")
    await t.client.infer("simple", t.pair(1, 2))
    left = await t.settings("get_trace_settings", "simple")
    assert left["trace_count"] in ("1", "0"), left
    assert await t.settings("get_trace_settings") == before
    cleared = {"trace_level": None, "trace_rate": None, "trace_count": None}
    await t.client.update_trace_settings(model_name="simple", settings=cleared)
    assert await t.settings("get_trace_settings", "simple") == before
    for wrong in ({"trace_rate": "often"}, {"no_such": "1"}, {"trace_level": ["LOUD"]}):
        with Raises(InferenceServerException):
            await t.client.update_trace_settings(settings=wrong)
    assert await t.settings("get_trace_settings") == before
    with Raises(InferenceServerException):
        await t.client.get_trace_settings("nope")


async def check_log_settings(t):
    before = await t.settings("get_log_settings")
    assert {"log_file", "log_info", "log_warning", "log_error", "log_verbose_level", "log_format"} <= set(before)
    wanted = {"log_info": False, "log_verbose_level": 1, "log_format": "ISO8601"}
    changed = await t.settings("update_log_settings", wanted)
    assert (bool(changed["log_info"]), changed["log_verbose_level"], changed["log_format"]) == (
        False,
        1,
        "ISO8601",
    )
    assert bool(changed["log_error"]) is True
    restored = {"log_info": True, "log_verbose_level": 0, "log_format": "default"}
    await t.client.update_log_settings(restored)
    assert await t.settings("get_log_settings") == before
    with Raises(InferenceServerException):
        await t.client.update_log_settings({"log_file": "/tmp/elsewhere"})


# --- options of a call ---


class Noting:
    """A plug-in's behaviour: it sees the headers, and adds one."""

    def __init__(self):
        self.seen = []

    def __call__(self, request):
        self.seen.append(dict(request.headers))
        request.headers["x-noted"] = "yes"


async def check_plug_ins(t):
    class Plugin(t.module.InferenceServerClientPlugin):
        def __init__(self):
            self.noting = Noting()

        def __call__(self, request):
            self.noting(request)

    plugin = Plugin()
    t.plain.register_plugin(plugin)
    try:
        assert t.plain.plugin() is plugin
        assert await t.client.is_server_live(headers={"x-mine": "1"}) is True
        await t.client.infer("simple", t.pair(1, 2), headers={"x-mine": "2"})
        assert [seen.get("x-mine") for seen in plugin.noting.seen] == ["1", "2"]
    finally:
        t.plain.unregister_plugin()
    assert t.plain.plugin() is None


async def check_the_auth_plug_in(t):
    auth = __import__(f"tritonclient.{t.kind}.auth", fromlist=["BasicAuth"])
    client = t.module.InferenceServerClient(t.address)
    try:
        client.register_plugin(auth.BasicAuth("user", "pass word"))
        live = client.is_server_live()
        assert (live if isinstance(live, bool) else await live) is True
    finally:
        await close(t, client)


async def check_priority_and_timeout(t):
    result = await t.client.infer("simple", t.pair(1, 2), priority=1, timeout=10_000_000)
    assert result.as_numpy("OUTPUT0").tolist() == [[3] * 16]


async def check_many_at_once(t):
    results = await t.infer_all("simple", [t.pair(at, 1) for at in range(20)])
    assert [result.as_numpy("OUTPUT0")[0, 0] for result in results] == list(range(1, 21))
