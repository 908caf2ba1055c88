"""Reads YAML files key by key; errors name the file and the key.

YAML would read a version such as 1.10 as a number and a name such as `no` as a boolean. So the scalars of keys
that hold texts are marked as texts in the node tree, before values are constructed.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import yaml

from triglot.core.errors import ModelLoadError

TEXT_TAG = "tag:yaml.org,2002:str"
NULL_TAG = "tag:yaml.org,2002:null"
NEAR = 0.8
"""Similarity of two keys from which one counts as a misspelling of the other; 1 is equal."""


def read_yaml(file: Path, texts: Collection[str]) -> tuple[str, dict[str, Any]]:
    """Return a file's text and the map in it; values of the keys in `texts` are texts, or None if empty.

    Keys have their full path, such as `models.*.name` for a key of each map in a list. Raise `ModelLoadError`.
    """
    try:
        text = file.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise ModelLoadError(
            f"{file}: {error.strerror}; a grps project has conf/server.yml and conf/inference.yml"
        ) from None
    except UnicodeDecodeError as error:
        raise ModelLoadError(f"{file}: expected UTF-8, got something else at byte {error.start}") from None
    try:
        values = _parse(text, texts)
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ModelLoadError(f"{file}{line}: not YAML: {error.problem or error.context}") from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date such as 2024-02-31.
        raise ModelLoadError(f"{file}: not YAML: {error}") from None
    if not isinstance(values, dict):
        raise ModelLoadError(f"{file}: expected a map, got {quoted(values)}")
    return text, values


def _parse(text: str, texts: Collection[str]) -> Any:
    loader = yaml.SafeLoader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        _mark(loader, node, "", texts)
        return loader.construct_document(node)
    finally:
        loader.dispose()


def _mark(loader: yaml.SafeLoader, node: yaml.Node, path: str, texts: Collection[str]) -> None:
    if isinstance(node, yaml.ScalarNode):
        if path in texts and node.tag != NULL_TAG:
            node.tag = TEXT_TAG
    elif path and not any(text.startswith(f"{path}.") for text in texts):
        return  # Ends recursive aliases, which can only be outside of the known keys.
    elif isinstance(node, yaml.MappingNode):
        loader.flatten_mapping(node)  # Includes merged keys.
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode):
                _mark(loader, value, f"{path}.{key.value}" if path else key.value, texts)
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _mark(loader, item, f"{path}.*", texts)


def quoted(value: object) -> str:
    """Return a value as errors quote it."""
    if value is None:
        return "nothing"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


@dataclass(frozen=True, slots=True)
class YamlMap:
    """A map in a file: `path` is its path, `known` are the supported keys; other keys are ignored.

    Every method raises `ModelLoadError` for an invalid value; an empty value counts as absent.
    """

    file: Path
    values: dict[Any, Any]
    known: Collection[str]
    path: str = ""

    def fail(self, key: str, expected: str, *, reason: str = "") -> NoReturn:
        """Raise the error for a key's value; `reason` replaces the value in the text."""
        text = (
            f"{self.file}: {self._path_of(key)}: expected {expected}, got {reason or quoted(self.values.get(key))}"
        )
        if self.values.get(key) is None and (near := self._misspelling_of(key)):
            text += f"; did you mean {key!r} by {near!r}?"
        raise ModelLoadError(text)

    def misspelt_keys(self) -> list[str]:
        """Return a warning for each unknown key that resembles a known, absent one."""
        return [
            f"{self.file}: {self._path_of(near)}: unknown key, ignored; did you mean {key!r}?"
            for key in self.known
            if key not in self.values and (near := self._misspelling_of(key))
        ]

    def has(self, key: str) -> bool:
        """Whether the key has a value."""
        return self.values.get(key) is not None

    def text(self, key: str, expected: str = "a non-empty string") -> str:
        """Return a text of at least one character."""
        value = self.values.get(key)
        if not isinstance(value, str) or not value:
            self.fail(key, expected)
        return value

    def choice(self, key: str, choices: Sequence[str]) -> str:
        """Return one of the `choices`."""
        value = self.values.get(key)
        if not isinstance(value, str) or value not in choices:
            *others, last = choices
            self.fail(key, f"{', '.join(others)} or {last}" if others else last)
        return value

    def integer(self, key: str) -> int:
        """Return an integer of at least 1."""
        value = self.values.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            self.fail(key, "an integer of at least 1")
        return value

    def boolean(self, key: str) -> bool:
        """Return a boolean."""
        value = self.values.get(key)
        if not isinstance(value, bool):
            self.fail(key, "true or false")
        return value

    def map(self, key: str, known: Collection[str]) -> YamlMap:
        """Return a nested map."""
        value = self.values.get(key)
        if not isinstance(value, dict):
            self.fail(key, f"a map with {', '.join(known)}")
        return YamlMap(self.file, value, known, self._path_of(key))

    def maps(self, key: str, known: Collection[str]) -> list[YamlMap]:
        """Return a list of at least one map."""
        values = self.values.get(key)
        expected = f"a list of maps with {', '.join(known)}"
        if not isinstance(values, list) or not values:
            self.fail(key, expected)
        for index, value in enumerate(values):
            if not isinstance(value, dict):
                self.fail(key, expected, reason=f"{quoted(value)} as item {index}")
        return [YamlMap(self.file, value, known, f"{self._path_of(key)}[{i}]") for i, value in enumerate(values)]

    def _path_of(self, key: str) -> str:
        return f"{self.path}.{key}" if self.path else key

    def _misspelling_of(self, key: str) -> str | None:
        unknown = [other for other in self.values if isinstance(other, str) and other not in self.known]
        return next(iter(difflib.get_close_matches(key, unknown, n=1, cutoff=NEAR)), None)
