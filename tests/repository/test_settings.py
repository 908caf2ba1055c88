"""Version policies, and lists of models that cannot be."""

from __future__ import annotations

import pytest

from triglot.core.errors import InvalidArgument
from triglot.model.config import ALL, LATEST, VersionPolicy
from triglot.repository.config.settings import check_names


@pytest.mark.parametrize(
    ("policy", "wanted"),
    [
        (ALL, [1, 2, 10]),
        (LATEST, [10]),
        (VersionPolicy(latest=2), [2, 10]),
        (VersionPolicy(latest=9), [1, 2, 10]),
        (VersionPolicy(specific=frozenset({2, 3, 1})), [1, 2]),
        (VersionPolicy(specific=frozenset()), []),
    ],
)
def test_what_a_policy_wants(policy: VersionPolicy, wanted: list[int]) -> None:
    assert policy.wanted([10, 1, 2]) == wanted
    assert policy.wanted([]) == []


def test_what_a_policy_misses() -> None:
    assert VersionPolicy(specific=frozenset({2, 30, 4})).missing([10, 1, 2]) == [4, 30]
    assert ALL.missing([1]) == LATEST.missing([]) == []


@pytest.mark.parametrize(("latest", "specific"), [(0, None), (-1, None), (1, frozenset({1}))])
def test_policies_that_cannot_be(latest: int, specific: frozenset[int] | None) -> None:
    with pytest.raises(ValueError, match="expected"):
        VersionPolicy(latest, specific)


@pytest.mark.parametrize("name", ["", "two words", "a/b", "..", ".hidden", "a\n", "x" * 129, "ä"])
def test_names_that_clients_could_not_send(name: str) -> None:
    with pytest.raises(InvalidArgument, match="expected 1 to 128 letters"):
        check_names(["good", name])


def test_a_name_that_comes_twice() -> None:
    names = ["m", "m"]
    with pytest.raises(InvalidArgument) as caught:
        check_names(names)
    assert caught.value.message == "Illegal to list model m multiple times in config list"
    check_names([*names[:1], "n"])
