"""The load bench runs each kind of scenario, and says of known rounds what they come to."""

import argparse
import os
import sys
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest

from bench import __main__ as every
from bench import (
    aims,
    bare,
    chart,
    lifecycle,
    load,
    native,
    other_results,
    page,
    report,
    servers,
    triton,
)
from bench.aims import CPU, P50, Aim
from bench.builds import Build, groups
from bench.comparing import Settings, compare, lines_of, measure
from bench.lifecycle import Started
from bench.measure import Round
from bench.rounds import Measured
from bench.scenarios import (
    AIO,
    BARE,
    CPP,
    H2,
    H2_THREAD,
    OVER_TRITON,
    SCENARIOS,
    TWO_WORKERS,
    Line,
    Scenario,
)
from bench.servers import Checkout
from bench.tally import BenchError
from bench.traffic import Traffic

SETTINGS = Settings(rounds=1, seconds=0.05, core=None)
CALLS = 64
"""Different ones, which are enough for rounds as short as that."""


def shortened(scenario: Scenario) -> Scenario:
    """The same with few different calls: to make them takes longer than to send them here."""

    def few(traffic: Traffic | None) -> Traffic | None:
        return traffic and replace(traffic, count=CALLS)

    lines = tuple(replace(line, traffic=few(line.traffic)) for line in scenario.lines)
    return replace(scenario, lines=lines, traffic=few(scenario.traffic))


BY_NAME = {scenario.name: shortened(scenario) for scenario in SCENARIOS}
COMPLETE_SCENARIOS = ("infer-c8", "rest-binary-1x150528-c4")
USUAL = ("h2", "rest", "bare grpc.aio", "bare aiohttp")
SVG = "{http://www.w3.org/2000/svg}"


def known(name: str, *rates: float, p50: float = 0.002) -> Measured[str]:
    return Measured(name, [Round(rate, p50, 2 * p50, 1 / rate, 0.5, 0.001) for rate in rates], peak=2**26)


@pytest.mark.parametrize(
    "names",
    [
        ("infer-c8",),
        ("protocols-c64", "kinds-c64", "clients-c64"),
        ("stream-c16",),
        ("grps-stream-c1",),
        ("rest-predict-c8",),
        ("rest-binary-1x150528-c4",),
    ],
    ids=" ".join,
)
def test_lines_are_loaded(names: tuple[str, ...]) -> None:
    """Each kind of load; each way to start a server is in the first of them, or in the last.

    Scenarios that differ only in their lines share servers.
    """
    scenario, *others = (BY_NAME[name] for name in names)
    for other in others:
        assert replace(other, name=scenario.name, lines=scenario.lines) == scenario
        scenario = replace(scenario, lines=(*scenario.lines, *other.lines))
    if scenario.name not in COMPLETE_SCENARIOS:
        scenario = replace(scenario, lines=tuple(line for line in scenario.lines if line.launch.name in USUAL))
    measured = compare(scenario, SETTINGS)
    lines = [line.name for line in lines_of(scenario)[0]]
    assert [measurement.setting for measurement in measured] == lines
    assert all(len(measurement.rounds) == 1 and measurement.rounds[0].rate > 0 for measurement in measured)
    assert all(0 < measurement.rounds[0].p50 <= measurement.rounds[0].p99 for measurement in measured)
    assert all(
        (measurement.rounds[0].cpu or 0) > 0 and (measurement.peak or 0) > 2**20 for measurement in measured
    )
    table = page.rows(scenario, measured)
    assert [line[0] for line in table] == lines
    assert table[0][2] == "1.00"
    assert all(len(line) == len(page.columns(scenario)) for line in table)


def test_servers_are_started_anew() -> None:
    scenario = replace(BY_NAME["infer-c1"], lines=(H2_THREAD,), starts=2)
    measured = compare(scenario, SETTINGS)
    assert [len(measurement.rounds) for measurement in measured] == [2]


