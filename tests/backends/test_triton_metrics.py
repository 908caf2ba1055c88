"""The metrics of Triton Python models: what their code counts is on the server's page, by its own names."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_metrics
from prometheus_client.parser import text_string_to_metric_families

from tests.backends.triton_served import GrpcClient, serving, text, write_model
from tests.waiting import until_found
from triglot.model.metrics import ModelMetrics

COUNTING_MODEL = """
class TritonPythonModel:
    def initialize(self, args):
        self.counter = pb_utils.MetricFamily(
            name="my_requests", description="Requests \\\\ of mine.", kind=pb_utils.MetricFamily.COUNTER
        )
        self.requests = self.counter.Metric(labels={"model": args["model_name"], "kind": 'a "b" \\n'})

    def execute(self, requests):
        responses = []
        for request in requests:
            code = pb_utils.get_input_tensor_by_name(request, "CODE").as_numpy()[0].decode()
            names = {**globals(), "self": self}
            try:
                exec(code, names)
                said = repr(names.get("answer"))
            except Exception as error:
                said = f"{type(error).__name__}: {error}"
            tensor = pb_utils.Tensor("SAID", np.array([said.encode()], object))
            responses.append(pb_utils.InferenceResponse([tensor]))
        return responses
"""
CONFIG = """
input [ { name: "CODE" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "SAID" data_type: TYPE_STRING dims: [ 1 ] } ]
"""
IN_A_PROCESS = '\nparameters { key: "execution" value { string_value: "process" } }\n'
EXECUTION = pytest.mark.parametrize("config", [CONFIG, CONFIG + IN_A_PROCESS], ids=["thread", "process"])


class CountingClient:
    """A server whose model runs the code that it gets."""

    def __init__(self, client: GrpcClient) -> None:
        self.client = client

    async def run(self, code: str, model: str = "told") -> str:
        answer = await self.client.infer(model, {"CODE": text(code)})
        output: bytes = answer.outputs["SAID"].item()
        return output.decode()

    async def page(self, accept: str = "") -> str:
        url = f"http://127.0.0.1:{self.client.server.rest_port}/metrics"
        async with aiohttp.ClientSession() as session, session.get(url, headers={"Accept": accept}) as response:
            return await response.text()

    async def samples(self, name: str) -> dict[str, dict[str, float]]:
        """The kind of the family, and its samples by name and labels."""
        parsed: Any = text_string_to_metric_families(await self.page())
        return {
            family.type: {_key(sample): sample.value for sample in family.samples}
            for family in parsed
            if family.name == name
        }


def _key(sample: Any) -> str:
    labels = [f"{name}={value}" for name, value in sorted(sample.labels.items())]
    return " ".join([sample.name, *labels])


@asynccontextmanager
async def counting(folder: Path, config: str = CONFIG, name: str = "told") -> AsyncIterator[CountingClient]:
    async with serving(write_model(folder, name, COUNTING_MODEL, config)) as client:
        yield CountingClient(client)


@EXECUTION
async def test_a_counter_has_the_name_that_it_was_given(tmp_path: Path, config: str) -> None:
    async with counting(tmp_path, config) as model:
        assert 'my_requests{kind="a \\"b\\" \\n",model="told"} 0.0' in await model.page()
        for _ in range(3):
            await model.run("self.requests.increment(2)")
        assert await model.run("answer = self.requests.value()") == "6.0"
        page = await model.page()
        assert "# HELP my_requests Requests \\\\ of mine.\n# TYPE my_requests counter\n" in page
        assert 'my_requests{kind="a \\"b\\" \\n",model="told"} 6.0\n' in page
        assert "my_requests_total" not in page


@EXECUTION
async def test_gauges_and_histograms(tmp_path: Path, config: str) -> None:
    async with counting(tmp_path, config) as model:
        gauge = """
self.gauge = pb_utils.MetricFamily("my_gauge", "g", pb_utils.MetricFamily.GAUGE).Metric()
self.gauge.set(5)
self.gauge.increment(-7.5)
answer = self.gauge.value()"""
        assert await model.run(gauge) == "-2.5"
        assert await model.samples("my_gauge") == {"gauge": {"my_gauge": -2.5}}
        histogram = """
