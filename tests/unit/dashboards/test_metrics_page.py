"""docs/metrics.md lists every metric as it is exported."""

from __future__ import annotations

import re
from pathlib import Path

from recpoint.counting import CAUSES
from recpoint.dashboards.alert_rules import alert_rules
from recpoint.dashboards.metrics.table import METRICS

PAGE = Path(__file__).resolve().parents[3] / "docs" / "metrics.md"


def test_the_page_has_every_metric_with_kind_labels_and_meaning() -> None:
    rows = set(
        re.findall(r"^\| `(recpoint_\w+)` \| (\w+) \| (.*?) \| (.*) \|$", PAGE.read_text(), re.M)
    )
    assert rows == {
        (
            metric.name,
            metric.kind,
            ", ".join(f"`{label}`" for label in metric.labels) or "–",
            metric.help,
        )
        for metric in METRICS
    }


def test_the_page_has_every_cause() -> None:
    assert ", ".join(f"`{cause}`" for cause in CAUSES) + "." in PAGE.read_text()


def test_the_page_has_every_alert() -> None:
    rows = re.findall(r"^\| (`Recpoint.*?) \|", PAGE.read_text(), re.M)
    listed = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert listed == re.findall(r"- alert: (\w+)", alert_rules({}))
