"""Replicas of the Helm chart that are replaced one after the other under load: no call fails.

The kubelet is a fake one, with the chart's probes and times; the clients are stock grpcio's, the proxy is HAProxy.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from tests import environments
from tests.e2e.haproxy import Gateway, gateway
from tests.kubelet import Pod
from tests.process import clean_environment, triglot_command, unused_ports, write_model
from tests.protocol_clients.kserve import infer_request
from tests.waiting import until
from triglot.pb.kserve import inference_pb2 as pb

REPLICAS = 3
CALLERS = 8
PAUSE = 0.03
LAG = 2.0
"""Seconds that pass until proxies and clients know that a pod has come or is leaving; a second is usual."""
CALLS = int(os.environ.get("ROLLING_CALLS", "3000"))
"""At least so many while all replicas are replaced, as often as that takes; more by hand."""
MODEL = "named"
NAMES_ITSELF = """
import asyncio, os
import numpy as np
import triglot

class Named(triglot.Model):
    inputs = [triglot.TensorSpec("x", "INT32", [1])]
    outputs = [triglot.TensorSpec("y", "INT32", [1])]

    async def infer(self, inputs):
        # The milliseconds that it takes.
        await asyncio.sleep(int(inputs["x"][0]) / 1000)
        return {"y": np.array([os.getpid()], np.int32)}
