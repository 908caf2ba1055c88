"""Measures models of scikit-learn and LightGBM on `triglot mlserver`, with the same folder on MLServer.

From the repository's root: `python -m bench.mlserver --help`. Both serve the same files, in the same environment.
On a line of its own, MLServer runs models in its own process (`parallel_workers` 0). Calls are of one row, as JSON
over REST, which is how MLServer's documentation calls it.
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from bench import measure, report, rounds, servers
from bench.measure import Subject
from bench.payloads import REST, Exchange
from bench.rounds import Measured, Plan
from bench.scenarios import Scenario
from bench.servers import ROOT
from bench.tally import BenchError

ENVIRONMENT = "mlserver_runtimes"
COLUMNS_OF_MODELS = 30
REQUEST_ID = "bench"
MODELS = {
    "sklearn": ("mlserver_sklearn.SKLearnModel", "model.joblib"),
    "lightgbm": ("mlserver_lightgbm.LightGBMModel", "model.bst"),
}
TRAIN = """
import sys
import joblib, lightgbm, numpy as np
from sklearn.linear_model import LogisticRegression
random, columns = np.random.default_rng(1), int(sys.argv[1])
x = random.random((500, columns))
y = (x[:, 0] + x[:, 1] > 1).astype(int)
joblib.dump(LogisticRegression().fit(x, y), sys.argv[2])
lightgbm.train({"objective": "binary", "verbose": -1}, lightgbm.Dataset(x, y), 100).save_model(sys.argv[3])
"""
TRIGLOT, IN_PROCESS, DEFAULT = "triglot mlserver", "MLServer, parallel_workers 0", "MLServer"
COLUMNS = ("server", "calls/s", "x MLServer", "(min-max)", "p50 ms", "p99 ms", "CPU µs", "x MLServer", "client")
GOALS = "goals: x 5 MLServer's calls/s; at most 0.5 of its memory at rest"
LEGEND = """\
Medians over rounds, in turn, one at a time; "x MLServer" is the median of the rounds' own ratios to the last line.
"!": the client was the limit."""


def write_models(folder: Path, python: Path) -> None:
    """Train the models, and write them with their settings. Raise `BenchError`."""
    for name, (implementation, file) in MODELS.items():
        (folder / name).mkdir(parents=True)
        settings = {"name": name, "implementation": implementation, "parameters": {"uri": f"./{file}"}}
        (folder / name / "model-settings.json").write_text(json.dumps(settings))
    files = [str(folder / name / file) for name, (_, file) in MODELS.items()]
    done = subprocess.run(
        [str(python), "-c", TRAIN, str(COLUMNS_OF_MODELS), *files], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise BenchError(done.stderr)


def exchange(model: str) -> Exchange:
    """Return the call of a model: a row as MLServer's documentation sends it."""
    row = [round(0.01 * at, 2) for at in range(COLUMNS_OF_MODELS)]
    tensor = {"name": "predict", "shape": [1, COLUMNS_OF_MODELS], "datatype": "FP64", "data": row}

    def check(_: Mapping[str, str], body: bytes) -> None:
        reply = json.loads(body)
        outputs = [(output["name"], output["shape"]) for output in reply.get("outputs", ())]
        if outputs != [("predict", [1, 1])]:
            raise BenchError(f"expected an output predict of shape [1, 1], got {body[:500]!r}")

    return Exchange(
        path=f"/v2/models/{model}/infer",
        headers={"Content-Type": "application/json"},
        body=json.dumps({"id": REQUEST_ID, "inputs": [tensor]}).encode(),
        reply=b"",
        check=check,
        kind=REST,
    )


def start(
    name: str, folder: Path, python: Path, core: int | None, log: Path, stack: ExitStack
) -> tuple[servers.Server, int]:
    """Start a server of the folder; returns it, and its REST port."""
    ports = {f"MLSERVER_{name}_PORT": str(servers.free_port()) for name in ("HTTP", "GRPC", "METRICS")}
    port = int(ports["MLSERVER_HTTP_PORT"])
    variables = {**ports, "MLSERVER_HOST": "127.0.0.1", "MLSERVER_METRICS_DIR": str(log.parent / "metrics")}
    if name == TRIGLOT:
        command = [str(python), "-m", "triglot", "mlserver", str(folder)]
        variables |= {"TRIGLOT_DRAIN_DELAY": "0"}
    else:
        command = [str(python.with_name("mlserver")), "start", str(folder)]
        variables["MLSERVER_DEBUG"] = "false"
        if name == IN_PROCESS:
            variables["MLSERVER_PARALLEL_WORKERS"] = "0"
    ready = partial(servers.answers_ready, port)
    started = servers.started(name, command, ready, core=core, log=log, environment=variables)
    return stack.enter_context(started), port


def measured_models(
    plan: Plan, in_flight: Sequence[int], core: int | None
) -> Iterator[tuple[str, int, list[Measured[str]]]]:
    """Yield the measurements of each model and number of calls in flight; print the memory at rest first."""
    command = [sys.executable, "tests/environments.py", ENVIRONMENT]
    made = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    python = Path(made.stdout.strip())
    with tempfile.TemporaryDirectory(prefix="triglot-bench-") as name, ExitStack() as stack:
        place = Path(name)
        write_models(place / "models", python)
        running = {
            title: start(title, place / "models", python, core, place / f"log{at}", stack)
            for at, title in enumerate((TRIGLOT, IN_PROCESS, DEFAULT))
        }
        resting = {title: server.resident_bytes() for title, (server, _) in running.items()}
        shown = (f"{title} {(size or 0) / 2**20:,.0f} MiB" for title, size in resting.items())
        print("at rest: " + ", ".join(shown), flush=True)
        for model in MODELS:
            subjects = [Subject(title, server, port, exchange(model)) for title, (server, port) in running.items()]
            for subject in subjects:
                subject.expected = measure.call_once(subject)
            for number in in_flight:
                load = partial(
                    measure.load,
                    Scenario(model, COLUMNS_OF_MODELS, number, lambda *_, model=model: exchange(model)),
                )
                yield model, number, asyncio.run(rounds.interleaved(subjects, plan, load))


def lines(measured: Sequence[Measured[str]]) -> Iterator[str]:
    """Yield the table, and whether the goal was reached."""
    *_, last = measured
    yield report.plain(COLUMNS, [rounds.row(measurement, last) for measurement in measured])
    ratio = statistics.median(rounds.ratios(measured[0], last))
    yield f"calls/s: x {ratio:.1f} of {last.setting}, goal x 5"


def main(words: Sequence[str] | None = None) -> int:
    """Measure and print; returns 1 after an error, else 0."""
    parser = argparse.ArgumentParser(prog="python -m bench.mlserver", description=__doc__.splitlines()[0])
    rounds.add_arguments(parser, 5)
    parser.add_argument(
        "--in-flight", type=int, nargs="+", default=[1, 64], help="calls in flight (default: 1 64)"
    )
    arguments = parser.parse_args(words)
    plan, cores = Plan(arguments.rounds, arguments.seconds), servers.choose_cores()
    servers.pin(cores.client)
    print(*report.machine(), f"{plan.rounds} rounds of {plan.seconds:g} s; {cores.note}", sep="\n", flush=True)
    try:
        for model, number, measured in measured_models(plan, arguments.in_flight, cores.server):
            print(f"\n{model}, {number} in flight", *lines(measured), sep="\n", flush=True)
    except BenchError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"\n{GOALS}\n{LEGEND}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
