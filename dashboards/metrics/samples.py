"""Collects values of metrics for a collector, without importing the library that exports them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from typing import NamedTuple

from recpoint.counting import HistogramReading
from recpoint.errors import SettingsError
from recpoint.installation import install_command

__all__ = ["MetricSample", "Samples", "require_prometheus"]


class MetricSample(NamedTuple):
    """One value of a metric, or one histogram."""

    labels: Mapping[str, str]
    value: float | HistogramReading


class Samples:
    """Samples by the name of their metric."""

    def __init__(self) -> None:
        self.by_metric: dict[str, list[MetricSample]] = {}

    def add(self, name: str, value: float | HistogramReading | None, **labels: str) -> None:
        """Add a sample of a metric, unless `value` is None."""
        if value is not None:
            self.by_metric.setdefault(name, []).append(MetricSample(labels, value))

    def add_each(
        self, name: str, values: Iterable[tuple[str, float]], *, label: str, **labels: str
    ) -> None:
        """Add a sample for each pair in `values`: the value of `label`, and the sample's value."""
        for key, value in values:
            self.add(name, value, **{label: key}, **labels)


def require_prometheus(feature: str) -> None:
    """Raise SettingsError if prometheus_client, which `feature` needs, is not installed."""
    if find_spec("prometheus_client") is None:
        raise SettingsError(
            feature,
            found="no prometheus_client installed",
            expected="prometheus_client",
            next_step=install_command("metrics"),
        )