"""
SERVICE_CONFIG = {
    "loadBalancingConfig": [{"round_robin": {}}],
    "methodConfig": [
        {
            "name": [{}],
            "retryPolicy": {
                "maxAttempts": 4,
                "initialBackoff": "0.1s",
                "maxBackoff": "1s",
                "backoffMultiplier": 2,
                "retryableStatusCodes": ["UNAVAILABLE"],
            },
        }
    ],
}


@pytest.fixture(scope="module")
def chart() -> Callable[..., Any]:
    """The pod's spec that Helm makes of these values."""
    python = environments.python("deploy")

    def render(**values: Any) -> Any:
        done = subprocess.run(
            [python, "-m", "tests.deploy.render_chart", json.dumps(values)],
            env=clean_environment(PYTHONPATH=str(environments.ROOT)),
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        (deployment,) = [document for document in json.loads(done.stdout) if document["kind"] == "Deployment"]
        return deployment["spec"]["template"]["spec"]

    return render


@dataclass
class Kubelet:
    """Starts pods of the chart, and ends them."""

    models: Path
    chart: Callable[..., Any]
    stack: ExitStack
    values: dict[str, Any]
    grace: dict[int, float] = field(default_factory=dict)

    async def start(self, port: int) -> Pod:
        """A pod that is ready."""
        spec = self.chart(port=port, models={"paths": [str(self.models)]}, **self.values)
        (container,) = spec["containers"]
        self.grace[port] = spec["terminationGracePeriodSeconds"]
        command = triglot_command((*container["args"], f"--model-name={MODEL}"))
        pod = self.stack.enter_context(Pod(container, command, port))
        await asyncio.to_thread(pod.wait_until_ready)
        return pod

    async def stop(self, pod: Pod) -> None:
        """Its end, in the time that the chart grants."""
        assert pod.ready
        assert pod.failed_liveness == 0
        await asyncio.to_thread(pod.terminate, self.grace[pod.port])


@contextmanager
def kubelet(folder: Path, chart: Callable[..., Any], **values: Any) -> Iterator[Kubelet]:
    """One whose pods end with the block."""
    write_model(folder / "models", NAMES_ITSELF)
    with ExitStack() as stack:
        yield Kubelet(folder / "models", chart, stack, values)


class Load:
    """Callers that ask again and again. `answered` is by the process, `failed` by the status."""

    def __init__(self) -> None:
        self.answered: Counter[int] = Counter()
        self.failed: Counter[str] = Counter()
        self.stopped = False

    @asynccontextmanager
    async def over(self, channel: grpc.aio.Channel) -> AsyncIterator[None]:
        """Callers, while the block runs, and until they have made their last call."""
        infer = channel.unary_unary(
            "/inference.GRPCInferenceService/ModelInfer", response_deserializer=pb.ModelInferResponse.FromString
        )

        async def ask() -> None:
            count = 0
            while not self.stopped:
                count += 1
                request = infer_request(MODEL, 1000 if count % 100 == 0 else count % 20).SerializeToString()
                try:
                    answer = await infer(request, timeout=30)
                    self.answered[int.from_bytes(answer.raw_output_contents[0], "little")] += 1
                except grpc.aio.AioRpcError as error:
                    self.failed[f"{error.code()}: {error.details()}"] += 1
                await asyncio.sleep(PAUSE)

        async with asyncio.TaskGroup() as callers:
            for _ in range(CALLERS):
                callers.create_task(ask())
            try:
                await until(lambda: self.answered.total() + self.failed.total() >= CALLERS)
                yield
            finally:
                self.stopped = True


async def test_by_round_robin_of_the_client(tmp_path: Path, chart: Callable[..., Any]) -> None:
    ports = {port for _ in range(REPLICAS) for port in unused_ports()}
    places = sorted(ports)[:REPLICAS]
    options = [
        ("grpc.service_config", json.dumps(SERVICE_CONFIG)),
        ("grpc.max_reconnect_backoff_ms", 1000),
        ("grpc.use_local_subchannel_pool", 1),
    ]
    target = "ipv4:" + ",".join(f"127.0.0.1:{port}" for port in places)
    load = Load()
    with kubelet(tmp_path, chart) as node:
        pods = list(await asyncio.gather(*map(node.start, places)))
        async with grpc.aio.insecure_channel(target, options) as channel, load.over(channel):
            replaced = 0
            while replaced < REPLICAS or load.answered.total() < CALLS:
                for at, port in enumerate(places):
                    await node.stop(pods[at])
                    pods[at] = await node.start(port)
                    await asyncio.sleep(LAG)
                    replaced += 1
    assert not load.failed
    # Each of them had its share.
    assert len(load.answered) == REPLICAS + replaced
    print(f"{load.answered.total()} calls, {replaced} replicas replaced")


async def replace(node: Kubelet, running: Gateway, pods: list[Pod], at: int) -> None:
    """A new pod first; the old one is taken out when it has begun to end, and some time later."""
    used = {pod.port for pod in pods}
    port = next(port for port in iter(lambda: unused_ports()[0], None) if port not in used)
    old, pods[at] = pods[at], await node.start(port)
    await asyncio.sleep(LAG)
    running.route([pod.port for pod in (*pods, old)], [])
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(node.stop(old))
        await asyncio.sleep(LAG)
        running.route([pod.port for pod in pods], [])


async def test_behind_a_proxy(tmp_path: Path, chart: Callable[..., Any]) -> None:
    ports = {port for _ in range(REPLICAS) for port in unused_ports()}
    load = Load()
    with kubelet(tmp_path, chart) as node:
        pods = list(await asyncio.gather(*map(node.start, sorted(ports)[:REPLICAS])))
        async with gateway(tmp_path) as running:
            running.route([pod.port for pod in pods], [])
            async with grpc.aio.insecure_channel(f"127.0.0.1:{running.port}") as channel, load.over(channel):
                replaced = 0
                while replaced < REPLICAS or load.answered.total() < CALLS:
                    for at in range(REPLICAS):
                        await replace(node, running, pods, at)
                        replaced += 1
    assert not load.failed
    assert len(load.answered) == REPLICAS + replaced
    print(f"{load.answered.total()} calls, {replaced} replicas replaced")


async def test_without_a_delay_calls_fail_that_a_proxy_still_sends(
    tmp_path: Path, chart: Callable[..., Any]
) -> None:
    first, second = unused_ports()
    load = Load()
    with kubelet(tmp_path, chart, shutdown={"drain": 0}) as node:
        pods = list(await asyncio.gather(node.start(first), node.start(second)))
        async with gateway(tmp_path) as running:
            running.route([pod.port for pod in pods], [])
            async with grpc.aio.insecure_channel(f"127.0.0.1:{running.port}") as channel, load.over(channel):
                await replace(node, running, pods, 0)
    assert load.failed
    assert load.answered
