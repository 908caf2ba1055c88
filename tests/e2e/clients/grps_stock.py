"""Checks with classes and a stub as protoc generates them: what a client of grps has, and what it calls.

python grps_stock.py GRPC_ADDRESS REST_ADDRESS
"""

import json
import sys
import urllib.parse
import urllib.request
from contextlib import asynccontextmanager

import checks
import grpc
from grps_stubs import generate

generate()
import grps_pb2 as pb  # noqa: E402 - it was generated just now
import grps_pb2_grpc  # noqa: E402

SECONDS = 20
PREDICT = "/grps/v1/infer/predict"


class Client:
    """The stub, and the address for HTTP."""

    def __init__(self, channel, rest_address):
        self.stub = grps_pb2_grpc.GrpsServiceStub(channel)
        self.url = f"http://{rest_address}"
        # No proxies: this is about this machine alone.
        self.opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def predict(self, **fields):
        message = self.stub.Predict(pb.GrpsMessage(**fields), timeout=SECONDS)
        assert (message.status.code, message.status.msg) == (200, "OK"), message
        assert message.status.status == pb.Status.SUCCESS
        return message

    def post(self, body, content_type="application/json", **query):
        address = f"{self.url}{PREDICT}?{urllib.parse.urlencode(query)}"
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(address, data, {"Content-Type": content_type})
        with self.opener.open(request, timeout=SECONDS) as response:
            return response.read()


async def check_not_ready_before_online(client):
    for call, code in (("CheckLiveness", 200), ("CheckReadiness", 503)):
        message = getattr(client.stub, call)(pb.GrpsMessage(), timeout=SECONDS)
        assert message.status.code == code, (call, message)


async def check_online_and_offline(client):
    for call, code in (("Online", 200), ("CheckReadiness", 200), ("Offline", 200), ("CheckReadiness", 503)):
        message = getattr(client.stub, call)(pb.GrpsMessage(), timeout=SECONDS)
        assert message.status.code == code, (call, message)


async def check_metadata(client):
    message = client.stub.ServerMetadata(pb.GrpsMessage(), timeout=SECONDS)
    assert "interface:" in message.str_data, message
    message = client.stub.ModelMetadata(pb.GrpsMessage(str_data="stream2"), timeout=SECONDS)
    assert "inferer_name: two_texts_inferer" in message.str_data, message


async def check_text(client):
    assert client.predict(str_data="hello grps.").str_data == "hello grps."


async def check_bytes(client):
    assert client.predict(bin_data=bytes(range(256))).bin_data == bytes(range(256))


async def check_tensors(client):
    tensors = [
        pb.GenericTensor(name="uint8", dtype=pb.DT_UINT8, shape=[2], flat_uint8=[0, 255]),
        pb.GenericTensor(name="int8", dtype=pb.DT_INT8, shape=[2], flat_int8=[-128, 127]),
        pb.GenericTensor(name="int16", dtype=pb.DT_INT16, shape=[1], flat_int16=[-32768]),
        pb.GenericTensor(name="int32", dtype=pb.DT_INT32, shape=[1], flat_int32=[-(2**31)]),
        pb.GenericTensor(name="int64", dtype=pb.DT_INT64, shape=[1], flat_int64=[2**63 - 1]),
        pb.GenericTensor(name="float16", dtype=pb.DT_FLOAT16, shape=[1], flat_float16=[0.5]),
        pb.GenericTensor(name="float32", dtype=pb.DT_FLOAT32, shape=[1, 2], flat_float32=[0.1, float("inf")]),
        pb.GenericTensor(name="float64", dtype=pb.DT_FLOAT64, shape=[], flat_float64=[0.1]),
        pb.GenericTensor(name="text", dtype=pb.DT_STRING, shape=[2], flat_string=["中", ""]),
    ]
    data = pb.GenericTensorData(tensors=tensors)
    assert client.predict(gtensors=data).gtensors == data


async def check_map(client):
    data = pb.GenericMapData(
        s_s={"key": "hello grps."},
        s_b={"key": b"\x00\xff"},
        s_i32={"key": -1},
        s_i64={"key": 2**63 - 1},
        s_f={"key": 0.5},
        s_d={"key": 0.1},
    )
    assert client.predict(gmap=data).gmap == data


async def check_model_by_id(client):
    assert client.predict(model="double-1.0.0", str_data="21").str_data == "42"


async def check_failures_are_in_the_message(client):
    for model, text in (("set_err-1.0.0", "my error"), ("zz", "Model zz not found.")):
        message = client.stub.Predict(pb.GrpsMessage(model=model, str_data="x"), timeout=SECONDS)
        assert (message.status.code, message.status.status) == (500, pb.Status.FAILURE), message
        assert text in message.status.msg


async def check_stream(client):
    call = client.stub.PredictStreaming(pb.GrpsMessage(model="stream2-1.0.0", str_data="x"), timeout=SECONDS)
    messages = list(call)
    assert [message.str_data for message in messages] == ["stream data 1", "stream data 2"], messages
    assert call.code() is grpc.StatusCode.OK


async def check_future(client):
    futures = [client.stub.Predict.future(pb.GrpsMessage(str_data=str(number))) for number in range(50)]
    assert [future.result(SECONDS).str_data for future in futures] == [str(number) for number in range(50)]


async def check_http_json(client):
    answer = json.loads(client.post({"str_data": "4"}, model="double-1.0.0"))
    assert answer == {"status": {"code": 200, "msg": "OK", "status": "SUCCESS"}, "str_data": "8"}


async def check_http_ndarray(client):
    answer = json.loads(client.post({"ndarray": [[1, 2], [3, 4]]}, **{"return-ndarray": "true"}))
    assert answer["ndarray"] == [[1, 2], [3, 4]]


async def check_http_bytes(client):
    assert client.post(b"\x00\xff", "application/octet-stream") == b"\x00\xff"


@asynccontextmanager
async def open_client():
    with grpc.insecure_channel(sys.argv[1]) as channel:
        yield Client(channel, sys.argv[2])


if __name__ == "__main__":
    checks.run([sys.modules["__main__"]], open_client)
