"""Alert rules and Grafana dashboard: form, parameters, and that they name what is exported."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from recpoint.cli.application import app
from recpoint.dashboards.alert_rules import alert_rules, grafana_dashboard, parameters
from recpoint.dashboards.metrics.table import METRICS
from recpoint.errors import SettingsError
from tests.prometheus_server import needs_prometheus

ROOT = Path(__file__).resolve().parents[3]
CASES = Path(__file__).with_name("alert_cases.yml")
RULES = ROOT / "dashboards" / "prometheus" / "alerts.yml"

runner = CliRunner()


def rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load(alert_rules({}))["groups"]
    found: list[dict[str, Any]] = group["rules"]
    return found


def panels() -> list[dict[str, Any]]:
    return [one for one in json.loads(grafana_dashboard())["panels"] if one["type"] != "row"]


def named(expression: str) -> set[str]:
    """The metrics in an expression, a histogram's series by its own name."""
    kinds = {metric.name: metric.kind for metric in METRICS}
    found = set()
    for name in re.findall(r"\b(?:recpoint|process)_\w+", re.sub(r"#.*", "", expression)):
        base = re.sub(r"_(bucket|sum|count)$", "", name)
        found.add(base if kinds.get(base) == "histogram" else name)
    return found


def test_panels_and_rules_name_only_what_is_exported_and_panels_name_all_of_it() -> None:
    exported = {metric.name for metric in METRICS}
    shown = {
        name for panel in panels() for target in panel["targets"] for name in named(target["expr"])
    }
    # Of every process that serves its own metrics, by prometheus_client.
    assert shown - exported == {"process_resident_memory_bytes"}
    assert exported - shown == set()
    for rule in rules():
        assert named(rule["expr"]) and named(rule["expr"]) <= exported, rule["alert"]
    run = json.loads(grafana_dashboard())["templating"]["list"][1]
    assert named(run["definition"]) <= exported


def test_every_rule_says_what_is_wrong_and_where_to_read_on() -> None:
    names = [rule["alert"] for rule in rules()]
    assert len(set(names)) == len(names)
    for rule in rules():
        notes = rule["annotations"]
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert "{{ $labels.run }}" in notes["summary"] and notes["description"].endswith(".")
        assert re.match(r"docs/how-to/[a-z-]+\.md\Z", notes["runbook_url"]), rule["alert"]


def test_runbook_links_lead_to_pages_that_name_their_alert() -> None:
    for rule in rules():
        page = (ROOT / rule["annotations"]["runbook_url"]).read_text(encoding="utf-8")
        assert f"`{rule['alert']}`" in page, rule["alert"]


def test_each_parameter_is_where_its_name_is_and_nowhere_else() -> None:
    text = RULES.read_text()
    for name, default in parameters().items():
        lines = [line for line in text.splitlines() if line.endswith(f" # {name}")]
        assert lines, name
        for line in lines:
            assert line.partition(" # ")[0].count(default) == 1, line
        value = "77m" if default[-1] in "smhd" and default[0].isdecimal() else "77"
        changed = alert_rules({name: value})
        assert parameters()[name] == default
        differing = [
            (old, new)
            for old, new in zip(text.splitlines(), changed.splitlines(), strict=True)
            if old != new
        ]
        assert len(differing) == len(lines) + 1, name  # and the head
        assert all(old.replace(default, value, 1) == new for old, new in differing), name
    marked = set(re.findall(r"(?m)(?<=\S) # (\w+)$", text))
    assert marked == set(parameters())


def test_wrong_parameters_are_refused() -> None:
    with pytest.raises(SettingsError, match="no such parameter"):
        alert_rules({"patients": "1m"})
    for value in ("", "1m\nx: y", "1 # y", '"', "$(x)"):
        with pytest.raises(SettingsError, match="parameter patience"):
            alert_rules({"patience": value})
    for value in ("abc", "5", "5min", "5m1h", "-5m", "m"):  # Prometheus would refuse the file
        with pytest.raises(SettingsError, match="which Prometheus would load"):
            alert_rules({"patience": value})
    for value in ("0", "0s", "0h0m"):  # no window, but a patience
        with pytest.raises(SettingsError, match="which Prometheus would load"):
            alert_rules({"stall_window": value})
        assert f"for: {value} # patience" in alert_rules({"patience": value})
    for value in ("abc", "5m", "-3", "1e", "."):
        with pytest.raises(SettingsError, match="which Prometheus would load"):
            alert_rules({"no_commit_intervals": value})
    assert "for: 1h30m # patience" in alert_rules({"patience": "1h30m"})
    for value in ("2.5", "1e3", "2.5e-1"):
        assert f"> {value} * " in alert_rules({"no_commit_intervals": value})


def test_the_command_prints_both_files_as_they_are() -> None:
    assert runner.invoke(app, ["prometheus", "rules"]).stdout == RULES.read_text()
    shown = runner.invoke(app, ["prometheus", "dashboard"]).stdout
    assert shown == (ROOT / "dashboards" / "grafana" / "recpoint.json").read_text()
    done = runner.invoke(app, ["prometheus", "rules", "--set", "patience=7h", "--json"])
    assert "for: 7h" in json.loads(done.stdout)["rules"]
    assert runner.invoke(app, ["prometheus", "rules", "--set", "patience"]).exit_code == 2
    assert runner.invoke(app, ["prometheus", "rules", "--set", "x=1"]).exit_code == 2


def test_the_dashboard_is_one_that_grafana_imports() -> None:
    document = json.loads(grafana_dashboard())
    assert document["id"] is None and document["uid"] and document["schemaVersion"] >= 36
    datasource, run = document["templating"]["list"]
    assert (datasource["type"], datasource["query"]) == ("datasource", "prometheus")
    assert run["multi"] and run["includeAll"] and run["datasource"]["uid"] == "${datasource}"
    ids = [panel["id"] for panel in document["panels"]]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in document["panels"]:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert at["x"] + at["w"] <= 24 and not cells & taken, panel["title"]
        taken |= cells
    for panel in panels():
        assert panel["title"] and panel["description"].endswith("."), panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        assert panel["datasource"]["uid"] == "${datasource}"
        for target in panel["targets"]:
            assert target["datasource"]["uid"] == "${datasource}" and target["legendFormat"]


def test_every_rule_has_cases_that_fire_and_that_do_not() -> None:
    cases = yaml.safe_load(CASES.read_text())
    assert [str((CASES.parent / path).resolve()) for path in cases["rule_files"]] == [str(RULES)]
    tried = [case for test in cases["tests"] for case in test["alert_rule_test"]]
    fires = {case["alertname"] for case in tried if case["exp_alerts"]}
    silent = {case["alertname"] for case in tried if not case["exp_alerts"]}
    assert fires == silent == {rule["alert"] for rule in rules()}


@needs_prometheus
def test_promtool_accepts_the_rules_and_their_cases() -> None:
    for command in (["check", "rules", str(RULES)], ["test", "rules", CASES.name]):
        done = subprocess.run(
            ["promtool", *command], cwd=CASES.parent, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stdout + done.stderr
