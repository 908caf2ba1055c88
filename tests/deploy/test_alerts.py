"""The alert rules: by Prometheus' own tool, and that the server has all that they ask for."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.deploy.observed import scraped
from tests.deploy.promql import labels_of
from tests.deploy.shipped import ALERT_CASES, ALERTS, DEPLOY, RULES, alert_expressions

EXPRESSIONS = list(alert_expressions())
NAMES = [rule["alert"] for rule in RULES]
PAGE = DEPLOY.parent / "docs" / "observability.md"


@pytest.mark.parametrize(("name", "expression", "shown"), EXPRESSIONS, ids=NAMES)
def test_the_server_has_what_is_asked_for(name: str, expression: str, shown: set[str]) -> None:
    labels = labels_of(expression, scraped())
    assert labels is not None
    assert shown <= labels


@pytest.mark.parametrize("rule", RULES, ids=NAMES)
def test_every_alert_says_what_to_do(rule: dict[str, dict[str, str]]) -> None:
    assert rule["labels"]["severity"] in ("critical", "warning")
    assert rule["annotations"].keys() == {"summary", "description", "runbook"}
    page, _, anchor = rule["annotations"]["runbook"].partition("#")
    assert page == str(PAGE.relative_to(DEPLOY.parent))
    assert anchor == str(rule["alert"]).lower()
    assert f"\n### {rule['alert']}\n" in PAGE.read_text()


@pytest.fixture(scope="module")
def promtool() -> str:
    """Prometheus' tool, of Debian's package prometheus."""
    path = shutil.which("promtool")
    if path is None:
        pytest.skip("no promtool found: alert rules are not tested; on Debian: apt install prometheus")
    return path


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=60, check=False)


def test_promtool_accepts_the_rules(promtool: str) -> None:
    done = run(promtool, "check", "rules", ALERTS)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_case_holds(promtool: str) -> None:
    done = run(promtool, "test", "rules", ALERT_CASES)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("expression", ["vector(0) > 1", "vector(1)"], ids=["never", "always"])
@pytest.mark.parametrize("name", NAMES)
def test_each_alert_has_a_case_that_fires_and_one_that_does_not(
    promtool: str, name: str, expression: str, tmp_path: Path
) -> None:
    """So that the cases do not hold for an alert that never fires, or always."""
    rules = yaml.safe_load(ALERTS.read_text())
    (rule,) = [rule for group in rules["groups"] for rule in group["rules"] if rule["alert"] == name]
    rule["expr"] = expression
    (tmp_path / ALERTS.name).write_text(yaml.safe_dump(rules))
    cases = yaml.safe_load(ALERT_CASES.read_text())
    cases["tests"] = [case for case in cases["tests"] if case["name"].split()[0] == name]
    fires = [" does not fire: " not in case["name"] for case in cases["tests"]]
    assert True in fires
    assert False in fires
    # Only the cases that are to find it.
    wanted = expression != "vector(1)"
    cases["tests"] = [case for case, fire in zip(cases["tests"], fires, strict=True) if fire is wanted]
    (tmp_path / ALERT_CASES.name).write_text(yaml.safe_dump(cases))
    done = run(promtool, "test", "rules", tmp_path / ALERT_CASES.name)
    assert done.returncode == 1, done.stdout + done.stderr
