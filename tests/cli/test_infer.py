"""`triglot infer`: a first call of a running server."""

from __future__ import annotations

import codecs
import json
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import trustme

from tests.access.access_files import client, write
from tests.process import FREE_PORTS, SECONDS, Triglot, run_triglot, triglot_command, write_model

ECHO = """
import triglot

class Echo(triglot.Model):
    inputs = [triglot.TensorSpec("x", "{datatype}", [-1, 2])]
    outputs = [triglot.TensorSpec("y", "{datatype}", [-1, 2])]

    def infer(self, inputs):
        return {{"y": inputs["x"]}}
"""
TWO_INPUTS = """
import triglot

class Two(triglot.Model):
    takes_parameters = True
    inputs = [triglot.TensorSpec("a", "INT32", [1]), triglot.TensorSpec("b", "BYTES", [1])]
    outputs = [triglot.TensorSpec("text", "BYTES", [1])]

    def infer(self, inputs, call):
        text = f"{inputs['a'][0]} {inputs['b'][0].decode()} {call.parameters.get('more')!r}"
        return {"text": [text]}
"""
WORDS = """
import triglot

class Words(triglot.Model):
    inputs = [triglot.TensorSpec("text", "BYTES", [1])]
    outputs = [triglot.TensorSpec("word", "BYTES", [1])]

    def infer(self, inputs):
        for word in inputs["text"][0].decode().split():
            if word == "fail":
                raise triglot.InvalidArgument("no such word")
            yield {"word": [word]}
"""
LATE = """
import asyncio
import triglot

class Late(triglot.Model):
    inputs = outputs = [triglot.TensorSpec("x", "FP32", [-1])]

    async def infer(self, inputs):
        await asyncio.Event().wait()
"""
LARGE = ECHO.replace("[-1, 2]", "[2000, 1000]").format(datatype="FP32")
DATATYPES: dict[str, list[object]] = {
    "BOOL": [True, False],
    "INT8": [-128, 127],
    "INT64": [-(2**63), 2**63 - 1],
    "UINT64": [0, 2**64 - 1],
    "FP16": [1.5, -2.0],
    "BF16": [1.5, -2.0],
    "FP32": [0.1, 2.0],
    "FP64": [0.1, 2.0],
    "BYTES": ["a", "ü"],
}


