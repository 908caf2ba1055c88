"""Call a model with `triglot.client` and with another client in one process, imported in either order.

    python client_imports.py first|last tritonclient|kserve|tensorflow ADDRESS

Says whether `triglot.client` is imported first.
"""

# ruff: noqa: PLC0415 - which package is imported first is what the test varies.
import asyncio
import importlib
import sys

import numpy as np

MODULES = {
    "tritonclient": ["tritonclient.grpc", "tritonclient.grpc.aio"],
    "kserve": ["kserve"],
    "tensorflow": ["tensorflow_serving.apis.prediction_service_pb2_grpc", "tensorflow_serving.apis.predict_pb2"],
}
X = np.array([1.5, 2.0], np.float32)


def by_tritonclient(address):
    from tritonclient import grpc

    with grpc.InferenceServerClient(address) as client:
        given = grpc.InferInput("x", X.shape, "FP32").set_data_from_numpy(X)
        return client.infer("same", [given]).as_numpy("y")


def by_kserve(address):
    from kserve import InferenceGRPCClient, InferInput, InferRequest

    async def call():
        client = InferenceGRPCClient(address)
        given = InferInput("x", list(X.shape), "FP32")
        given.set_data_from_numpy(X)
        response = await client.infer(InferRequest("same", [given]))
        return response.outputs[0].as_numpy()

    return asyncio.run(call())


def by_tensorflow(address):
    import grpc
    import tensorflow as tf
    from tensorflow_serving.apis import predict_pb2, prediction_service_pb2_grpc

    request = predict_pb2.PredictRequest()
    request.model_spec.name = "same"
    request.inputs["x"].CopyFrom(tf.make_tensor_proto(X))
    with grpc.insecure_channel(address) as channel:
        stub = prediction_service_pb2_grpc.PredictionServiceStub(channel)
        return tf.make_ndarray(stub.Predict(request, timeout=60).outputs["y"])


def by_triglot(address):
    from triglot.client import Client

    with Client(address) as client, Client(address, protocol="tensorflow_serving") as other:
        found = client.infer("same", {"x": X})["y"]
        np.testing.assert_array_equal(other.infer("same", {"x": X})["y"], found)
        return found


def main(order, other, address):
    names = MODULES[other]
    for name in ["triglot.client", *names] if order == "first" else [*names, "triglot.client"]:
        importlib.import_module(name)
    calls = [by_triglot, globals()[f"by_{other}"]]
    for call in calls if order == "first" else reversed(calls):
        np.testing.assert_array_equal(call(address), X)
    loaded = [
        name for name in sys.modules if name.startswith(("triglot.server", "triglot.pb", "triglot.transports"))
    ]
    assert not loaded, f"the client loads parts of the server: {loaded}"


if __name__ == "__main__":
    main(*sys.argv[1:])