def test_two_equal_servers_instead() -> None:
    measured = compare(BY_NAME["infer-c1"], replace(SETTINGS, aa=True))
    assert [measurement.setting for measurement in measured] == ["bare grpc.aio", "the same again"]


def test_a_server_that_does_not_start_is_an_error() -> None:
    wrong = replace(H2, name="wrong", flags=("--grpc-transport", "h2", "--no-such-option"))
    scenario = replace(BY_NAME["infer-c1"], lines=(Line("wrong", wrong),))
    with pytest.raises(BenchError, match="ended at its start"):
        compare(scenario, SETTINGS)


def test_missing_model_is_an_error() -> None:
    scenario = replace(BY_NAME["infer-c1"], lines=(Line("lost", AIO, "no_such_model"),))
    with pytest.raises(BenchError, match=r"infer-c1, lost: .*NOT_FOUND"):
        compare(scenario, SETTINGS)


def test_what_cannot_be_measured_is_left_out() -> None:
    scenario = BY_NAME["workers-c64"]
    assert "--workers" in TWO_WORKERS.flags
    assert lines_of(replace(scenario, needs="no_such_option")) == (
        [],
        ["this server has no option no_such_option"],
    )
    assert lines_of(replace(scenario, needs="", shared_cores=False)) == (list(scenario.lines), [])
    lines, reasons = lines_of(BY_NAME["clients-c64"])
    for why, rest in (
        (triton.left_out(), [line for line in lines if line.launch.triton]),
        (native.left_out(), [line for line in lines if line.client == CPP]),
    ):
        assert bool(why) != bool(rest)
        assert why in (*reasons, "")


def test_triton_is_named_by_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(triton.VARIABLE, raising=False)
    triton.left_out.cache_clear()
    assert triton.left_out() == "tritonserver was not measured: TRITON does not name its binary"
    monkeypatch.setenv(triton.VARIABLE, "/nowhere/tritonserver")
    triton.left_out.cache_clear()
    assert "/nowhere/tritonserver" in triton.left_out()
    triton.left_out.cache_clear()


def test_against_another_checkout(tmp_path: Path) -> None:
    """Its server is the one that runs, and is given no option that it does not know."""
    scenario = replace(BY_NAME["infer-c8"], lines=(H2_THREAD, BARE))
    (tmp_path / "server").mkdir()
    (tmp_path / "server" / "triglot").symlink_to(servers.ROOT / "server" / "triglot")
    measured = compare(scenario, replace(SETTINGS, against=Checkout(tmp_path)))
    names = [measurement.setting for measurement in measured]
    assert names == ["h2, thread", f"h2, thread, {tmp_path}"]
    table = page.pair_rows(measured)
    assert [row[0] for row in table] == ["h2, thread"]
    assert all(len(row) == len(page.PAIR_COLUMNS) for row in table)


def test_lines_of_builds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each line of our server runs under every build, after the same call to Triton's."""
    monkeypatch.setattr(triton, "left_out", str)
    made = [Build("pure"), Build("again", Checkout(servers.ROOT), sys.executable)]
    kinds = dict(groups(BY_NAME["kinds-c64"], made))
    assert kinds.keys() >= {"two models in turn, h2", "BYTES, h2"}
    for lines in kinds.values():
        assert [line.name for line in lines] == [OVER_TRITON.name, "pure", "again"]
        assert len({replace(line, name="", launch=H2) for line in lines}) == 1
    monkeypatch.undo()
    scenario = replace(BY_NAME["infer-c8"], lines=(BARE, H2_THREAD))
    ((what, lines),) = groups(scenario, made)
    measured = measure(scenario, lines, SETTINGS)
    assert (what, [measurement.setting for measurement in measured]) == ("h2, thread", ["pure", "again"])
    assert all(measurement.rounds for measurement in measured)