family = pb_utils.MetricFamily("my_seconds", "h", pb_utils.MetricFamily.HISTOGRAM)
self.histogram = family.Metric(labels={"a": "b"}, buckets=[0.1, 1, 10])
for value in (0.05, 0.1, 0.5, 3, 100):
    self.histogram.observe(value)"""
        assert await model.run(histogram) == "None"
        assert await model.samples("my_seconds") == {
            "histogram": {
                "my_seconds_bucket a=b le=0.1": 2,
                "my_seconds_bucket a=b le=1.0": 3,
                "my_seconds_bucket a=b le=10.0": 4,
                "my_seconds_bucket a=b le=+Inf": 5,
                "my_seconds_count a=b": 5,
                "my_seconds_sum a=b": pytest.approx(103.65),
            }
        }


@EXECUTION
async def test_open_metrics_is_what_its_parser_reads(tmp_path: Path, config: str) -> None:
    more = """
kinds = pb_utils.MetricFamily
self.total = kinds("my_total", "t", kinds.COUNTER).Metric()
self.total.increment(4)
self.histogram = kinds("my_seconds", "h", kinds.HISTOGRAM).Metric(buckets=[1.0])
self.histogram.observe(0.5)"""
    async with counting(tmp_path, config) as model:
        await model.run(more)
        page = await model.page("application/openmetrics-text; version=1.0.0")
        families = {family.name: family for family in open_metrics(page)}  # type: ignore[no-untyped-call]
        kinds = {name: family.type for name, family in families.items() if name.startswith("my")}
        assert kinds == {"my": "counter", "my_seconds": "histogram", "my_requests": "unknown"}
        assert [(sample.name, sample.value) for sample in families["my"].samples] == [("my_total", 4)]


async def test_families_and_metrics_of_equal_names_are_one(tmp_path: Path) -> None:
    async with counting(tmp_path) as model:
        same = """
kinds = pb_utils.MetricFamily
again = kinds("my_requests", "another description", kinds.COUNTER)
again.Metric(labels={"kind": 'a "b" \\n', "model": "told"}).increment(3)
again.Metric().increment(1)
answer = self.requests.value()"""
        assert await model.run(same) == "3.0"
        page = await model.page()
        assert "my_requests 1.0\n" in page
        assert 'my_requests{kind="a \\"b\\" \\n",model="told"} 3.0\n' in page
        assert page.count("# TYPE my_requests") == 1
        assert "another description" not in page


WRONG = {
    "self.requests.set(1)": "TRITONSERVER_METRIC_KIND_COUNTER does not support Set",
    "self.requests.observe(1)": "TRITONSERVER_METRIC_KIND_COUNTER does not support Observe",
    "self.requests.increment(-1)": "can only be incremented monotonically by non-negative values, got -1",
    "self.requests.increment('x')": "TypeError: metric: expected a number, got 'x'",
    "self.requests.increment(float('nan'))": "expected a number, got NaN",
    "kinds('g', 'd', kinds.GAUGE).Metric().observe(1)": "KIND_GAUGE does not support Observe",
    "kinds('h', 'd', kinds.HISTOGRAM).Metric(buckets=[1]).set(1)": "KIND_HISTOGRAM does not support Set",
    "kinds('h', 'd', kinds.HISTOGRAM).Metric(buckets=[1]).increment(1)": "HISTOGRAM does not support Increment",
    "kinds('h', 'd', kinds.HISTOGRAM).Metric(buckets=[1]).value()": "KIND_HISTOGRAM does not support Value",
    "kinds('h', 'd', kinds.HISTOGRAM).Metric(buckets=[2])": "buckets: expected [1.0], as registered before, "
    "got [2.0]",
    "kinds('h2', 'd', kinds.HISTOGRAM).Metric()": "buckets: expected some for a histogram, got none",
    "kinds('h2', 'd', kinds.HISTOGRAM).Metric(buckets=[2, 1])": "buckets: expected ascending numbers",
    "kinds('c', 'd', kinds.COUNTER).Metric(buckets=[1])": "buckets: expected none for a counter, got [1]",
    "kinds('my_requests', 'd', kinds.GAUGE)": "'my_requests' is already a counter, got a gauge",
    "kinds('my requests', 'd', kinds.GAUGE)": "'my requests': expected a name of letters, digits",
    "kinds('nv_inference_count', 'd', kinds.GAUGE)": "expected another name, as triglot_",
    "kinds('triglot_requests', 'd', kinds.GAUGE)": "expected another name, as triglot_",
    "kinds('g', 'd', 2)": "kind: expected MetricFamily.COUNTER or another, got 2",
    "kinds('g', 3, kinds.GAUGE)": "expected strings as name and description, got 'g', 3",
    "self.counter.Metric(labels={'a b': 'c'})": "label 'a b': expected another name",
    "self.counter.Metric(labels={'a': 3})": "labels: expected a dict of strings, got {'a': 3}",
    "self.counter.Metric(labels=['a'])": "labels: expected a dict of strings, got ['a']",
}


async def test_wrong_use_is_an_error_and_counts_nothing(tmp_path: Path) -> None:
    async with counting(tmp_path) as model:
        for code, expected in WRONG.items():
            output = await model.run(f"kinds = pb_utils.MetricFamily\n{code}")
            assert expected in output
            assert re.match(r"TritonModelException: |TypeError: ", output), output
        assert await mine(model) == ["0.0"]
        assert "h_count 0.0" in await model.page()


async def test_all_processes_count_for_one_page(tmp_path: Path) -> None:
    group = "instance_group { count: 2 kind: KIND_CPU }\n"
    async with counting(tmp_path, CONFIG + group + IN_A_PROCESS) as model:
        both = """
