"""Checks with tritonclient's generated stub: what other clients of the same protocol send.

python triton_stub.py GRPC_ADDRESS REST_ADDRESS
"""

import sys
from contextlib import asynccontextmanager

import checks
import grpc
import numpy as np
from samples import sample
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

TYPED = {
    "BOOL": "bool_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}


class Stub:
    """The generated stub, and the channel that it uses."""

    def __init__(self, channel):
        self.channel = channel
        self.calls = service_pb2_grpc.GRPCInferenceServiceStub(channel)

    def refused(self, request, code, text):
        with checks.Raises(grpc.RpcError) as caught:
            self.calls.ModelInfer(request)
        code_and_text = f"{caught.error.code()}: {caught.error.details()}"
        assert caught.error.code() is code, code_and_text
        assert text in caught.error.details(), f"{code_and_text!r} does not have {text!r}"

    def wrong(self, request, text):
        self.refused(request, grpc.StatusCode.INVALID_ARGUMENT, text)


def request(model="half_plus_two", datatype="FP32", shape=(2,), raw=b"\0\0\x80\x3f\0\0\0\x40"):
    """A request for half_plus_two with 1 and 2; raw=None leaves the data out."""
    message = pb.ModelInferRequest(model_name=model)
    message.inputs.add(name="x", datatype=datatype, shape=shape)
    if raw is not None:
        message.raw_input_contents.append(raw)
    return message


def floats(response):
    return np.frombuffer(response.raw_output_contents[0], dtype=np.float32).tolist()


async def check_typed_contents(stub, text_datatype):
    array = sample(text_datatype)
    message = request(f"identity_{text_datatype.lower()}", text_datatype, array.shape, raw=None)
    getattr(message.inputs[0].contents, TYPED[text_datatype]).extend(array.ravel().tolist())
    response = stub.calls.ModelInfer(message)
    # The answer is raw, whatever the request was.
    assert len(response.raw_output_contents) == len(response.outputs) == 1
    assert not response.outputs[0].HasField("contents")
    message.inputs[0].ClearField("contents")
    message.raw_input_contents.append(response.raw_output_contents[0])
    assert stub.calls.ModelInfer(message).raw_output_contents == response.raw_output_contents
    if text_datatype != "BYTES":
        got = np.frombuffer(response.raw_output_contents[0], dtype=array.dtype).reshape(array.shape)
        np.testing.assert_array_equal(got, array)


async def check_fp16_and_bf16_have_no_typed_contents(stub):
    for datatype in ("FP16", "BF16"):
        message = request(f"identity_{datatype.lower()}", datatype, (1, 1), raw=None)
        message.inputs[0].contents.fp32_contents.append(1)
        stub.wrong(message, f"of type 'FP32', expected datatype '{datatype}'")


async def check_typed_field_of_another_datatype(stub):
    message = request(raw=None)
    message.inputs[0].contents.int_contents.extend([1, 2])
    stub.wrong(message, "unexpected explicit tensor data for input tensor 'x' for model 'half_plus_two'")


async def check_typed_integer_out_of_range(stub):
    message = request("identity_int8", "INT8", (1, 1), raw=None)
    message.inputs[0].contents.int_contents.append(128)
    stub.wrong(message, "outside INT8's range")


async def check_typed_and_raw_mixed(stub):
    message = request()
    message.inputs[0].contents.fp32_contents.append(1)
    stub.wrong(message, "contents field must not be specified when using raw_input_contents for 'x'")


async def check_no_data(stub):
    stub.wrong(request(raw=None), "unable to find data for input tensor 'x' for model 'half_plus_two' in request.")


async def check_byte_size(stub):
    text = "input byte size mismatch for input 'x' for model 'half_plus_two'. Expected 8, got 7"
    stub.wrong(request(raw=b"1234567"), text)


async def check_more_raw_entries_than_inputs(stub):
    message = request()
    message.raw_input_contents.append(b"")
    stub.wrong(message, "raw_input_contents")


async def check_negative_dim(stub):
    stub.wrong(request(shape=(-1,)), "unexpected shape for input 'x'")


async def check_unknown_datatype(stub):
    stub.wrong(request(datatype="FP8"), "data-type is 'FP8'")


async def check_bytes_framing(stub):
    for raw, text in (
        (b"\1\0\0\0a\0\0\0", "incomplete string length indicator"),
        (b"\0\0\0\0\5\0\0\0abc", "incomplete string data"),
        (b"\0\0\0\0", "unexpected number of string elements"),
        (b"\0\0\0\0" * 3, "unexpected number of string elements"),
    ):
        stub.wrong(request("identity_bytes", "BYTES", (1, 2), raw), text)


async def check_priority_as_int64(stub):
    message = request()
    message.parameters["priority"].int64_param = 1
    assert floats(stub.calls.ModelInfer(message)) == [2.5, 3]


async def check_empty_final_response_flag_on_a_unary_call(stub):
    message = request()
    message.parameters["triton_enable_empty_final_response"].bool_param = False
    assert floats(stub.calls.ModelInfer(message)) == [2.5, 3]


async def check_unknown_tensor_parameters(stub):
    message = request()
    message.inputs[0].parameters["binary_data_size"].int64_param = 8
    message.inputs[0].parameters["triton_anything"].string_param = "x"
    message.outputs.add(name="y").parameters["binary_data"].bool_param = True
    assert floats(stub.calls.ModelInfer(message)) == [2.5, 3]


async def check_reserved_parameter(stub):
    message = request()
    message.parameters["triton_x"].int64_param = 1
    stub.wrong(message, "'triton_x'")


async def check_reserved_parameter_of_another_type(stub):
    for key in ("sequence_start", "priority", "timeout"):
        message = request()
        message.parameters[key].string_param = "1"
        stub.wrong(message, f"'{key}'")


async def check_parameter_without_a_value(stub):
    message = request()
    message.parameters["mine"].SetInParent()
    stub.wrong(message, "'mine'")


async def check_parameter_uint64(stub):
    message = request()
    message.parameters["mine"].uint64_param = 1
    stub.wrong(message, "'mine'")


async def check_shared_memory_region_is_not_found(stub):
    message = request(raw=None)
    message.inputs[0].parameters["shared_memory_region"].string_param = "r"
    message.inputs[0].parameters["shared_memory_byte_size"].int64_param = 4
    stub.refused(message, grpc.StatusCode.NOT_FOUND, "Unable to find shared memory region: 'r'")


async def check_model_metadata_leaves_field_6_unset(stub):
    name = "/inference.GRPCInferenceService/ModelMetadata"
    data = stub.channel.unary_unary(name)(pb.ModelMetadataRequest(name="half_plus_two").SerializeToString())
    reply = pb.ModelMetadataResponse.FromString(data)
    reply.DiscardUnknownFields()
    assert reply.SerializeToString(deterministic=True) == data


async def check_unknown_rpc_is_unimplemented(stub):
    with checks.Raises(grpc.RpcError) as caught:
        stub.channel.unary_unary("/inference.GRPCInferenceService/NoSuchCall")(b"")
    assert caught.error.code() is grpc.StatusCode.UNIMPLEMENTED


async def check_garbage_is_an_invalid_argument(stub):
    for data in (b"\xff", b"\x0a\x05abc", b"\xff" * 20_000):
        with checks.Raises(grpc.RpcError) as caught:
            stub.channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")(data)
        assert caught.error.code() is grpc.StatusCode.INVALID_ARGUMENT


async def check_100_at_once_on_one_channel(stub):
    calls = [stub.calls.ModelInfer.future(request()) for _ in range(100)]
    assert all(floats(call.result()) == [2.5, 3] for call in calls)


@asynccontextmanager
async def open_stub():
    with grpc.insecure_channel(sys.argv[1]) as channel:
        yield Stub(channel)


if __name__ == "__main__":
    checks.run([sys.modules["__main__"]], open_stub)
