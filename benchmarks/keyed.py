"""Measures keyed tables: finding slots, counting keys, saying which rows leave, and training."""

from __future__ import annotations

from benchmarks import key_eviction, key_map, keyed_training
from benchmarks.report import Report

__all__ = ["KEYS", "run"]

KEYS = (*key_map.KEYS, *key_eviction.KEYS, *keyed_training.KEYS)


def run(*, smoke: bool) -> Report:
    """Measure the map, the sketch, the order of eviction, and training."""
    report = Report(name="keyed", columns=("does", "slots", "key_map", "sorted arrays", "dict"))
    key_map.measure(report, smoke=smoke)
    key_eviction.measure(report, smoke=smoke)
    keyed_training.measure(report, smoke=smoke)
    report.notes.append("The table: millions in a second of one core, in batches of 50,000 keys.")
    return report
