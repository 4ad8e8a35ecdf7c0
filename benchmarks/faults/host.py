"""Measures the cells of one system in a process that has imported it: run by the benchmark.

`python -m benchmarks.faults.host SYSTEM OUT PLACES FAULT...` writes OUT, a JSON object. The library
that strikes file operations is preloaded into it. Each act of a cell is forked from it.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
import warnings
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.faults.matrix import cell, system_of
from benchmarks.faults.trials import Trials
from benchmarks.workload import scratch

__all__ = ["main"]


def main(arguments: list[str]) -> int:
    """Run the cells; return the exit code."""
    name, out, places, *faults = arguments
    system = system_of(name)
    result: dict[str, Any] = {"cells": {}, "versions": {}, "not_run": ""}
    try:
        import torch

        # Acts are forked: a pool of threads would not be there.
        torch.set_num_threads(1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the peers' own imports
            # torch imports torch._dynamo with the first optimizer: once here, and not in each act.
            for module in ("torch._dynamo", *system.modules):
                importlib.import_module(module)
        result["versions"] = {
            distribution: version(distribution) for distribution in system.distributions
        }
    except (ImportError, PackageNotFoundError, OSError) as error:
        result["not_run"] = str(error)
        Path(out).write_text(json.dumps(result))
        return 0
    for fault in faults:
        began = time.monotonic()
        with scratch() as folder:
            verdict = cell(Trials(system, folder, places=int(places)), fault)
        seconds = time.monotonic() - began
        result["cells"][fault] = {
            "outcome": verdict.outcome.value,
            "why": verdict.why,
            "seconds": round(seconds, 1),
        }
        print(
            f"{name}: {fault}: {verdict.outcome.value}: {verdict.why} ({seconds:.1f} s)", flush=True
        )
        Path(out).write_text(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
