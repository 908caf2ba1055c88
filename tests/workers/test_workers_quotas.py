"""What a client may do is counted over all workers together."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest

from tests.access.access_files import anonymous, client, write
from tests.gates import Gate
from tests.process import SECONDS
from tests.protocol_clients.channel import rpc
from tests.protocol_clients.kserve import infer_request
from tests.workers.shared_ports import TRANSPORTS, Workers
from triglot.pb.kserve import inference_pb2 as pb

RULES = (
    client("once", ["once"], ["infer"], rate=0.01),
    client("one", ["one"], ["infer"], concurrent=1),
    anonymous(["infer", "health"]),
)


def call(channel: grpc.Channel, token: str, model: str, value: int = 1) -> grpc.Future:
    """An inference in flight."""
    metadata = [("authorization", f"Bearer {token}")]
    stub = rpc(channel, "ModelInfer", pb.ModelInferResponse)
    return stub.future(infer_request(model, value), metadata=metadata, timeout=SECONDS)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_limits_of_a_client_are_for_all_workers(tmp_path: Path, transport: str) -> None:
    file = write(tmp_path / "access.toml", *RULES)
    gate = Gate(tmp_path / "models" / "gate")
    gate.open("load")
    options = ("--access", str(file), "--grpc-transport", transport)
    with Workers(tmp_path / "models", *options) as workers:
        first, second = workers.pids()
        with workers.at(first) as first_client, workers.at(second) as other:
            call(first_client, "once", "who").result()
            refused = call(other, "once", "who").exception()
            assert isinstance(refused, grpc.RpcError)
            assert refused.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            running = call(first_client, "one", "gate", 7)
            gate.wait_until_it_waits(7)
            refused = call(other, "one", "who").exception()
            assert refused.details() == "too many open calls of client 'one': at most 1"
            gate.open(7)
            running.result()
            call(other, "one", "who").result()
        workers.stop()
