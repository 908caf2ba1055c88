"""Serves the model of the Ray bench with Ray Serve, behind its gRPC ingress.

It is a process of its own: `python -m bench.rayserve ADDRESS PORT`, until SIGTERM.
"""

import signal
import sys
from contextlib import suppress
from typing import Any

import grpc
import numpy as np

from bench.raymodel import work
from bench.servers import free_port
from triglot.pb.kserve import inference_pb2 as pb


class Encoded:
    """A message that is already serialized, with the method of messages that Ray Serve calls."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def SerializeToString(self) -> bytes:  # noqa: N802 - the name in protobuf.
        return self._data


class Works:
    """As `bench.raymodel.Works`, with serialized messages."""

    def ModelInfer(self, data: bytes) -> Encoded:  # noqa: N802 - the method's name.
        request = pb.ModelInferRequest.FromString(data)
        given = request.inputs[0]
        x = np.frombuffer(request.raw_input_contents[0], np.float32).reshape(tuple(given.shape))
        work(x)
        response = pb.ModelInferResponse(model_name=request.model_name, model_version="1", id=request.id)
        response.outputs.add(name="y", datatype=given.datatype, shape=x.shape)
        response.raw_output_contents.append(x.tobytes())
        return Encoded(response.SerializeToString())


def add_servicer(servicer: Any, server: Any) -> None:
    """Add the service like generated code; requests remain bytes, which Ray Serve can send to replicas."""
    handlers = {"ModelInfer": grpc.unary_unary_rpc_method_handler(servicer.ModelInfer)}
    service = grpc.method_handlers_generic_handler("inference.GRPCInferenceService", handlers)
    server.add_generic_rpc_handlers((service,))


def main(address: str, port: int) -> None:
    """Serve until SIGTERM."""
    import ray  # noqa: PLC0415 - the replicas import this module, too.
    from ray import serve  # noqa: PLC0415
    from ray.serve.config import gRPCOptions  # noqa: PLC0415

    ray.init(address=address, logging_level="warning")
    deployed = serve.deployment(num_replicas=1, ray_actor_options={"num_cpus": 1})(Works)
    try:
        # Both wait for the proxy, but for 60 s at most; the bench itself waits until it answers.
        with suppress(TimeoutError):
            serve.start(
                http_options={"host": "127.0.0.1", "port": free_port()},
                grpc_options=gRPCOptions(port=port, grpc_servicer_functions=["bench.rayserve.add_servicer"]),
                proxy_location="HeadOnly",  # Here, all nodes have the same ports.
            )
        with suppress(TimeoutError):
            serve.run(deployed.bind(), name="bench")
        signal.sigwait([signal.SIGTERM])
    finally:
        serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    main(sys.argv[1], int(sys.argv[2]))