import os, pathlib, time
folder = pathlib.Path(pb_utils.get_model_dir())
(folder / f"in-{os.getpid()}").touch()
while len(list(folder.glob("in-*"))) < 2: time.sleep(0.005)
self.requests.increment(3)
answer = os.getpid()"""
        assert len(set(await asyncio.gather(*(model.run(both) for _ in range(2))))) == 2
        assert set((await model.samples("my_requests"))["counter"].values()) == {6}
        # What was counted stays when a process is lost.
        code, _ = await model.client.failure(
            "told", {"CODE": text("import os\nself.requests.increment(1)\nos._exit(1)")}
        )
        assert code.name == "UNAVAILABLE"
        assert set((await model.samples("my_requests"))["counter"].values()) == {7}


async def test_much_that_is_counted_between_two_looks(tmp_path: Path) -> None:
    async with counting(tmp_path, CONFIG + IN_A_PROCESS) as model:
        threads = """
def count():
    for _ in range(5000): self.requests.increment(1)
threads = [threading.Thread(target=count) for _ in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()"""
        await model.run(threads)
        assert set((await model.samples("my_requests"))["counter"].values()) == {20_000}


@EXECUTION
async def test_metrics_go_with_their_model(tmp_path: Path, config: str) -> None:
    for name in ("told", "other"):
        write_model(tmp_path, name, COUNTING_MODEL, config)
    async with serving(tmp_path, model_control_mode="explicit", load_model="*") as client:
        model = CountingClient(client)
        await model.run("self.requests.increment(2)")
        await model.run("self.requests.increment(5)", "other")
        assert set((await model.samples("my_requests"))["counter"].values()) == {2, 5}
        client.server.manager.unload_model("told", dependents=False)
        assert await until_found(lambda: mine(model), lambda found: "2.0" not in found) == ["5.0"]


async def mine(model: CountingClient) -> list[str]:
    return re.findall(r"^my_requests\{.*\} (.*)$", await model.page(), re.MULTILINE)


# --- what is told between processes ---

OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["counter", "gauge", "histogram"]),
        st.sampled_from(["a", "b"]),
        st.dictionaries(st.sampled_from(["x", "y"]), st.text(st.characters(codec="utf-8"), max_size=3)),
        st.sampled_from(["increment", "set"]),
        st.floats(0, 100, width=16),
    ),
    max_size=30,
)


@given(OPERATIONS, st.integers(0, 30))
def test_every_reported_operation_arrives(operations: Any, reported_from: int) -> None:
    here, merged = ModelMetrics(), ModelMetrics()
    for number, (kind, name, labels, operation, value) in enumerate(operations):
        if number == reported_from:
            here.report_to(lambda report: merged.apply(json.loads(json.dumps(report))))
        family = here.family(f"{kind}_{name}", "about", kind)
        metric = here.metric(family, labels, [1.0, 10.0] if kind == "histogram" else [])
        here.do(family, metric, "observe" if kind == "histogram" else operation, value)
    if reported_from < len(operations):
        assert list(merged.collect()) == list(here.collect())