@pytest.mark.parametrize(
    ("arguments", "flags", "folder", "expected"),
    [
        (
            "'--enable-optimizations' '--with-lto'",
            "-O3 -Wall",
            "/usr/local",
            "optimised: --enable-optimizations, -O3",
        ),
        ("", "-g -O3 -fwrapv -O2", "/usr", "optimised: Debian's, with a profile, -O2"),
        ("'--prefix=/opt'", "-O3", "/opt", "not optimised: without --enable-optimizations, -O3"),
        ("", "", "/opt", "not optimised: without --enable-optimizations"),
    ],
)
def test_build_of_an_interpreter(arguments: str, flags: str, folder: str, expected: str) -> None:
    build = {"arguments": arguments, "flags": flags, "folder": folder}
    assert report.how_built(build, debian=True) == expected


def test_against_options_that_are_not_known(tmp_path: Path) -> None:
    package = tmp_path / "server" / "triglot"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "config").mkdir()
    (package / "config" / "options.py").write_text("OPTIONS = {'grpc_transport': 0, 'grpc_port': 0}")
    scenario = replace(BY_NAME["infer-c8"], lines=(H2_THREAD, BARE, Line("2 workers", TWO_WORKERS)))
    lines, _ = lines_of(scenario, Checkout(tmp_path))
    assert [line.name for line in lines] == ["h2, thread", f"h2, thread, {tmp_path}"]
    assert Checkout(tmp_path).options() == {"--grpc-transport", "--grpc-port"}
    with pytest.raises(BenchError, match=r"no server/triglot|does not start"):
        Checkout(tmp_path / "nowhere").options()


def test_names_are_unique() -> None:
    assert len(BY_NAME) == len(SCENARIOS)
    for scenario in SCENARIOS:
        names = [line.name for line in scenario.lines]
        assert len(set(names)) == len(names)
        launches = {line.launch.name: line.launch for line in scenario.lines}
        assert all(launches[line.launch.name] == line.launch for line in scenario.lines)


def test_each_aim_is_of_lines_that_are_measured() -> None:
    for aim in aims.AIMS:
        names = [line.name for line in BY_NAME[aim.scenario].lines]
        assert aim.line in names
        assert aim.than in names if aim.than else aim.kind == CPU


def test_aims() -> None:
    rate = Aim("fast", "s", "ours", "bare", 2.0)
    quick = Aim("quick", "s", "ours", "bare", 0.5, P50)
    cheap = Aim("cheap", "s", "ours", "", 40_000, CPU)
    # The median of the rounds' own ratios, 1.9, and not the ratio of the medians.
    results = {"s": [known("bare", 10, 10, 20, p50=0.004), known("ours", 19, 30, 30, p50=0.002)]}
    assert rate.measured(results) == 1.9
    assert not rate.met(1.99999)
    assert rate.met(2.0)
    assert quick.measured(results) == 0.5
    assert quick.met(0.5)
    assert not quick.met(0.501)
    assert cheap.measured(results) == pytest.approx(1e6 / 30)
    assert cheap.met(40_000)
    assert not cheap.met(40_001)
    assert rate.measured({}) is cheap.measured({}) is None
    assert replace(rate, than="none").measured(results) is None
    table = aims.rows({"infer-c8": [known("h2, thread, identical calls", 1000), known("h2, thread", 799)]})
    what = "the same, 8 in flight on one connection"
    assert [what, "at least 0.8 times h2, thread, identical calls", "0.80", "no"] in table
    assert ["the same", "CPU at most 55 µs a call", "1251.56", "no"] in table
    assert ["the same, one in flight", "p50 at most 0.65 of bare grpc.aio's", "not measured", ""] in table


