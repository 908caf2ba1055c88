"""The grps contract: our declaration against what existing clients were built with."""

from __future__ import annotations

import hashlib
import json
import sys

import pytest
from google.protobuf import descriptor_pb2
from google.protobuf.descriptor_pool import DescriptorPool

from tests.pb.descriptor_scripts import dump
from tests.pb.test_pb_pool import run
from triglot.pb import service
from triglot.pb.grps import grps_pb2 as pb

MODULE = "triglot.pb.grps.grps_pb2"
# Number, name, type, and "packed" for the lists that say so.
FIELDS = {
    "GrpsMessage": """
        1 status message Status
        2 model string
        3 bin_data bytes oneof
        4 str_data string oneof
        5 gtensors message GenericTensorData oneof
        6 ndarray message NDArrayData oneof
        7 gmap message GenericMapData oneof""",
    "Status": """
        1 code int32
        2 msg string
        3 status enum Status.StatusFlag""",
    "GenericTensor": """
        1 name string
        2 dtype enum DataType
        3 shape repeated uint32 packed
        4 flat_uint8 repeated uint32 packed
        5 flat_int8 repeated int32 packed
        6 flat_int16 repeated int32 packed
        7 flat_int32 repeated int32 packed
        8 flat_int64 repeated int64 packed
        9 flat_float16 repeated float packed
        10 flat_float32 repeated float packed
        11 flat_float64 repeated double packed
        12 flat_string repeated string""",
    "GenericTensorData": "1 tensors repeated message GenericTensor",
    "NDArrayData": "",
    "GenericMapData": """
        1 s_s repeated message GenericMapData.SSEntry
        2 s_b repeated message GenericMapData.SBEntry
        3 s_i32 repeated message GenericMapData.SI32Entry
        4 s_i64 repeated message GenericMapData.SI64Entry
        5 s_f repeated message GenericMapData.SFEntry
        6 s_d repeated message GenericMapData.SDEntry""",
    "GenericMapData.SSEntry": "1 key string\n2 value string",
    "GenericMapData.SBEntry": "1 key string\n2 value bytes",
    "GenericMapData.SI32Entry": "1 key string\n2 value int32",
    "GenericMapData.SI64Entry": "1 key string\n2 value int64",
    "GenericMapData.SFEntry": "1 key string\n2 value float",
    "GenericMapData.SDEntry": "1 key string\n2 value double",
    "EmptyGrpsMessage": "",
}
METHODS = (
    "Predict",
    "PredictStreaming",
    "Online",
    "Offline",
    "CheckLiveness",
    "CheckReadiness",
    "ServerMetadata",
    "ModelMetadata",
)
# The descriptor in the clients' Python package, version 1.1.0, whose file is called grps.proto.
CLIENTS_DESCRIPTOR = "d4bae921ad82a5381be534b66988fbfd4248fed5e35a1429dc3ab6df109967dc"


def as_clients_have_it() -> bytes:
    """Our file under the clients' name and, like their file, without names for JSON."""
    file = descriptor_pb2.FileDescriptorProto()
    pb.DESCRIPTOR.CopyToProto(file)
    file.name = "grps.proto"
    messages = list(file.message_type)
    for message in messages:
        messages += message.nested_type
        for field in message.field:
            field.ClearField("json_name")
    return file.SerializeToString()


def described(field: descriptor_pb2.FieldDescriptorProto) -> str:
    words = [str(field.number), field.name]
    if field.label == field.LABEL_REPEATED:
        words.append("repeated")
    words.append(field.Type.Name(field.type).removeprefix("TYPE_").lower())
    if field.type_name:
        words.append(field.type_name.removeprefix(".grps.protos.v1."))
    if field.HasField("oneof_index"):
        words.append("oneof")
    if field.options.packed:
        words.append("packed")
    return " ".join(words)


def test_fields() -> None:
    file = descriptor_pb2.FileDescriptorProto()
    pb.DESCRIPTOR.CopyToProto(file)
    found = {}
    for message in file.message_type:
        found[message.name] = [described(field) for field in message.field]
        for entry in message.nested_type:
            assert entry.options.map_entry
            found[f"{message.name}.{entry.name}"] = [described(field) for field in entry.field]
    assert found == {name: text.strip().replace("  ", "").splitlines() for name, text in FIELDS.items()}
    assert [oneof.name for message in file.message_type for oneof in message.oneof_decl] == ["data_oneof"]


