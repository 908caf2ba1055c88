"""The store of kept answers: what makes two requests equal, what is kept, and what is evicted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from triglot import Call
from triglot.core.tensor import Array, object_array
from triglot.core.types import InferenceRequest, OutputTensor
from triglot.scheduling.response_cache import ENTRY_BYTES, OFF_LOOP_BYTES, Key, ModelCache, ResponseCache, digest


def asked(
    parameters: dict[str, Any] | None = None, signature_name: str = "serving_default", size: int = 1
) -> Call:
    call = Call()
    call.parameters = parameters or {}
    call.signature_name = signature_name
    call.size = size
    return call


def key_of(model_cache: ModelCache, inputs: dict[str, Array], call: Call | None = None, **more: Any) -> Key:
    return model_cache.key(inputs, call or asked(), InferenceRequest("m", **more))


def floats(*values: float, dtype: str = "f4") -> Array:
    return np.array(values, dtype)


def texts(*values: bytes) -> Array:
    return object_array(list(values), (len(values),))


UNLIKE: list[tuple[dict[str, Array], dict[str, Any]]] = [
    ({"x": floats(1, 2)}, {}),
    ({"x": floats(1, 3)}, {}),
    ({"x": floats(1, 2).reshape(2, 1)}, {}),
    ({"x": floats(1, 2).reshape(1, 2)}, {}),
    ({"x": floats(1, 2).view("i4")}, {}),
    ({"x": floats(1, 2).view("u1")}, {}),
    ({"z": floats(1, 2)}, {}),
    ({"x": floats(1), "y": floats(2)}, {}),
    ({"x": floats(2), "y": floats(1)}, {}),
    ({"x": texts(b"a", b"bc")}, {}),
    ({"x": texts(b"ab", b"c")}, {}),
    ({"x": texts(b"abc")}, {}),
    ({"x": texts(b"")}, {}),
    ({"x": texts()}, {}),
    ({"x": floats()}, {}),
    ({}, {}),
    ({"x": floats(1, 2)}, {"call": asked({"a": 1})}),
    ({"x": floats(1, 2)}, {"call": asked({"a": 1.0})}),
    ({"x": floats(1, 2)}, {"call": asked({"a": True})}),
    ({"x": floats(1, 2)}, {"call": asked({"a": "1"})}),
    ({"x": floats(1, 2)}, {"call": asked({"b": 1})}),
    ({"x": floats(1, 2)}, {"call": asked(signature_name="other")}),
    ({"x": floats(1, 2)}, {"outputs": ("y",)}),
    ({"x": floats(1, 2)}, {"outputs": ("y", "z")}),
    ({"x": floats(1, 2)}, {"outputs": ("z", "y")}),
    ({"x": floats(1, 2)}, {"lenient_shapes": True}),
]


async def test_requests_that_differ_anywhere_differ() -> None:
    cache = ResponseCache(1)
    model_cache = cache.for_model()
    keys = [key_of(model_cache, inputs, **more) for inputs, more in UNLIKE]
    assert len(set(keys)) == len(UNLIKE)
    assert key_of(cache.for_model(), {"x": floats(1, 2)}) != keys[0]


@pytest.mark.parametrize("parameters", [{"priority": 3}, {"timeout": 10}, {"priority": 0, "timeout": 1}])
async def test_when_a_request_is_executed_makes_no_difference(parameters: dict[str, Any]) -> None:
    model_cache = ResponseCache(1).for_model()
    inputs = {"x": floats(1)}
    assert key_of(model_cache, inputs, asked(parameters)) == key_of(model_cache, inputs)


async def test_the_order_of_inputs_counts_only_where_it_has_a_meaning() -> None:
    first, other = {"x": floats(1), "y": floats(2)}, {"y": floats(2), "x": floats(1)}
    cache = ResponseCache(1)
    model_cache, ordered = cache.for_model(), cache.for_model(ordered=True)
    assert key_of(model_cache, first) == key_of(model_cache, other)
    assert key_of(ordered, first) != key_of(ordered, other)


TENSORS = st.dictionaries(
    st.sampled_from(["x", "y"]),
    st.one_of(
        st.lists(st.integers(0, 2), max_size=3).map(lambda values: np.array(values, "u1")),
        st.lists(st.integers(0, 2), max_size=3).map(lambda values: np.array(values, "<u2")),
        st.lists(st.binary(max_size=2), max_size=3).map(lambda values: object_array(values, (len(values),))),
    ),
    max_size=2,
)


def plain(inputs: dict[str, Array]) -> Any:
    return {name: (array.dtype.str, array.shape, array.tolist()) for name, array in inputs.items()}


@given(TENSORS, TENSORS)
def test_digests_are_equal_when_the_tensors_are(first: dict[str, Array], other: dict[str, Array]) -> None:
    assert (digest((), first) == digest((), other)) == (plain(first) == plain(other))


async def test_unaligned_and_large_tensors_are_digested_alike() -> None:
    model_cache = ResponseCache(1).for_model()
    large = np.arange(OFF_LOOP_BYTES, dtype="<f8")
    unaligned = np.ndarray(large.shape, "<f8", b"x" + large.tobytes(), 1)
    assert not unaligned.flags.aligned
    key = key_of(model_cache, {"x": large})
    assert key_of(model_cache, {"x": unaligned}) == key
    assert key_of(model_cache, {"x": np.concatenate([large, large])[::2]}) != key
    assert key_of(model_cache, {"x": np.repeat(large, 2)[::2]}) == key


# --- what is kept ---


def outputs(array: Array) -> list[OutputTensor]:
    return [OutputTensor("y", "FP32", array)]


def keep(model_cache: ModelCache, name: str, array: Array) -> Key:
    key = key_of(model_cache, {name: floats(1)})
    model_cache.store_copy(key, outputs(array))
    return key


@pytest.mark.parametrize("count", [3, OFF_LOOP_BYTES])
async def test_cached_answer_is_an_immutable_copy(count: int) -> None:
    model_cache = ResponseCache(1 << 24).for_model()
    array = np.zeros(count, np.float32)
    key = keep(model_cache, "x", array)
    array[:] = 1
    found = model_cache.find(key)
    assert found is not None
    assert found[0].array.tolist() == [0] * count
    with pytest.raises(ValueError, match="read-only"):
        found[0].array[0] = 2
    found.clear()
    assert len(model_cache.find(key) or ()) == 1


def cache_counts(model_cache: ModelCache) -> dict[str, float]:
    return {reading.name.removeprefix("response_cache_"): reading.value for reading in model_cache.readings()}


async def test_least_recently_used_answer_is_evicted() -> None:
    size = 1000 + ENTRY_BYTES
    cache = ResponseCache(3 * size)
    model_cache, other = cache.for_model(), cache.for_model()
    array = np.zeros(250, np.float32)
    keys = [keep(model_cache, name, array) for name in "abc"]
    assert model_cache.find(keys[0]) is not None
    keep(other, "d", array)
    assert [model_cache.find(key) is not None for key in keys] == [True, False, True]
    assert cache.bytes == 3 * size
    assert cache_counts(model_cache) == {"hits": 3, "misses": 1, "evictions": 1, "bytes": 2 * size}
    assert cache_counts(other) == {"hits": 0, "misses": 0, "evictions": 0, "bytes": size}


async def test_the_same_answer_twice_is_kept_once() -> None:
    cache = ResponseCache(1 << 20)
    model_cache = cache.for_model()
    for _ in range(2):
        keep(model_cache, "x", np.zeros(250, np.float32))
    assert cache.bytes == 1000 + ENTRY_BYTES
    assert cache_counts(model_cache)["evictions"] == 0


@pytest.mark.parametrize(
    "array",
    [
        np.zeros(1000, np.float32),
        object_array([b"x" * 4000], (1,)),
        np.array([bytearray(b"somebody may change it")], object),
    ],
    ids=["numbers", "text", "mutable"],
)
async def test_what_is_too_large_or_may_change_is_not_kept(array: Array) -> None:
    cache = ResponseCache(4000)
    model_cache = cache.for_model()
    kept = keep(model_cache, "a", np.zeros(1, np.float32))
    key = keep(model_cache, "x", array)
    assert model_cache.find(key) is None
    assert model_cache.find(kept) is not None
    assert cache_counts(model_cache)["evictions"] == 0


class Uncopyable(np.ndarray[Any, Any]):
    """What copying an array is on a machine without memory."""

    def copy(self, order: Any = "C") -> Any:
        raise MemoryError


async def test_answer_is_not_cached_without_memory() -> None:
    model_cache = ResponseCache(1 << 20).for_model()
    key = keep(model_cache, "x", floats(1).view(Uncopyable))
    assert model_cache.find(key) is None


async def test_texts_are_counted_by_their_content() -> None:
    cache = ResponseCache(1 << 20)
    model_cache = cache.for_model()
    key = keep(model_cache, "x", object_array([b"x" * 1000] * 2, (2,)))
    assert model_cache.find(key) is not None
    assert cache.bytes > 2000 + ENTRY_BYTES


async def test_a_closed_versions_answers_go_and_none_come() -> None:
    cache = ResponseCache(1 << 20)
    model_cache, other = cache.for_model(), cache.for_model()
    array = np.zeros(10, np.float32)
    for name in "ab":
        keep(model_cache, name, array)
    kept = keep(other, "a", array)
    model_cache.close()
    keep(model_cache, "c", array)
    assert cache_counts(model_cache)["bytes"] == 0
    assert cache.bytes == cache_counts(other)["bytes"]
    assert other.find(kept) is not None


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 200)), max_size=40))
async def test_the_cache_is_never_larger_than_it_may_be(steps: list[tuple[str, int]]) -> None:
    cache = ResponseCache(3 * ENTRY_BYTES)
    model_caches = [cache.for_model(), cache.for_model()]
    for name, size in steps:
        model_cache = model_caches[size % 2]
        keep(model_cache, name, np.zeros(size, np.uint8))
        assert cache.bytes <= cache.max_bytes
        assert cache.bytes == sum(cache.bytes for cache in model_caches)
