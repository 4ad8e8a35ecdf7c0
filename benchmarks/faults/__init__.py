"""Tries 25 faults on recpoint and on each peer that is installed: who loses data without a word.

`python -m benchmarks faults` measures the whole matrix, `--system NAME` and `--fault NAME` a part
of it. docs/understanding/fault-matrix.md has the table, and the rules by which it is judged.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.faults.io_faults import compiled
from benchmarks.faults.matrix import FAULTS, SYSTEMS, system_of
from benchmarks.faults.table import markdown
from benchmarks.faults.verdicts import Outcome
from benchmarks.report import Report

__all__ = ["FAULTS", "KEYS", "SYSTEMS", "run"]

KEYS = (
    "recpoint_silent",
    "recpoint_survived",
    "recpoint_applies",
    "peers_silent_max",
    "peers_survived_max",
)

_ROOT = Path(__file__).resolve().parents[2]
_PLACES = 8
#: Systems that are measured at once.
_AT_ONCE = 2
_SMOKE_SYSTEMS = ("recpoint", "torch_save")
_SMOKE_FAULTS = ("truncation", "kill at every I/O boundary", "missing increment", "unknown version")

#: What a host process found: cells by fault, versions by package, why it did not run.
Found = dict[str, Any]


def run(
    *,
    smoke: bool,
    system: str | None = None,
    fault: str | None = None,
    places: int = _PLACES,
    markdown_file: Path | None = None,
) -> Report:
    """Measure the cells.

    Args:
        smoke: two systems, few faults, two places each.
        system: only this one.
        fault: only this one.
        places: of the places where a fault could strike, so many are tried, and three times as
            many where SIGKILL strikes; 0: all.
        markdown_file: gets the table for the docs.
    """
    systems = [system] if system else list(_SMOKE_SYSTEMS if smoke else SYSTEMS)
    faults = [fault] if fault else list(_SMOKE_FAULTS if smoke else FAULTS)
    results: dict[str, Found] = {}
    with tempfile.TemporaryDirectory(prefix="recpoint-faults-") as folder:
        library = compiled(Path(folder))
        if library is None:
            reason = "no C compiler: cc, or pip install ziglang"
            results = {name: {"not_run": reason, "cells": {}, "versions": {}} for name in systems}
        else:
            with ThreadPoolExecutor(_AT_ONCE) as pool:
                host = partial(
                    _host,
                    faults=faults,
                    library=library,
                    folder=Path(folder),
                    places=2 if smoke else places,
                )
                results = dict(zip(systems, pool.map(host, systems), strict=True))
    report = Report(name="faults", columns=("fault", *(system_of(n).title for n in systems)))
    for fault_name in faults:
        report.rows.append((fault_name, *(_cell(results[name], fault_name) for name in systems)))
    _put_figures(report, results)
    report.notes += _notes(results)
    if markdown_file is not None:
        markdown_file.write_text(markdown(faults, results), encoding="utf-8")
    return report


def _host(name: str, faults: Sequence[str], library: Path, folder: Path, places: int) -> Found:
    """Run the cells of a system in a process of their own."""
    out = folder / f"{name}.json"
    command = [sys.executable, "-m", "benchmarks.faults.host", name, str(out), str(places)]
    environment = {**os.environ, "LD_PRELOAD": str(library), "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    process = subprocess.run(
        [*command, *faults], cwd=_ROOT, env=environment, stdout=sys.stderr, check=False
    )
    if process.returncode:
        raise RuntimeError(
            f"{name}: the process that measures ended with code {process.returncode}"
        )
    read: Found = json.loads(out.read_text())
    return read


def _cell(result: Found, fault: str) -> str:
    if result["not_run"]:
        return "not run"
    return str(result["cells"][fault]["outcome"])


def _put_figures(report: Report, results: Mapping[str, Found]) -> None:
    counts = {
        name: [cell["outcome"] for cell in result["cells"].values()]
        for name, result in results.items()
        if not result["not_run"]
    }
    own_outcomes = counts.pop("recpoint", None)
    silent, survived = Outcome.SILENT.value, Outcome.SURVIVED.value
    if own_outcomes is None:
        reason = results.get("recpoint", {}).get("not_run") or "recpoint was not asked for"
        report.leave_out(KEYS[:3], reason)
    else:
        report.figures["recpoint_silent"] = own_outcomes.count(silent)
        report.figures["recpoint_survived"] = own_outcomes.count(survived)
        report.figures["recpoint_applies"] = len(own_outcomes) - own_outcomes.count(
            Outcome.NOT_APPLICABLE.value
        )
    if counts:
        report.figures["peers_silent_max"] = max(
            outcomes.count(silent) for outcomes in counts.values()
        )
        report.figures["peers_survived_max"] = max(
            outcomes.count(survived) for outcomes in counts.values()
        )
    else:
        report.leave_out(KEYS[3:], "no peer was asked for, or none is installed")


def _notes(results: Mapping[str, Found]) -> list[str]:
    """Return why each cell is what it is, with the command that shows it."""
    notes = []
    for name, result in results.items():
        if result["not_run"]:
            notes.append(f"{name}: not run: {result['not_run']}")
            continue
        versions = ", ".join(
            f"{package} {version}" for package, version in result["versions"].items()
        )
        notes.append(f"{name}: {versions}; {system_of(name).used}")
        for fault, cell in result["cells"].items():
            reason = f": {cell['why']}" if cell["why"] else ""
            command = f"python -m benchmarks faults --system {name} --fault '{fault}'"
            notes.append(f"  {fault}: {cell['outcome']}{reason} [{command}]")
    return notes
