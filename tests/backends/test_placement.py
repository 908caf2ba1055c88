"""Which of a model's copies a thread runs, and what is said of a device that is not there."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triglot.backends.placement import Placement, devices_of
from triglot.core.errors import ModelLoadError
from triglot.model.config import Device, InstanceGroup, ModelConfig

FILE = Path("models/m/1/model.onnx")


def of_threads(placement: Placement[str], count: int) -> list[set[str]]:
    """What each of `count` threads is given by three calls; all of them run at the same time."""
    together = threading.Barrier(count)
    given_items: list[set[str]] = [set() for _ in range(count)]

    def ask(number: int) -> None:
        together.wait(20)
        given_items[number] = {placement.current() for _ in range(3)}
        together.wait(20)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return given_items


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=6), st.integers(1, 3))
def test_threads_share_the_items_evenly(items: list[str], rounds: int) -> None:
    found = of_threads(Placement(items), rounds * len(items))
    assert all(len(item) == 1 for item in found)
    assert Counter("".join(item.pop() for item in found)) == Counter(items * rounds)


def test_one_thread_after_the_other_takes_them_in_turn() -> None:
    placement = Placement(["a", "b", "c"])
    assert [of_threads(placement, 1) for _ in range(4)] == [[{"a"}], [{"b"}], [{"c"}], [{"a"}]]


def test_an_item_is_required() -> None:
    with pytest.raises(ValueError, match="expected one for each instance, got none"):
        Placement([])


def test_devices_of_a_configuration() -> None:
    config = ModelConfig(
        instance_groups=[InstanceGroup("CPU", 2), InstanceGroup("GPU", 1), InstanceGroup("MODEL")]
    )
    cpu, model = Device("CPU"), Device("MODEL")
    assert devices_of(FILE, config, lambda: 2) == [cpu, cpu, Device("GPU", 0), Device("GPU", 1), model]
    assert devices_of(FILE, ModelConfig(), lambda: 2) == []


@pytest.mark.parametrize(("source", "named"), [("", str(FILE)), ("m/config.pbtxt", "m/config.pbtxt")])
def test_missing_device(source: str, named: str) -> None:
    config = ModelConfig(instance_groups=[InstanceGroup("CPU"), InstanceGroup("GPU", gpus=[0, 2])], source=source)
    with pytest.raises(ModelLoadError) as caught:
        devices_of(FILE, config, lambda: 2)
    assert str(caught.value) == f"{named}: instance_group[1].gpus: expected numbers from 0 to 1, got 2"
    with pytest.raises(ModelLoadError) as caught:
        devices_of(FILE, config, lambda: 0, "; why")
    assert str(caught.value) == (
        f"{named}: instance_group[1].kind: KIND_GPU, but the backend finds no usable GPU; why"
    )
