"""TensorFlow Serving's client and a Triglot server in one process, imported in either order.

    python tfs_one_process.py client|server HALF_PLUS_THREE SQUARE

Says which of them is imported first, and where the models lie.
"""

import asyncio
import importlib
import os
import sys

import grpc
from descriptors_one_process import load_pb

CLIENT = (
    "predict",
    "prediction_service",
    "model_service",
    "get_model_metadata",
    "prediction_log",
    "session_service",
)


def import_client():
    importlib.import_module("tensorflow")
    for name in CLIENT:
        importlib.import_module(f"tensorflow_serving.apis.{name}_pb2")
    importlib.import_module("tensorflow_serving.apis.prediction_service_pb2_grpc")


def values_of(response):
    from tensorflow import make_ndarray  # noqa: PLC0415 - only now is it certain which was first

    return make_ndarray(response.outputs["y"]).tolist()


async def main(*paths):
    from tfs_subject import SECONDS, Stubs, predict_request  # noqa: PLC0415

    import triglot  # noqa: PLC0415

    config = triglot.Config(grpc_port=0, rest_port=-1)
    async with triglot.Server(paths, config) as server:
        address = f"127.0.0.1:{server.grpc_port}"
        square = predict_request("square", x=[2.0, 3.0])
        async with grpc.aio.insecure_channel(address) as channel:
            stubs = Stubs(channel)
            assert await stubs.y("half_plus_three", [1, 2, 5]) == ([3.5, 4, 5.5], 123)
            assert values_of(await stubs.predictions.Predict(square, timeout=SECONDS)) == [4, 9]
            response = await stubs.metadata("half_plus_three", "signature_def")
            assert response.metadata["signature_def"].TypeName() == "tensorflow.serving.SignatureDefMap"
        with grpc.insecure_channel(address) as channel:
            predict = Stubs(channel).predictions.Predict
            assert values_of(await asyncio.to_thread(predict, square, timeout=SECONDS)) == [4, 9]


if __name__ == "__main__":
    _, first, *paths = sys.argv
    imports = [import_client, load_pb] if first == "client" else [load_pb, import_client]
    for import_one in imports:
        import_one()
    asyncio.run(main(*paths))
    print("done", flush=True)
    # grpc.aio's polling thread may be within C++ when the interpreter is taken apart, which then aborts.
    os._exit(0)