@dataclass(frozen=True)
class Served:
    """A server of the models above, and calls of it."""

    port: int

    def infer(self, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        """`triglot infer ARGUMENTS`, to its end."""
        return run_triglot("infer", "--url", f"127.0.0.1:{self.port}", *arguments)

    def json(self, *arguments: str | Path) -> list[dict[str, object]]:
        """Each answer of one that goes well."""
        completed = self.infer(*arguments)
        assert completed.returncode == 0, completed.stderr
        return list(map(json.loads, completed.stdout.splitlines()))

    def error(self, *arguments: str | Path, status: int = 2) -> str:
        """What one says that fails: one line."""
        completed = self.infer(*arguments)
        assert (completed.returncode, completed.stdout) == (status, "")
        (line,) = completed.stderr.splitlines()
        return line.removeprefix("triglot: ")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("models")
    for datatype in DATATYPES:
        write_model(folder / datatype.lower(), ECHO.format(datatype=datatype))
    write_model(folder / "two", TWO_INPUTS)
    write_model(folder / "words", WORDS)
    write_model(folder / "large", LARGE)
    write_model(folder / "late", LATE)
    for version in ("1", "3"):
        write_model(folder / "versions" / version, ECHO.format(datatype="INT32"))
    with Triglot(folder, *FREE_PORTS) as server:
        yield Served(server.ports()[0])


def output(name: str, datatype: str, shape: list[int], data: object) -> dict[str, object]:
    return {"name": name, "datatype": datatype, "shape": shape, "data": data}


# --- values ---


@pytest.mark.parametrize("datatype", DATATYPES)
def test_json_of_each_datatype_comes_back(served: Served, datatype: str) -> None:
    data = DATATYPES[datatype]
    (answer,) = served.json(datatype.lower(), f"x={json.dumps([data, data])}")
    assert answer == {
        "model_name": datatype.lower(),
        "model_version": "1",
        "outputs": [output("y", datatype, [2, 2], data * 2)],
    }


def test_missing_dimensions_come_in_front(served: Served) -> None:
    (answer,) = served.json("fp32", "x=[1,2]")
    assert answer["outputs"] == [output("y", "FP32", [1, 2], [1.0, 2.0])]
    (answer,) = served.json("two", "a=7", "b=some text")
    assert answer["outputs"] == [output("text", "BYTES", [1], ["7 some text None"])]


def test_parameters_of_the_request(served: Served) -> None:
    for text, value in (("more=1", "1"), ("more=true", "True"), ("more=0.5", "0.5"), ("more=abc", "'abc'")):
        (answer,) = served.json("two", "a=7", "b=c", "--parameter", text)
        assert answer["outputs"] == [output("text", "BYTES", [1], [f"7 c {value}"])]


def test_values_from_files(served: Served, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.array([[1, 2], [3, 4]]))
    (tmp_path / "x.json").write_text("[[1, 2], [3, 4]]")
    for name in ("x.npy", "x.json"):
        (answer,) = served.json("fp32", f"x=@{tmp_path / name}")
        assert answer["outputs"] == [output("y", "FP32", [2, 2], [1.0, 2.0, 3.0, 4.0])]
    (tmp_path / "text").write_text("[of a file]")
    (answer,) = served.json("two", "a=7", f"b=@{tmp_path / 'text'}")
    assert answer["outputs"] == [output("text", "BYTES", [1], ["7 [of a file] None"])]


def test_standard_input(served: Served) -> None:
    command = triglot_command(("infer", "fp32", "x=@-", "--url", f"127.0.0.1:{served.port}"))
    done = subprocess.run(command, input="[5, 6]", capture_output=True, text=True, timeout=SECONDS, check=True)
    assert json.loads(done.stdout)["outputs"][0]["data"] == [5.0, 6.0]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["fp32", "x=abc"], "input 'x': expected JSON with FP32 elements, like [1.5, 2], or @FILE, got 'abc'"),
        (
            ["fp32", 'x=["a", 1]'],
            "input 'x': element 0 must be a number for FP32, got a string 'a'; the model takes FP32",
        ),
        (["int8", "x=[1.5, 2]"], "element 0 must be an integer for INT8, got a number 1.5"),
        (["int8", "x=[300, 2]"], "outside INT8's range [-128, 127]"),
        (["fp32", "x=[[1, 2], [3]]"], "input 'x': expected lists of equal length within a list"),
        (["fp32", "x=@no/such/file"], "input 'x': no/such/file: No such file or directory"),
        (["fp32", f"x=@{__file__}"], "expected JSON with FP32 elements"),
        (["fp32", "y=1"], "unknown input 'y'; model 'fp32' takes x FP32 [-1,2]"),
        (["fp32", "1"], "an input: expected NAME=VALUE, got '1'"),
        (["fp32", "--parameter", "1"], "--parameter: expected NAME=VALUE, got '1'"),
        (["large"], "expected inputs as INPUT=VALUE: model 'large' takes x FP32 [2000,1000]"),
    ],
)
def test_wrong_values_are_one_line(served: Served, arguments: list[str], text: str) -> None:
    assert text in served.error(*arguments)


def test_an_array_of_another_kind(served: Served, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.array([[0.5, 1.5]]))
    assert served.error("int8", f"x=@{tmp_path}/x.npy").endswith("x.npy: expected INT8, got FP64")


# --- answers ---


def test_without_inputs_an_example_is_printed(served: Served) -> None:
    completed = served.infer("two")
    assert completed.stderr == """without inputs, an example: 'a=[1]' 'b=["text"]'\n"""
    assert json.loads(completed.stdout)["outputs"][0]["data"] == ["1 text None"]


def test_answers_for_people(served: Served) -> None:
    assert served.infer("fp32", "x=[0.1, 2]", "--no-json").stdout == "y FP32 [1,2]: [[0.1, 2. ]]\n"
    assert served.infer("bytes", 'x=["a", "ü"]', "--no-json").stdout == 'y BYTES [1,2]: "a", "ü"\n'


def test_a_decoupled_model_answers_several_times(served: Served) -> None:
    completed = served.infer("words", "text=some words come", "--no-json")
    assert completed.stdout == 'word BYTES [1]: "some"\nword BYTES [1]: "words"\nword BYTES [1]: "come"\n'
    completed = served.infer("words", "text=one fail")
    assert (completed.returncode, len(completed.stdout.splitlines())) == (1, 1)
    assert "no such word" in completed.stderr


