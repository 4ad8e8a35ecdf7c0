"""Measures keyed tables: the map from keys to slots, against a dictionary and sorted arrays."""

from __future__ import annotations

from benchmarks import key_map
from benchmarks.report import Report

__all__ = ["KEYS", "run"]

KEYS = key_map.KEYS


def run(*, smoke: bool) -> Report:
    """Measure the map."""
    report = Report(name="keyed", columns=("does", "slots", "key_map", "sorted arrays", "dict"))
    key_map.measure(report, smoke=smoke)
    report.notes.append("Millions in a second of one core, in batches of 50,000 keys.")
    return report
