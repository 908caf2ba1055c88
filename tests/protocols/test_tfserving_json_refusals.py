"""`:predict` bodies of TensorFlow Serving: what is wrong with them, in its own words."""

from __future__ import annotations

import pytest

from tests.protocols.predict_bodies import FLOAT, MULTI, STRING, decode, error_of, values
from triglot.core.errors import InvalidArgument, Unimplemented
from triglot.protocols.tfserving.tensor import MAX_DIMS

PROCESS = "Failed to process element: "
BAD = "Error: INVALID_ARGUMENT: "


@pytest.mark.parametrize(
    ("body", "inputs", "error"),
    [
        ("[1,2]", FLOAT, "JSON Value: [1, 2] Is not object"),
        ("{}", FLOAT, "Missing 'inputs' or 'instances' key"),
        ('{"Instances":[1]}', FLOAT, "Missing 'inputs' or 'instances' key"),
        (
            '{"inputs":[1],"instances":[1]}',
            FLOAT,
            'JSON Value: {\n    "inputs": [1],\n    "instances": [1]\n} Not formatted correctly expecting only '
            "one of 'inputs' or 'instances' keys to exist ",
        ),
        (
            '{"instances":1.5}',
            FLOAT,
            "JSON Value: {\n    \"instances\": 1.5\n} Expecting 'instances' to be an list/array",
        ),
        (
            '{"instances":{"x":1}}',
            FLOAT,
            'JSON Value: {\n    "instances": {\n        "x": 1\n    }\n} '
            "Expecting 'instances' to be an list/array",
        ),
        (
            '{"instances":[]}',
            FLOAT,
            "JSON Value: {\n    \"instances\": []\n} No values in 'instances' array",
        ),
        (
            '{"instances":[null]}',
            FLOAT,
            f"{PROCESS}0 of 'instances' list. {BAD}JSON Value: null Type: Null is not of expected type: float",
        ),
        (
            '{"instances":[{"y":1.0}]}',
            FLOAT,
            f"{PROCESS}0 key: y of 'instances' list. {BAD}JSON object: does not have named input: y",
        ),
        (
            '{"instances":[{"x":1.0},{}]}',
            FLOAT,
            f"{PROCESS}1 of 'instances' list. JSON object: {{}} keys must be equal to: x",
        ),
        (
            '{"instances":[{"str_tensor":"a"}]}',
            MULTI,
            f'{PROCESS}0 of \'instances\' list. JSON object: {{\n    "str_tensor": "a"\n}} keys must be equal to: '
            "int_tensor,str_tensor",
        ),
        ('{"instances":[{"x":1.0},2.0]}', FLOAT, "Expecting object but got list at item 1 of input list"),
        (
            '{"instances":[{"s":"a"},{"b64":"YQ=="}]}',
            STRING,
            "Expecting object but got list at item 1 of input list",
        ),
        (
            '{"instances":[{"b64":{"b64":"YQ=="}},{"b64":"YQ=="}]}',
            {"b64": "BYTES"},
            "Expecting object but got list at item 1 of input list",
        ),
        ('{"instances":[2.0,{"x":1.0}]}', FLOAT, "Expecting value/list but got object at item 1 of input list"),
        (
            '{"instances":[{"x":2.0},{"x":[3.0]}]}',
            FLOAT,
            f"{PROCESS}1 key: x of 'instances' list. {BAD}Expecting shape [] but got: [1]",
        ),
        ('{"inputs":{"y":1.0}}', FLOAT, "Missing named input: x in 'inputs' object."),
        (
            '{"inputs":[[1,2],[3]]}',
            FLOAT,
            "Encountered list at unexpected size: 1 at level: 1 expected size: 2",
        ),
        ('{"inputs":[1,[2]]}', FLOAT, "Encountered list at unexpected level: 1 expected < 1"),
        (
            '{"inputs":[[1],2]}',
            FLOAT,
            "JSON Value: 2 found at incorrect level: 2 in the JSON DOM. Expected at level: 2",
        ),
        (
            '{"inputs":[[],[1]]}',
            FLOAT,
            "Encountered list at unexpected size: 1 at level: 1 expected size: 0",
        ),
        (
            '{"inputs":[[1,2],[3],[4,5,6]]}',
            FLOAT,
            "Encountered list at unexpected size: 1 at level: 1 expected size: 2",
        ),
        (
            '{"instances":[[1,2],[3]]}',
            FLOAT,
            f"{PROCESS}1 of 'instances' list. {BAD}Expecting tensor size: 2 but got: 1",
        ),
        ('{"instances":[1,[1]]}', FLOAT, f"{PROCESS}1 of 'instances' list. {BAD}Expecting shape [] but got: [1]"),
        (
            '{"instances":[[[1],[2]],[[1,2]]]}',
            FLOAT,
            f"{PROCESS}1 of 'instances' list. {BAD}Expecting shape [2,1] but got: [1,2]",
        ),
        (
            '{"instances":[[[1],2]]}',
            FLOAT,
            f"{PROCESS}0 of 'instances' list. {BAD}"
            "JSON Value: 2 found at incorrect level: 2 in the JSON DOM. Expected at level: 2",
        ),
        (
            '{"instances":[[1,[2]]]}',
            FLOAT,
            f"{PROCESS}0 of 'instances' list. {BAD}Encountered list at unexpected level: 1 expected < 1",
        ),
        (
            '{"instances":[1.0]}',
            {"x": "INT32"},
            f"{PROCESS}0 of 'instances' list. {BAD}JSON Value: 1.0 Type: Number is not of expected type: int32",
        ),
        (
            '{"instances":[1,NaN]}',
            {"x": "INT32"},
            f"{PROCESS}1 of 'instances' list. {BAD}JSON Value:  Type: Number is not of expected type: int32",
        ),
        (
            '{"inputs":[2147483648]}',
            {"x": "INT8"},
            "JSON Value: 2147483648 Type: Number is not of expected type: int8",
        ),
        (
            '{"inputs":[9223372036854775808]}',
            {"x": "INT64"},
            "JSON Value: 9223372036854775808 Type: Number is not of expected type: int64",
        ),
        ('{"inputs":-1}', {"x": "UINT32"}, "JSON Value: -1 Type: Number is not of expected type: uint32"),
        ('{"inputs":-1}', {"x": "UINT64"}, "JSON Value: -1 Type: Number is not of expected type: uint64"),
        (
            '{"inputs":[18446744073709551616]}',
            {"x": "UINT64"},
            "JSON Value: 18446744073709553000.0 Type: Number is not of expected type: uint64",
        ),
        ('{"inputs":[1]}', {"x": "BOOL"}, "JSON Value: 1 Type: Number is not of expected type: bool"),
        ('{"inputs":[true]}', FLOAT, "JSON Value: true Type: True is not of expected type: float"),
        ('{"inputs":[false]}', {"x": "INT64"}, "JSON Value: false Type: False is not of expected type: int64"),
        ('{"inputs":["NaN"]}', {"x": "FP64"}, 'JSON Value: "NaN" Type: String is not of expected type: double'),
        ('{"inputs":[1]}', STRING, "JSON Value: 1 Type: Number is not of expected type: string"),
        (
            '{"inputs":{"x":{"b64":"YQ=="}}}',
            FLOAT,
            'JSON Value: {\n    "b64": "YQ=="\n} Type: Object is not of expected type: float',
        ),
        (
            '{"inputs":{"s":{"x":"foo"}}}',
            STRING,
            'JSON Value: {\n    "x": "foo"\n} not formatted correctly for base64 data',
        ),
        ('{"inputs":{"s":[{"b64":"YQ="}]}}', STRING, "Unable to base64 decode"),
        (
            '{"instances":[1,2]}',
            MULTI,
            "instances is a plain list, but expecting list of objects as multiple input tensors required as per "
            "tensorinfo_map",
        ),
        (
            '{"instances":[{"b64":"YQ=="}]}',
            MULTI,
            "instances is a plain list, but expecting list of objects as multiple input tensors required as per "
            "tensorinfo_map",
        ),
        (
            '{"inputs":[1,2]}',
            MULTI,
            "inputs is a plain value/list, but expecting an object as multiple input tensors required as per "
            "tensorinfo_map",
        ),
        (
            '{"instances":[{"int_tensor":1,"str_tensor":"a","zz":3}]}',
            MULTI,
            f"{PROCESS}0 key: zz of 'instances' list. {BAD}JSON object: does not have named input: zz",
        ),
        (
            '{"instances":[{"int_tensor":[[1,2],[3,4],[5,6]],"str_tensor":["a","b"]},'
            '{"int_tensor":[[[7,8],[9,0],[1,2]]],"str_tensor":["c","d"]}]}',
            MULTI,
            f"{PROCESS}1 key: int_tensor of 'instances' list. {BAD}Expecting shape [3,2] but got: [1,3,2]",
        ),
    ],
)
def test_what_is_wrong_with_a_body(body: str, inputs: dict[str, str], error: str) -> None:
    caught = error_of(body, inputs)
    assert caught.message == error
    assert isinstance(caught, InvalidArgument)


