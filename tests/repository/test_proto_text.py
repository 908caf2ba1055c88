"""Files in protobuf's text format, in the spellings that the C++ parsers of Triton and TensorFlow Serving read."""

from __future__ import annotations

import pytest

from triglot.core.errors import InvalidArgument
from triglot.pb.kserve import model_config_pb2 as pb
from triglot.repository.config.model_config import parse_text


def parsed(text: str) -> pb.ModelConfig:
    return parse_text(text.encode(), "config.pbtxt", pb.ModelConfig)


@pytest.mark.parametrize(
    ("text", "dims"),
    [
        ("[ - 1 ]", [-1]),
        ("[-1, 3, - 1]", [-1, 3, -1]),
        ("- 1", [-1]),
        ("[ -\t1, -\n  1, -\r\n1 ]", [-1, -1, -1]),
        ("[ - # any\n 1, 4 # - 5\n ]", [-1, 4]),
        ("[ - # 'any\n # \"number\n 1 ]", [-1]),
        ("[ - 0x1, 0x10, 010, - 010, 0XfF ]", [-1, 16, 8, -8, 255]),
        ("1; dims: - 1, dims: 2", [1, -1, 2]),
        ("[]", []),
    ],
)
def test_spellings_of_integers(text: str, dims: list[int]) -> None:
    assert list(parsed(f'name: "m" input [ {{ name: "x" dims: {text} }} ]').input[0].dims) == dims


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("[ - 1.5, -1.5f, - 2F, .5, 3. ]", [-1.5, -1.5, -2, 0.5, 3]),
        ("[ - .5, - 1e2, 1E-1 ]", [-0.5, -100, pytest.approx(0.1)]),
        ("[ - inf, -Infinity, inf ]", [-float("inf"), -float("inf"), float("inf")]),
    ],
)
def test_spellings_of_floats(text: str, values: list[float]) -> None:
    config = parsed(f"sequence_batching {{ control_input {{ control {{ fp32_false_true: {text} }} }} }}")
    assert list(config.sequence_batching.control_input[0].control[0].fp32_false_true) == values


@pytest.mark.parametrize("text", ["a - 1", "it's - 1", "# - 1", '\\" - 1', "\\\\", "- 1"])
def test_strings_are_left_as_they_are(text: str) -> None:
    config = parsed(f'name: "{text}" # "\ninput {{ dims: - 1 }}\nplatform: \'- 1\'')
    assert config.name == text.replace("\\\\", "\\").replace('\\"', '"')
    assert (list(config.input[0].dims), config.platform) == ([-1], "- 1")


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("max_batch_size: -\n", "1:17"),
        ("\nmax_batch_size: - -1", "2:17"),
        ("max_batch_size: -\n\n x1", "3:2"),
        ('name: "unclosed - 1\nmax_batch_size: 1', "1:7"),
    ],
)
def test_errors_name_the_place(text: str, place: str) -> None:
    with pytest.raises(InvalidArgument, match=f"^Invalid protobuf file: 'config.pbtxt': {place} : "):
        parsed(text)
