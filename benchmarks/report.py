"""What every benchmark prints: the machine, a table for people, one JSON line last."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

import torch

__all__ = ["Report", "alternate", "commit", "print_report"]


@dataclass(kw_only=True)
class Report:
    """The result of one benchmark, measured in this run."""

    name: str
    columns: Sequence[str]
    rows: list[Sequence[object]] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def alternate(rounds: int, *functions: Callable[[], object]) -> list[list[float]]:
    """Seconds of each function, called in turn so that a noisy moment hits all of them alike."""
    seconds: list[list[float]] = [[] for _ in functions]
    for _ in range(rounds):
        for function, taken in zip(functions, seconds, strict=True):
            start = perf_counter()
            function()
            taken.append(perf_counter() - start)
    return seconds


def median_ratio(over: Sequence[float], under: Sequence[float]) -> float:
    """Ratio of medians."""
    return statistics.median(over) / statistics.median(under)


def print_report(report: Report) -> None:
    """Print `report`; the last line is JSON."""
    print(
        f"{report.name}: {platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, "
        f"{torch.get_num_threads()} threads, Python {platform.python_version()}, commit {commit()}"
    )
    rows = [[_cell(value) for value in row] for row in report.rows]
    try:
        _print_table(list(report.columns), rows)
    except ImportError:  # rich is missing on machines that only measure kernels
        for row in [list(report.columns), *rows]:
            print("  ".join(f"{cell:>20}" for cell in row))
    for note in report.notes:
        print(note)
    figures = {key: round(value, 5) for key, value in report.figures.items()}
    print(json.dumps({"name": report.name, "figures": figures}), flush=True)


def _print_table(columns: list[str], rows: list[list[str]]) -> None:
    from rich.console import Console
    from rich.table import Table

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


def commit() -> str:
    """The commit that runs, with "-dirty" if something differs from it."""
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError:  # no git here
        return "unknown"
    return done.stdout.strip() or "unknown"
