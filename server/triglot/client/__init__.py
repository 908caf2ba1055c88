"""A client of models: numpy arrays in, numpy arrays out, over one server or several.

    from triglot.client import Client

    with Client("127.0.0.1:8001") as client:
        print(client.infer("half_plus_two", {"x": np.array([1.0, 2.0], np.float32)})["y"])

It calls any server of KServe V2 or TensorFlow Serving, over gRPC.
"""

from triglot.client.aio import AsyncClient
from triglot.client.balancer import Retries
from triglot.client.blocking import Client
from triglot.client.calls import Tls
from triglot.client.shared_memory import SharedMemory
from triglot.client.wire import Outputs

__all__ = ["AsyncClient", "Client", "Outputs", "Retries", "SharedMemory", "Tls"]