def test_a_version(served: Served) -> None:
    for flags, version in (((), "3"), (("--model-version", "1"), "1")):
        assert served.json("versions", "x=[1, 2]", *flags)[0]["model_version"] == version


# --- what the server refuses, and no server ---


def test_unknown_model_error_lists_the_models(served: Served) -> None:
    text = served.error("fp23", status=1)
    assert text.startswith("unknown model 'fp23', did you mean 'fp32'?; models of the server: bf16, bool, ")
    text = served.error("versions", "x=[1, 2]", "--model-version", "2", status=1)
    assert text.endswith("(NOT_FOUND); versions of 'versions': 1, 3")


def test_what_the_server_refuses(served: Served) -> None:
    assert "INVALID_ARGUMENT" in served.error("fp32", "x=[1, 2, 3]", status=1)
    assert "--timeout is 0.5 s" in served.error("late", "x=[1, 2]", "--timeout", "0.5", status=1)


@pytest.mark.parametrize("url", ["127.0.0.1:1", "nowhere.invalid:8001"])
def test_no_server(url: str) -> None:
    completed = run_triglot("infer", "m", "--url", url)
    assert completed.returncode == 1
    (line,) = completed.stderr.splitlines()
    assert line.startswith(f"triglot: no gRPC server answers at {url}: ")
    assert line.endswith("start one with `triglot serve`, or check --url and --tls")


def test_servers_with_other_answers(tmp_path: Path) -> None:
    write_model(tmp_path / "fp32", ECHO.format(datatype="FP32"))
    with Triglot(tmp_path, *FREE_PORTS, "--typed-contents") as server:
        assert Served(server.ports()[0]).json("fp32", "x=[1, 2]")[0]["outputs"] == [
            output("y", "FP32", [1, 2], [1.0, 2.0])
        ]
    with Triglot(tmp_path, *FREE_PORTS, "--protocols", "tfserving") as server:
        text = Served(server.ports()[0]).error("fp32", "x=[1, 2]", status=1)
        assert "does not have this method of KServe V2" in text


def test_tls(tmp_path: Path) -> None:
    authority = trustme.CA()
    (tmp_path / "ca.pem").write_bytes(codecs.BOM_UTF8 + authority.cert_pem.bytes())
    certificate = authority.issue_cert("localhost")
    certificate.private_key_pem.write_to_path(tmp_path / "key.pem")
    certificate.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
    write_model(tmp_path / "fp32", ECHO.format(datatype="FP32"))
    flags = ("--tls-certificate", tmp_path / "cert.pem", "--tls-key", tmp_path / "key.pem")
    with Triglot(tmp_path / "fp32", *FREE_PORTS, *flags) as server:
        url = f"localhost:{server.ports()[0]}"
        completed = run_triglot("infer", "fp32", "x=[1, 2]", "--url", url, "--tls-ca", tmp_path / "ca.pem")
        assert completed.returncode == 0, completed.stderr
        # Nobody vouches for the certificate.
        assert run_triglot("infer", "fp32", "x=[1, 2]", "--url", url, "--tls").returncode == 1
    assert "--tls-ca: no/such/file: " in run_triglot("infer", "m", "--tls-ca", "no/such/file").stderr


def test_a_client_certificate(tmp_path: Path) -> None:
    authority = trustme.CA()
    ca = tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(ca)
    for name in ("localhost", "client.example"):
        issued = authority.issue_cert(name)
        issued.private_key_pem.write_to_path(tmp_path / f"{name}.key")
        issued.cert_chain_pems[0].write_to_path(tmp_path / f"{name}.pem")
    write_model(tmp_path / "fp32", ECHO.format(datatype="FP32"))
    own = ("--tls-certificate", tmp_path / "localhost.pem", "--tls-key", tmp_path / "localhost.key")
    required = ("--tls-client-ca", ca, "--tls-client-auth", "required")
    with Triglot(tmp_path / "fp32", *FREE_PORTS, *own, *required) as server:
        called = ("infer", "fp32", "x=[1, 2]", "--url", f"localhost:{server.ports()[0]}", "--tls-ca", ca)
        certificate = ("--tls-certificate", tmp_path / "client.example.pem")
        completed = run_triglot(*called, *certificate, "--tls-key", tmp_path / "client.example.key")
        assert completed.returncode == 0, completed.stderr
        assert run_triglot(*called).returncode == 1
        without_key = run_triglot(*called, *certificate)
        assert without_key.returncode == 2
        assert "--tls-certificate and --tls-key: expected both, or neither" in without_key.stderr


