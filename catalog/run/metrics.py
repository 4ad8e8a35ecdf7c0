"""Records measured values of checkpoints, by which retention can rank them (format §6.6)."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable

from recpoint.catalog.run.pins import require_label
from recpoint.catalog.run.run import Run
from recpoint.catalog.store.contract import now_ms
from recpoint.errors import FormatError, NonFiniteValue, ObjectNotFound
from recpoint.format.naming import ManifestName
from recpoint.format.record_kinds import METRIC
from recpoint.format.retention_records import Metric

__all__ = [
    "read_metrics",
    "record_metric",
]


def record_metric(run: Run, name: ManifestName, metric: str, value: float) -> None:
    """Record a measured value of a checkpoint; it replaces an earlier value of this metric.

    Raises:
        SettingsError: no key can hold the metric's name.
        NonFiniteValue: the value is infinite or NaN, so it cannot be ranked.
        ObjectNotFound: there is no such checkpoint.
    """
    require_label("metric", metric)
    if not math.isfinite(value):
        raise NonFiniteValue(
            f"metric {metric}", found=str(value), expected="a finite number", next_step="leave it"
        )
    record = Metric(
        run=run.id,
        checkpoint=run.manifest(*name).ref,
        name=metric,
        value=float(value).hex(),
        created_ms=now_ms(),
    )
    run.records(METRIC).put(record, *name, metric)


def read_metrics(
    run: Run, wanted: Iterable[str], *, of: Container[ManifestName]
) -> dict[str, dict[ManifestName, float]]:
    """Return the values of metrics, by metric and checkpoint; leave out unreadable records.

    Args:
        run: the run.
        wanted: names of the metrics.
        of: the existing checkpoints; left-over metrics of other checkpoints are not read.
    """
    values: dict[str, dict[ManifestName, float]] = {metric: {} for metric in wanted}
    if not values:
        return values
    for named in run.records(METRIC).names():
        name = ManifestName(named.step, named.generation)
        if named.name not in values or name not in of:
            continue
        try:
            value = run.records(METRIC).read(*named).value
            values[named.name][name] = float.fromhex(value)
        except (FormatError, ObjectNotFound):
            continue
    return values
