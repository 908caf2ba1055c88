"""The sample commands that a started server prints work as they are pasted."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from typing import Any

import grpc
import numpy as np
import pytest
from google.protobuf import descriptor_pool, json_format, message_factory
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from server_process import ServerProcess

from process import clean_environment

SECONDS = 30


@pytest.fixture
def hints(server: ServerProcess) -> str:
    """What the server printed; the grpcurl line is the last."""
    server.stdout.wait_for(re.compile("^grpcurl ", re.MULTILINE))
    return server.stdout.text()


def paste(command: str) -> str:
    done = subprocess.run(
        ["bash", "-c", command],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        env=clean_environment(),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    return done.stdout


def line(hints: str, program: str) -> str:
    (found,) = [line for line in hints.splitlines() if line.startswith(f"{program} ")]
    return found


def test_nothing_else_is_printed(hints: str) -> None:
    pattern = r"curl [^\n]+\npython3 <<'END'\n.+\nEND\ngrpcurl [^\n]+\n"
    assert re.fullmatch(pattern, hints, re.DOTALL), hints


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl(hints: str) -> None:
    check_rest_answer(paste(line(hints, "curl")))


def test_python(hints: str) -> None:
    found = re.search(r"^python3 <<'END'\n.*?^END$", hints, re.MULTILINE | re.DOTALL)
    assert found
    check_rest_answer(paste(found[0] + "\n"))


def check_rest_answer(text: str) -> None:
    answer = json.loads(text)
    assert answer["model_name"] == "half_plus_three"
    assert answer["outputs"] == [{"name": "y", "datatype": "FP32", "shape": [1], "data": [3.75]}]


@pytest.mark.skipif(shutil.which("grpcurl") is None, reason="grpcurl is not installed; see test_grpcurl_by_hand")
def test_grpcurl(hints: str) -> None:
    answer = json.loads(paste(line(hints, "grpcurl")))
    assert answer["modelName"] == "half_plus_three"
    assert answer["rawOutputContents"] == ["AABwQA=="]


def test_grpcurl_by_hand(hints: str) -> None:
    """What grpcurl does with its line: descriptors by reflection, the message from JSON, one call."""
    program, plaintext, flag, body, address, symbol = shlex.split(line(hints, "grpcurl"))
    assert (program, plaintext, flag) == ("grpcurl", "-plaintext", "-d")
    service, name = symbol.split("/")
    with grpc.insecure_channel(address) as channel:
        pool = descriptor_pool.DescriptorPool(ProtoReflectionDescriptorDatabase(channel))
        method = pool.FindServiceByName(service).FindMethodByName(name)
        assert method is not None
        request = json_format.Parse(body, message_factory.GetMessageClass(method.input_type)())
        call = channel.unary_unary(
            f"/{symbol}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=message_factory.GetMessageClass(method.output_type).FromString,
        )
        answer: Any = call(request, timeout=SECONDS)
    assert answer.model_name == "half_plus_three"
    assert np.frombuffer(answer.raw_output_contents[0], "<f4").tolist() == [3.75]
