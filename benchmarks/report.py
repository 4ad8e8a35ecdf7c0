"""Prints the report of a benchmark: the machine, tables for people, one JSON line last."""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, NamedTuple

import torch

from benchmarks.machine import Busy, commit

__all__ = [
    "Report",
    "Spread",
    "alternate",
    "as_json",
    "print_report",
    "ratio",
    "seconds_text",
    "spread_of",
]


class Spread(NamedTuple):
    """A value that was measured in several rounds; spreads are compared by their medians.

    Attributes:
        median: of the rounds; for a ratio, the ratio of both medians.
        least: the least value of a round.
        most: the largest value of a round.
        rounds: number of rounds.
    """

    median: float
    least: float
    most: float
    rounds: int


def spread_of(values: Sequence[float]) -> Spread:
    """Return the spread of `values`, one for each round."""
    return Spread(statistics.median(values), min(values), max(values), len(values))


def ratio(over: Sequence[float], under: Sequence[float]) -> Spread:
    """Return the ratio of the medians, with the spread of the ratios within each round."""
    ratios = [a / b for a, b in zip(over, under, strict=True)]
    median = statistics.median(over) / statistics.median(under)
    return Spread(median, min(ratios), max(ratios), len(ratios))


@dataclass(kw_only=True)
class Report:
    """The result of one benchmark, measured in this run.

    Attributes:
        name: of the benchmark.
        columns: headings of `rows`.
        rows: the table for people.
        figures: key -> value; the keys are the same in every run.
        spreads: key -> spread of the figure.
        times: what was timed -> its seconds.
        not_run: key of a figure that this machine cannot measure -> the reason.
        notes: lines for people, below the tables.
    """

    name: str
    columns: Sequence[str]
    rows: list[Sequence[object]] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)
    spreads: dict[str, Spread] = field(default_factory=dict)
    times: dict[str, Spread] = field(default_factory=dict)
    not_run: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def put(self, key: str, spread: Spread) -> None:
        """Set the figure `key` and its spread."""
        self.figures[key] = spread.median
        self.spreads[key] = spread

    def timed(self, label: str, seconds: Sequence[float]) -> float:
        """Record the seconds of each round of `label`; return their median."""
        self.times[label] = spread_of(seconds)
        return self.times[label].median

    def leave_out(self, keys: Iterable[str], reason: str) -> None:
        """Record that the figures `keys` were not measured, and why."""
        self.not_run |= dict.fromkeys(keys, reason)


def alternate(
    rounds: int, *functions: Callable[[], object], clock: Callable[[], float] = perf_counter
) -> list[list[float]]:
    """Time functions in turn, so that noise hits all alike; return each function's seconds."""
    seconds: list[list[float]] = [[] for _ in functions]
    for _ in range(rounds):
        for function, times in zip(functions, seconds, strict=True):
            start = clock()
            function()
            times.append(clock() - start)
    return seconds


def print_report(report: Report, *, smoke: bool, busy: Busy | None) -> None:
    """Print `report`; the last line is JSON.

    Args:
        report: of the benchmark.
        smoke: whether its sizes were too small for its figures to mean anything.
        busy: how busy the machine was meanwhile; None: unknown.
    """
    print(
        f"{report.name}: {platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, "
        f"{torch.get_num_threads()} threads, Python {platform.python_version()}, commit {commit()}"
    )
    _print_table(report.columns, [[_cell(value) for value in row] for row in report.rows])
    measured: list[tuple[str, Spread, Callable[[float], str]]] = [
        (label, spread, seconds_text) for label, spread in report.times.items()
    ]
    measured += [(key, spread, _cell) for key, spread in report.spreads.items()]
    if measured:
        _print_table(
            ("spread over rounds", "rounds", "least", "median", "most"),
            [
                [name, str(s.rounds), *(text(value) for value in (s.least, s.median, s.most))]
                for name, s, text in measured
            ],
        )
    for note in report.notes:
        print(note)
    for key, reason in report.not_run.items():
        print(f"{key}: not run: {reason}")
    if smoke:
        print("smoke: sizes are tiny, and figures mean nothing")
    if busy is not None:
        print(busy)
    document = as_json(report, smoke=smoke, busy=busy)
    print(json.dumps(document, allow_nan=False), flush=True)


def as_json(report: Report, *, smoke: bool, busy: Busy | None) -> dict[str, Any]:
    """Return the document that `print_report` prints as its last line."""
    return {
        "name": report.name,
        "smoke": smoke,
        "figures": {key: round(value, 5) for key, value in report.figures.items()},
        "spreads": {key: _rounded(spread) for key, spread in report.spreads.items()},
        "times": {label: _rounded(spread) for label, spread in report.times.items()},
        "not_run": report.not_run,
        "busy": None if busy is None else busy.as_json(),
    }


def _rounded(spread: Spread) -> dict[str, float]:
    return {k: float(f"{v:.5g}") for k, v in spread._asdict().items()} | {"rounds": spread.rounds}


def seconds_text(seconds: float) -> str:
    """Return seconds as text, in a suitable unit."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if abs(seconds) >= size:
            return f"{seconds / size:,.4g} {unit}"
    return f"{1e6 * seconds:,.4g} us"


def _print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:  # rich is not installed on machines that only measure kernels
        for row in [columns, *rows]:
            print("  ".join(f"{cell:>20}" for cell in row))
        return
    table = Table()
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right")
    for row in rows:
        table.add_row(*row)
    Console(width=120).print(table)


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)
