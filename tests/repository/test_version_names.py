"""Names of versions and a default one, from a model's folder; version policies; lists of models that are wrong."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.repository.scanning_server import ScanningServer, replace
from tests.repository.scripted_loads import Loads, ask, look_twice, managing, put, states
from tests.waiting import until
from triglot.core.errors import InvalidArgument, ModelLoadError, ModelNotFound
from triglot.model.config import ALL, LATEST, VersionPolicy
from triglot.repository.config.settings import check_names
from triglot.repository.config.version_names import VersionNames, read_names
from triglot.repository.manager.registry import UnknownLabel
from triglot.repository.scan.source import find_models

TWO = 'default = "stable"\n[versions]\nstable = 1\nv2_beta = 2\n'


@pytest.fixture
def load() -> Loads:
    return Loads()


def names(text: str, folder: Path) -> VersionNames:
    (folder / "versions.toml").write_text(text)
    return read_names(folder / "versions.toml")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", VersionNames()),
        ("default = 3", VersionNames({}, 3)),
        ("[versions]\nv1 = 1", VersionNames({"v1": 1})),
        (TWO, VersionNames({"stable": 1, "v2_beta": 2}, 1)),
    ],
)
def test_what_the_file_says(tmp_path: Path, text: str, expected: VersionNames) -> None:
    assert read_names(tmp_path / "versions.toml") == VersionNames()
    assert names(text, tmp_path) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("default = ", "Invalid value (at end of document)"),
        ("v1 = 1", "unknown key 'v1', expected default, versions, traffic, sticky, shadow, rollback"),
        ("versions = 1", "versions: expected a table of names and numbers, got 1"),
        ('[versions]\nv1 = "1"', "versions: v1: expected a version's number, got '1'"),
        ("[versions]\nv1 = true", "versions: v1: expected a version's number, got True"),
        ("[versions]\nv1 = -1", "versions: v1: expected a version's number, got -1"),
        ("[versions]\n12 = 1", "versions: '12': expected 1 to 128 letters"),
        ('[versions]\n"a/b" = 1', "versions: 'a/b': expected 1 to 128 letters"),
        ('default = "v9"', "default: expected a name in [versions] or a number, got 'v9'"),
        ("default = 1.5", "default: expected a name in [versions] or a number, got 1.5"),
        ("#" * (1024 * 1024 + 1), "expected at most 1048576 bytes"),
        ("default = " + "[" * 5000, ""),
    ],
)
def test_what_it_cannot_say(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ModelLoadError) as caught:
        names(text, tmp_path)
    assert str(caught.value).startswith(f"{tmp_path / 'versions.toml'}: {message}")


def test_names_of_missing_versions(tmp_path: Path) -> None:
    put(tmp_path / "m" / "1")
    put(tmp_path / "m" / "3")
    file = tmp_path / "m" / "versions.toml"
    file.write_text("[versions]\nv2 = 2")
    found = find_models([tmp_path])
    assert found.names == {"m": VersionNames({"v2": 2})}
    assert found.warnings[str(tmp_path / "m")] == [
        f"{file}: v2: version 2 is not served; the served versions are 1, 3"
    ]
    file.write_text("default = 2")
    found = find_models([tmp_path])
    assert (found.models, str(found.problems[str(tmp_path / "m")])) == (
        {},
        f"{file}: default: expected one of the served versions, 1, 3, got 2",
    )
    # Of a model with a configuration, the latest one is served.
    (tmp_path / "m" / "config.pbtxt").touch()
    file.write_text("default = 1")
    assert str(find_models([tmp_path / "m"]).problems[str(tmp_path / "m")]).endswith("served versions, 3, got 1")


def test_a_file_that_leads_out_or_is_none(tmp_path: Path) -> None:
    put(tmp_path / "r" / "m" / "1")
    (tmp_path / "versions.toml").write_text("default = 1")
    file = tmp_path / "r" / "m" / "versions.toml"
    file.symlink_to(tmp_path / "versions.toml")
    assert "leads out of" in str(find_models([tmp_path / "r"]).problems[str(file.parent)])
    assert find_models([tmp_path / "r"], allow_symlinks=True).names["m"].default == 1
    file.unlink()
    os.mkfifo(file)
    assert str(find_models([tmp_path / "r"]).problems[str(file.parent)]) == f"{file}: expected a file"


async def test_names_and_the_default(tmp_path: Path, load: Loads) -> None:
    for version in ("1", "2"):
        put(tmp_path / "m" / version)
    (tmp_path / "m" / "versions.toml").write_text(TWO)
    async with managing(tmp_path, load=load) as manager:
        registry = manager.registry
        assert await ask(registry.servable("m")) == 1
        assert await ask(registry.servable("m", "2")) == 2
        assert [await ask(registry.servable("m", label=name)) for name in ("stable", "v2_beta")] == [1, 2]
        with pytest.raises(UnknownLabel):
            registry.servable("m", label="v3")


async def test_a_default_that_cannot_be_loaded_is_nobodys(tmp_path: Path, load: Loads) -> None:
    put(tmp_path / "m" / "1", "broken")
    put(tmp_path / "m" / "2")
    (tmp_path / "m" / "versions.toml").write_text(TWO)
    async with managing(tmp_path, load=load) as manager:
        assert await ask(manager.registry.servable("m", label="v2_beta")) == 2
        with pytest.raises(ModelNotFound, match="no available versions"):
            manager.registry.servable("m")
        assert not manager.registry.is_ready("m")


async def test_the_file_is_followed_and_the_former_default_answers_until_the_new_one_serves(
    tmp_path: Path, load: Loads
) -> None:
    put(tmp_path / "m" / "1")
    file = tmp_path / "m" / "versions.toml"
    file.write_text("default = 1")
    async with managing(tmp_path, load=load) as manager:
        held = load.hold("load m/2")
        put(tmp_path / "m" / "2")
        replace(file, "default = 2\n[versions]\nnew = 2")
        await look_twice(manager)
        await until(lambda: load.begun[-1] == "m/2")
        assert await ask(manager.registry.servable("m")) == 1
        held.set()
        await until(lambda: states(manager, "m") == {2: "READY", 1: "READY"})
        assert await ask(manager.registry.servable("m")) == 2
        replace(file, "default = 1")
        await look_twice(manager)
        assert await ask(manager.registry.servable("m")) == 1
        with pytest.raises(UnknownLabel):
            manager.registry.servable("m", label="new")
        file.unlink()
        await look_twice(manager)
        assert await ask(manager.registry.servable("m")) == 2


async def test_a_file_that_is_wrong_changes_nothing(tmp_path: Path, load: Loads) -> None:
    for version in ("1", "2"):
        put(tmp_path / "m" / version)
    file = tmp_path / "m" / "versions.toml"
    file.write_text(TWO)
    async with managing(tmp_path, load=load) as manager:
        for text in ("default = ", "default = 3"):
            replace(file, text)
            await look_twice(manager)
            assert await ask(manager.registry.servable("m")) == 1
            assert manager.registry.labelled("m", "v2_beta") == 2
            assert states(manager, "m") == {2: "READY", 1: "READY"}


def test_names_have_to_settle(tmp_path: Path) -> None:
    put(tmp_path / "m" / "1")
    scanning = ScanningServer(tmp_path, settle_seconds=3600)
    (tmp_path / "m" / "versions.toml").write_text("default = 1")
    for _ in range(2):
        assert scanning.look().unsettled
        assert scanning.last.names == {"m": VersionNames()}
    assert ScanningServer(tmp_path).last.names == {"m": VersionNames({}, 1)}


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