def test_a_token(tmp_path: Path) -> None:
    write_model(tmp_path / "models" / "fp32", ECHO.format(datatype="FP32"))
    write_model(tmp_path / "models" / "words", WORDS)
    file = tmp_path / "access.toml"
    write(
        file,
        client("reader", ["of-reader"], ["infer", "metadata"]),
        client("stranger", ["of-stranger"], ["health"]),
    )
    (tmp_path / "token").write_text("of-reader\n")
    (tmp_path / "wrong").write_text("two words\n")
    # The variable of clients is none of the server's.
    environment = {"TRIGLOT_TOKEN": "of-stranger"}
    with Triglot(tmp_path / "models", *FREE_PORTS, "--access", file, environment=environment) as server:
        call = ("infer", "--url", f"127.0.0.1:{server.ports()[0]}")
        for given, variables in (
            (("--token-file", tmp_path / "token"), environment),
            ((), {"TRIGLOT_TOKEN": "of-reader"}),
        ):
            completed = run_triglot(*call, *given, "fp32", "x=[1, 2]", environment=variables)
            assert (completed.returncode, completed.stderr) == (0, "")
            assert '"data":[1.0,2.0]' in completed.stdout
        for variables, problem in (
            ({}, "; set TRIGLOT_TOKEN or --token-file (UNAUTHENTICATED)"),
            ({"TRIGLOT_TOKEN": "of-nobody"}, "the token is unknown; set TRIGLOT_TOKEN"),
            (environment, "client 'stranger' may not use metadata (PERMISSION_DENIED)"),
        ):
            completed = run_triglot(*call, "fp32", "x=[1, 2]", environment=variables)
            assert (completed.returncode, completed.stdout) == (1, "")
            assert problem in completed.stderr
            assert "of-" not in completed.stderr
    for flag, problem in (
        ("no/such/file", "No such file"),
        (tmp_path / "wrong", "expected a token, ASCII without"),
    ):
        completed = run_triglot("infer", "--token-file", flag, "fp32")
        assert completed.returncode == 2
        assert f"--token-file: {flag}: {problem}" in completed.stderr
        assert "words" not in completed.stderr


def test_the_default_address_is_that_of_serve() -> None:
    assert "(default: 127.0.0.1:8001)" in run_triglot("infer", "--help").stdout


def test_rest_in_place_of_grpc(tmp_path: Path) -> None:
    """The error says which port was meant."""
    write_model(tmp_path)
    with Triglot(tmp_path, *FREE_PORTS) as server:
        _, rest_port = server.ports()
        done = run_triglot("infer", "--url", f"127.0.0.1:{rest_port}", "m")
        assert done.returncode == 1
        assert "speaks HTTP/1.1, as a REST port does: expected the server's gRPC port in --url" in done.stderr
    done = run_triglot("infer", "--url", "http://127.0.0.1:8000", "m")
    assert done.returncode == 2
    assert "--url: expected HOST:PORT of the server's gRPC port, which is 8001 by default" in done.stderr


def test_the_models_of_a_server(served: Served, tmp_path: Path) -> None:
    url = f"127.0.0.1:{served.port}"
    completed = run_triglot("models", "--url", url)
    assert completed.returncode == 0, completed.stderr
    heading, *rows = completed.stdout.splitlines()
    assert heading.split() == ["model", "version", "state", "reason"]
    assert ["words", "1", "READY"] in [row.split() for row in rows]
    write_model(tmp_path / "broken", "raise OSError('no weights')")
    with Triglot(tmp_path, *FREE_PORTS, "--no-exit-on-load-error") as server:
        port, _ = server.ports()
        (model,) = json.loads(run_triglot("models", "--json", "--url", f"127.0.0.1:{port}").stdout)
        assert (model["model"], model["state"]) == ("broken", "UNAVAILABLE")
        assert "no weights" in model["reason"]
    assert run_triglot("models", "extra").returncode == 2