def test_enums() -> None:
    assert pb.DataType.items() == [
        ("DT_INVALID", 0),
        ("DT_UINT8", 1),
        ("DT_INT8", 2),
        ("DT_INT16", 3),
        ("DT_INT32", 4),
        ("DT_INT64", 5),
        ("DT_FLOAT16", 6),
        ("DT_FLOAT32", 7),
        ("DT_FLOAT64", 8),
        ("DT_STRING", 9),
    ]
    assert pb.Status.StatusFlag.items() == [("UNKNOWN", 0), ("SUCCESS", 1), ("FAILURE", 2)]
    assert (pb.Status.UNKNOWN, pb.Status.SUCCESS, pb.Status.FAILURE) == (0, 1, 2)


def test_service() -> None:
    declared = service("grps.protos.v1.GrpsService")
    texts = dump(sys.executable, MODULE)
    assert tuple(method.name for method in declared.methods) == METHODS
    message = "grps.protos.v1.GrpsMessage"
    for name in METHODS:
        stream = "stream " if name == "PredictStreaming" else ""
        assert texts[f"{declared.full_name}/{name}"] == f"{message} -> {stream}{message}"


def test_order_and_options_are_those_of_the_clients() -> None:
    # Two packages can be in one process only if their descriptors are the same to the byte.
    assert hashlib.sha256(as_clients_have_it()).hexdigest() == CLIENTS_DESCRIPTOR


@pytest.mark.parametrize("first", ["ours", "theirs"])
def test_one_process_can_use_ours_and_a_clients(first: str) -> None:
    theirs = (
        "from google.protobuf import descriptor_pool, message_factory\n"
        f"file = descriptor_pool.Default().AddSerializedFile({as_clients_have_it()!r})\n"
    )
    ours = f"from {MODULE} import GrpsMessage\n"
    use = (
        "import json\n"
        "theirs = message_factory.GetMessageClass(\n"
        "    descriptor_pool.Default().FindMessageTypeByName('grps.protos.v1.GrpsMessage')\n"
        ")\n"
        "assert theirs is not GrpsMessage\n"
        "message = theirs(model='m', gmap={'s_i32': {'k': 1}})\n"
        "print(json.dumps(dict(GrpsMessage.FromString(message.SerializeToString()).gmap.s_i32)))\n"
    )
    done = run((ours + theirs if first == "ours" else theirs + ours) + use)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"k": 1}


def test_nothing_is_in_the_default_pool_of_a_fresh_process() -> None:
    done = run(
        f"import {MODULE}\n"
        "from google.protobuf import descriptor_pool\n"
        "descriptor_pool.Default().FindFileContainingSymbol('grps.protos.v1.GrpsMessage')\n"
    )
    assert "KeyError" in done.stderr


@pytest.mark.parametrize(
    ("wire", "message"),
    [
        (
            "0a090 8c8 0112024f4b 1801",
            pb.GrpsMessage(status=pb.Status(code=200, msg="OK", status=pb.Status.SUCCESS)),
        ),
        ("1207 6563686f2d3130 2201 61", pb.GrpsMessage(model="echo-10", str_data="a")),
        ("1a00", pb.GrpsMessage(bin_data=b"")),
        ("3200", pb.GrpsMessage(ndarray=pb.NDArrayData())),
        (
            "2a1a 0a18 0a0178 1007 1a020102 5208 0000803f 00000040 6200 6201 61",
            pb.GrpsMessage(
                gtensors=pb.GenericTensorData(
                    tensors=[
                        pb.GenericTensor(
                            name="x",
                            dtype=pb.DT_FLOAT32,
                            shape=[1, 2],
                            flat_float32=[1, 2],
                            flat_string=["", "a"],
                        )
                    ]
                )
            ),
        ),
        ("3a0c 1a05 0a016b 1007 1203 0a016b", pb.GrpsMessage(gmap={"s_i32": {"k": 7}, "s_b": {"k": b""}})),
    ],
    ids=["status", "text", "empty bytes", "ndarray", "tensor", "map"],
)
def test_golden_bytes(wire: str, message: pb.GrpsMessage) -> None:
    assert pb.GrpsMessage.FromString(bytes.fromhex(wire.replace(" ", ""))) == message


def test_the_file_loads_into_any_pool() -> None:
    pool = DescriptorPool()
    pool.AddSerializedFile(as_clients_have_it())
    assert pool.FindServiceByName("grps.protos.v1.GrpsService").methods[1].name == "PredictStreaming"
