"""A client of grps with its own classes and a Triglot server in one process, imported in either order.

    python grps_one_process.py client|server MODEL…

Says which of them is imported first, and where models lie: `uppercase` and `token_stream`.
"""

import asyncio
import importlib
import os
import sys

import grpc
from descriptors_one_process import load_pb
from grps_stubs import generate

SECONDS = 20


def import_client():
    for name in ("grps_pb2", "grps_pb2_grpc"):
        importlib.import_module(name)


async def main(*paths):
    import grps_pb2  # noqa: PLC0415 - only now is it certain which was first
    import grps_pb2_grpc  # noqa: PLC0415
    from google.protobuf import descriptor_pool  # noqa: PLC0415

    import triglot  # noqa: PLC0415
    from triglot.pb.grps import grps_pb2 as ours  # noqa: PLC0415

    theirs = descriptor_pool.Default().FindFileByName("grps.proto")
    assert theirs.message_types_by_name["GrpsMessage"] is grps_pb2.GrpsMessage.DESCRIPTOR
    assert ours.GrpsMessage is not grps_pb2.GrpsMessage
    assert ours.GrpsMessage.DESCRIPTOR.full_name == grps_pb2.GrpsMessage.DESCRIPTOR.full_name
    async with (
        triglot.Server(paths, triglot.Config(grpc_port=0, rest_port=-1)) as server,
        grpc.aio.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel,
    ):
        stub = grps_pb2_grpc.GrpsServiceStub(channel)
        request = grps_pb2.GrpsMessage(model="uppercase-1", str_data="x")
        assert (await stub.Predict(request, timeout=SECONDS)).str_data == "X"
        request = grps_pb2.GrpsMessage(model="token_stream-1", str_data="a b")
        messages = [message async for message in stub.PredictStreaming(request, timeout=SECONDS)]
        assert [message.str_data for message in messages] == ["a", "b"]


if __name__ == "__main__":
    _, first, *paths = sys.argv
    generate()
    imports = [import_client, load_pb] if first == "client" else [load_pb, import_client]
    for import_one in imports:
        import_one()
    asyncio.run(main(*paths))
    print("done", flush=True)
    # grpc.aio's polling thread may be within C++ when the interpreter is taken apart, which then aborts.
    os._exit(0)
