"""Measures keyed tables: finding slots, who leaves, training, checkpoints, kills, and loss."""

from __future__ import annotations

from benchmarks import (
    first_values,
    key_eviction,
    key_map,
    keyed_checkpoints,
    keyed_quality,
    keyed_training,
)
from benchmarks.report import Report

__all__ = ["KEYS", "run"]

KEYS = (
    *key_map.KEYS,
    *key_eviction.KEYS,
    *first_values.KEYS,
    *keyed_training.KEYS,
    *keyed_checkpoints.KEYS,
    *keyed_quality.KEYS,
)


def run(*, smoke: bool) -> Report:
    """Measure all parts, one after the other."""
    report = Report(name="keyed", columns=("does", "slots", "key_map", "sorted arrays", "dict"))
    key_map.measure(report, smoke=smoke)
    key_eviction.measure(report, smoke=smoke)
    first_values.measure(report, smoke=smoke)
    keyed_training.measure(report, smoke=smoke)
    keyed_checkpoints.measure(report, smoke=smoke)
    keyed_quality.measure(report, smoke=smoke)
    report.notes.append("The table: millions in a second of one core, in batches of 50,000 keys.")
    return report
