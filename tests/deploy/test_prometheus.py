"""A Prometheus scrapes real servers: the dashboard has data, and the alerts that should be pending are."""

from __future__ import annotations

import re
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.observed import observed
from tests.deploy.prometheus_server import prometheus
from tests.deploy.shipped import RULES, dashboard_expressions, filled
from tests.waiting import until_found


async def test_a_prometheus(tmp_path: Path) -> None:
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("no Prometheus found: deploy/ is not tried with it; on Debian: apt install prometheus")
    for name in ("servers", "prometheus"):
        (tmp_path / name).mkdir()
    async with (
        observed(tmp_path / "servers") as (server, with_workers),
        prometheus(program, tmp_path / "prometheus", [server.port, with_workers.port]) as real,
    ):
        await server.calls_of_all_kinds()
        # A rate needs two scrapes at least, and shows what came after the first.
        expected = 'sum(triglot_requests_total{model="scripted",code="OK"})'
        (before,) = await until_found(lambda: real.query(expected), bool)
        await server.calls_of_all_kinds()
        await until_found(
            lambda: real.query(expected), lambda found: float(found[0]["value"][1]) > float(before["value"][1])
        )

        async def without_data() -> dict[str, str]:
            filled_in = {name: filled(expression) for name, expression, _ in dashboard_expressions()}
            return {name: text for name, text in filled_in.items() if not await real.query(text)}

        # Nothing has restarted.
        await until_found(without_data, lambda names: set(names) == {"Restarts"})
        rates = await real.query(filled("sum by (protocol) (rate(triglot_requests_total[$__rate_interval]))"))
        grown = {rate["metric"]["protocol"] for rate in rates if float(rate["value"][1]) > 0}
        assert {"kserve", "tfserving", "grps"} <= grown

        # The points on the panels of latencies lead to traces.
        (latency,) = [text for name, text, _ in dashboard_expressions() if name == "p99 latency by model A"]
        range_ = {"start": f"{time.time() - 300}", "end": f"{time.time()}"}
        exemplars = await real.ask("query_exemplars", query=filled(latency), **range_)
        assert "scripted" in {exemplar["seriesLabels"]["model"] for exemplar in exemplars}
        ids = {exemplar["labels"]["trace_id"] for series in exemplars for exemplar in series["exemplars"]}
        assert all(re.fullmatch("[0-9a-f]{32}", trace_id) for trace_id in ids)

        async def rules() -> list[Any]:
            groups = (await real.ask("rules"))["groups"]
            return [rule for group in groups for rule in group["rules"]]

        found = await until_found(rules, lambda found: all(rule["health"] != "unknown" for rule in found))
        assert [rule["name"] for rule in found] == [rule["alert"] for rule in RULES]
        assert [rule["lastError"] for rule in found if rule["health"] != "ok"] == []

        async def pending() -> set[str]:
            alerts = (await real.ask("alerts"))["alerts"]
            return {alert["labels"]["alertname"] for alert in alerts if alert["labels"].get("model") == "broken"}

        await until_found(pending, lambda names: names == {"TriglotModelNotReady", "TriglotLoadFailed"})
