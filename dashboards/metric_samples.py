"""Values of metrics on their way to a collector; knows nothing of any library."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from recpoint.catalog.overview.histogram import HistogramReading

__all__ = ["Sample", "Samples"]


class Sample(NamedTuple):
    """One value of a metric, or one histogram."""

    labels: Mapping[str, str]
    value: float | HistogramReading


class Samples:
    """Samples by the name of their metric."""

    def __init__(self) -> None:
        self.by_metric: dict[str, list[Sample]] = {}

    def add(self, name: str, value: float | HistogramReading | None, **labels: str) -> None:
        """Add a sample; None: there is none."""
        if value is not None:
            self.by_metric.setdefault(name, []).append(Sample(labels, value))

    def add_each(
        self, name: str, values: Iterable[tuple[str, float]], *, label: str, **labels: str
    ) -> None:
        """Add a sample for each of `values`: the value of `label`, and the sample's."""
        for key, value in values:
            self.add(name, value, **{label: key}, **labels)
