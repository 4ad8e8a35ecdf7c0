"""Measures how long a trainer takes from the start of its process to its first step.

Each round starts a new Python process that builds a small model and a Checkpointer and takes one
training step. `import_seconds` measures a process that only imports recpoint and its Checkpointer.
`torch_seconds` measures a process that only imports torch, which takes most of the time. For a cold
start, the files of all installed packages and of recpoint are dropped from the kernel's page cache
before the start; with `--smoke`, which runs beside other tests, those of recpoint only.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from time import perf_counter

from benchmarks.report import Report, spread_of
from benchmarks.workload import scratch

__all__ = ["KEYS", "run"]

KEYS = ("start_cold_seconds", "start_warm_seconds", "import_seconds", "torch_seconds")

_ROOT = Path(__file__).resolve().parents[1]

#: Folders of all packages and of the standard library.
_OF_PACKAGES = ("purelib", "platlib", "stdlib")

_FIRST_STEP = """
import sys
import torch
from torch import nn
import recpoint

model = nn.ModuleDict({"user": nn.Embedding(1000, 16, sparse=True)})
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
folder = sys.argv[1]
checkpointer = recpoint.Checkpointer(
    model, [optimizer], run=folder + "/run", interval_batches=1000,
    staging=recpoint.Staging(directory=folder + "/staging"),
)
checkpointer.restore()
model["user"](torch.arange(10)).sum().backward()
optimizer.step()
checkpointer.step()
sys.stdout.write("stepped")
sys.stdout.flush()
sys.stdin.read()
"""


def run(*, smoke: bool) -> Report:
    """Measure each program once a round."""
    rounds = 1 if smoke else 7
    packages = [] if smoke else [sysconfig.get_path(name) for name in _OF_PACKAGES]
    folders = {*map(Path, packages), _ROOT / "src"}
    report = Report(name="start", columns=("program", "file cache", "seconds"))
    programs = {
        "start_warm_seconds": (_FIRST_STEP, False),
        "import_seconds": ("import recpoint; recpoint.Checkpointer; print('stepped')", False),
        "torch_seconds": ("import torch; print('stepped')", False),
        "start_cold_seconds": (_FIRST_STEP, True),
    }
    if not hasattr(os, "posix_fadvise"):
        report.leave_out(["start_cold_seconds"], "this system has no posix_fadvise")
        del programs["start_cold_seconds"]
    seconds_by_program: dict[str, list[float]] = {name: [] for name in programs}
    if not smoke:
        _seconds(_FIRST_STEP)  # writes bytecode
    for _ in range(rounds):
        for name, (program, is_cold) in programs.items():
            if is_cold:
                _drop_files(folders)
            seconds_by_program[name].append(_seconds(program))
    for name, seconds in seconds_by_program.items():
        program = name.removesuffix("_seconds")
        report.put(name, spread_of(seconds))
        report.timed(program.replace("_", ", "), seconds)
        cache = "cold" if programs[name][1] else "warm"
        report.rows.append((program, cache, report.figures[name]))
    return report


def _seconds(program: str) -> float:
    """Return the seconds until a new process has written its first byte."""
    paths = os.pathsep.join(map(str, (_ROOT / "src", _ROOT)))
    with scratch() as folder:
        started = perf_counter()
        with subprocess.Popen(
            [sys.executable, "-c", program, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": paths},
        ) as process:
            assert process.stdout is not None
            first = process.stdout.read(1)
            seconds = perf_counter() - started
            _, errors = process.communicate()
    if process.returncode or not first:
        raise RuntimeError(f"a measured process failed: {errors.decode()}")
    return seconds


def _drop_files(folders: Iterable[Path]) -> None:
    """Drop all files in these folders from the page cache."""
    for folder in folders:
        for parent, _, names in os.walk(folder, followlinks=True):
            for name in names:
                path = os.path.join(parent, name)
                if not os.path.isfile(path):
                    continue
                file = os.open(path, os.O_RDONLY)
                try:
                    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
                finally:
                    os.close(file)