@pytest.mark.parametrize(
    ("datatype", "name"),
    [
        ("UINT16", "uint16"),
        ("FP16", "half"),
        ("BF16", "bfloat16"),
        ("COMPLEX64", "complex64"),
        ("COMPLEX128", "complex128"),
    ],
)
def test_datatypes_without_a_json_form(datatype: str, name: str) -> None:
    column = error_of('{"inputs":[1.0]}', {"x": datatype})
    assert column.message == f"Conversion of JSON Value: 1.0 to type: {name}"
    assert isinstance(column, Unimplemented)
    row = error_of('{"instances":[1.0]}', {"x": datatype})
    assert row.message == f"{PROCESS}0 of 'instances' list. Error: UNIMPLEMENTED: {column.message}"
    assert isinstance(row, InvalidArgument)


def test_a_signature_without_inputs_takes_no_json() -> None:
    assert error_of('{"instances":[1]}', {}).message == "Failed to get input map for signature: DEFAULT"
    body = '{"signature_name":"s","instances":[1]}'
    assert error_of(body, {}).message == "Failed to get input map for signature: s"


@pytest.mark.parametrize("depth", [MAX_DIMS, 254, 1000, 100_000])
def test_depth_has_a_limit(depth: int) -> None:
    text = "[" * depth + "1" + "]" * depth
    if depth <= MAX_DIMS:
        assert decode(f'{{"inputs":{text}}}', FLOAT).inputs[0].shape == (1,) * depth
    for body in (
        f'{{"instances":[{text}]}}',
        f'{{"inputs":{{"x":[{text}]}}}}',
        f'{{"instances":[{{"x":{text}}}]}}',
    ):
        assert "nested too deep" in error_of(body, FLOAT).message


def test_an_ignored_key_may_be_900_levels_deep() -> None:
    deep = "[" * 900 + "]" * 900
    assert values(decode(f'{{"zz":{deep},"instances":[1.0]}}', FLOAT)) == {"x": [1.0]}


def test_a_first_list_makes_no_shape_that_outgrows_the_body() -> None:
    count = 50_000
    deepest = "[" * (MAX_DIMS - 2) + "1" + "]" * (MAX_DIMS - 2)
    for first, other, error in (
        ("[" + "1," * count + "1]", "[]", "Encountered list at unexpected size: 0 at level: 1"),
        (deepest, "1", "JSON Value: 1 found at incorrect level: 2"),
        ("[" + deepest + "]", "[1]", "JSON Value: 1 found at incorrect level: 3"),
        ("[[]]", "[]", "Encountered list at unexpected size: 0 at level: 1"),
    ):
        assert error_of(f'{{"inputs":[{first}{f",{other}" * count}]}}', FLOAT).message.startswith(error)
