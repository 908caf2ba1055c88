"""Unmodified clients of a server that asks who they are, in the ways that each of them has for it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import grpc
import pytest
import trustme

from tests.access.access_files import anonymous, client, write
from tests.e2e.client_scripts import ClientScript, ReportOf, script_tests
from tests.e2e.server_process import ServerProcess
from tests.process import PLAIN_MODELS
from tests.protocol_clients.channel import rpc
from triglot.pb.kserve import inference_pb2 as pb

SCRIPTS = [
    ClientScript("tritonclient", "triton_credentials.py"),
    ClientScript("kserve", "kserve_credentials.py"),
]
FRIEND = client("friend", ["secret-of-friend"], ["infer"])
BODY = json.dumps({"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1, 2]}]})


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReportOf]:
    file = write(tmp_path_factory.mktemp("access") / "access.toml", FRIEND, anonymous(["health"]))
    with ServerProcess(str(PLAIN_MODELS), "--access", str(file)) as server:
        yield cache(lambda script: script.run(server))


test_check, test_every_check_is_reported_in_order = script_tests(*SCRIPTS)


class Secured:
    """A server over TLS, and what its clients need for it."""

    def __init__(self, server: ServerProcess, folder: Path, authority: trustme.CA) -> None:
        self.server, self.folder, self.authority = server, folder, authority

    def curl(self, *arguments: str) -> tuple[int, str]:
        """The status of an inference, and the body."""
        url = f"https://{self.server.rest_address}/v2/models/identity_fp32/infer"
        known = ("curl", "-sS", "--cacert", str(self.folder / "ca.pem"), "-w", "\n%{http_code}", "-d", BODY)
        done = subprocess.run([*known, *arguments, url], capture_output=True, text=True, check=True)
        body, _, status = done.stdout.rpartition("\n")
        return int(status), body

    def infer(self, credentials: grpc.ChannelCredentials) -> grpc.StatusCode:
        """What ModelInfer ends with."""
        request = pb.ModelInferRequest(model_name="identity_fp32", raw_input_contents=[b"\0" * 8])
        request.inputs.add(name="x", datatype="FP32", shape=[1, 2])
        with grpc.secure_channel(self.server.grpc_address, credentials) as channel:
            try:
                rpc(channel, "ModelInfer", pb.ModelInferResponse)(request, timeout=60)
            except grpc.RpcError as error:
                return error.code()
        return grpc.StatusCode.OK


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    folder = tmp_path_factory.mktemp("secured")
    authority = trustme.CA()
    authority.cert_pem.write_to_path(folder / "ca.pem")
    own = authority.issue_cert("localhost", "127.0.0.1")
    own.private_key_pem.write_to_path(folder / "key.pem")
    own.cert_chain_pems[0].write_to_path(folder / "certificate.pem")
    file = write(folder / "access.toml", FRIEND, anonymous(["health"]))
    files = ("--tls-certificate", str(folder / "certificate.pem"), "--tls-key", str(folder / "key.pem"))
    with ServerProcess(str(PLAIN_MODELS), "--access", str(file), *files) as server:
        yield Secured(server, folder, authority)


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (("-H", "authorization: Bearer secret-of-friend"), 200),
        (("-H", "x-api-key: secret-of-friend"), 200),
        (("-u", "friend:secret-of-friend"), 200),
        (("--oauth2-bearer", "secret-of-friend"), 200),
        (("--http1.1", "-u", "friend:secret-of-friend"), 200),
        (("-u", "friend:secret-of-nobody"), 401),
        (("-u", "stranger:secret-of-friend"), 401),
        ((), 401),
    ],
)
def test_curl(secured: Secured, arguments: tuple[str, ...], status: int) -> None:
    found, body = secured.curl(*arguments)
    assert found == status, body
    assert ("outputs" in body) == (status == 200)


@pytest.mark.parametrize(
    ("token", "code"),
    [("secret-of-friend", grpc.StatusCode.OK), ("secret-of-nobody", grpc.StatusCode.UNAUTHENTICATED)],
)
def test_grpcs_call_credentials(secured: Secured, token: str, code: grpc.StatusCode) -> None:
    """They go over TLS alone, and add the token to each call."""
    channel = grpc.ssl_channel_credentials(secured.authority.cert_pem.bytes())
    call = grpc.access_token_call_credentials(token)
    assert secured.infer(grpc.composite_channel_credentials(channel, call)) is code


def test_a_channel_without_credentials(secured: Secured) -> None:
    channel = grpc.ssl_channel_credentials(secured.authority.cert_pem.bytes())
    assert secured.infer(channel) is grpc.StatusCode.UNAUTHENTICATED