def test_what_other_benches_say(tmp_path: Path) -> None:
    assert not other_results.rows(tmp_path)
    assert not list(other_results.quoted_lines(tmp_path))
    starts = [Started("h2", [0.85, 0.95], [2**20 * 91]), Started("aio", [1.2], [2**20 * 90])]
    (tmp_path / "lifecycle.txt").write_text("\n".join(map(lifecycle.start_line, starts)))
    (tmp_path / "storage.txt").write_text("a table\nbatched / unbatched: 12.2, goal 8\n")
    assert other_results.rows(tmp_path) == [
        ["start to ready, over h2", "at most 1 s", "0.90 s", "yes"],
        ["resident at rest, over h2", "at most 65 MiB", "91 MiB", "no"],
        ["start to ready, over aio", "at most 1 s", "1.20 s", "no"],
        ["resident at rest, over aio", "at most 90 MiB", "90 MiB", "yes"],
    ]
    scenario = BY_NAME["infer-c8"]
    measured = [known("h2, thread, identical calls", 100, 120), known("h2, thread", 700, 840)]
    text = page.page([(scenario, measured)], ["3 rounds"], "speed.svg", tmp_path)
    aim = (
        "| the same, 8 in flight on one connection | at least 0.8 times h2, thread, identical calls | 7.00 | yes |"
    )
    assert aim in text
    assert "| resident at rest, over h2 | at most 65 MiB | 91 MiB | no |" in text
    assert "(speed.svg)" in text
    assert "- [storage.txt](storage.txt): batched / unbatched: 12.2, goal 8" in text
    assert "| h2, thread | 770 | 7.00 | (7.00-7.00) | 2 | 4 | 1,310 | 0.14 | 64 | 50% |" in text


def test_chart() -> None:
    groups = [
        chart.Group("a < b & c", [("bare", 1.0), ("ours", 4.0)]),
        chart.Group("another", [("bare", 1.0), ("none", 0.0)]),
    ]
    root = ET.fromstring(chart.svg("figures", groups, "×"))
    bars = [element for element in root.findall(f"{SVG}rect") if element.get("x")]
    widths = [float(bar.attrib["width"]) for bar in bars]
    assert widths[1] == pytest.approx(4 * widths[0], abs=0.2)
    assert widths[2] == widths[1]
    assert widths[3] < widths[0]
    assert max(widths) + float(bars[0].attrib["x"]) < int(root.attrib["width"])
    assert bars[0].attrib["fill"] == bars[2].attrib["fill"] != bars[1].attrib["fill"]
    assert float(bars[-1].attrib["y"]) + chart.BAR < int(root.attrib["height"])
    texts = [element.text for element in root.findall(f"{SVG}text")]
    assert "a < b & c" in texts
    assert "4.00×" in texts
    assert (
        ET.fromstring(page.drawn([(BY_NAME["infer-c8"], [known("bare", 1), known("ours", 3)])])).tag == f"{SVG}svg"
    )


def test_the_whole_way_to_a_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "SCENARIOS", tuple(BY_NAME.values()))
    output = tmp_path / "page.md"
    words = ["--only", "rest-json-c64", "--rounds", "1", "--seconds", "0.05", "--output", str(output)]
    # It pins this process, and what other tests start here later would be pinned, too.
    with servers.on_cores(frozenset(os.sched_getaffinity(0) if sys.platform == "linux" else ())):
        assert load.main(words) == 0
    assert "rest, thread" in capsys.readouterr().out
    assert "## rest-json-c64" in output.read_text()
    assert ET.parse(output.with_suffix(".svg")).getroot().tag == f"{SVG}svg"


def test_a_bench_is_kept(tmp_path: Path) -> None:
    assert every.keep("load", ["--list"], tmp_path)
    assert [line.split()[0] for line in (tmp_path / "load.txt").read_text().splitlines()] == list(BY_NAME)
    assert not every.keep("load", ["--only", "nothing like it"], tmp_path)
    assert (tmp_path / "load.txt").read_text() == "ended with 1\n"


# --- bare servers ---


def test_channel_arguments() -> None:
    assert bare.argument("grpc.http2.max_frame_size=16777215") == ("grpc.http2.max_frame_size", 16777215)
    assert bare.argument("a=-1") == ("a", -1)
    assert bare.argument("grpc.optimization_target=throughput") == ("grpc.optimization_target", "throughput")
    with pytest.raises(argparse.ArgumentTypeError, match="NAME=VALUE"):
        bare.argument("grpc.http2.max_frame_size")


def test_versions_are_printed() -> None:
    assert any("uvloop" in line for line in report.machine())
