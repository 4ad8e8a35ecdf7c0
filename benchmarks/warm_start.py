"""Compares a start from a 2 GB checkpoint of torch DCP with reading the bytes of its files.

The start loads two tables with Adagrad's sums and dense layers into a model, in a new process: the
index is read, everything is checked, and rows go into the model in pieces. What any trainer's start
does besides, above all making a slot for its checkpoints, is left out. Reading is a loop over the
files with one buffer of 16 MB; both find the files in the page cache. `import_peak_mb` is the peak
of memory beyond the model and its optimizer, whose pages have all been written before. The gate:
model and optimizer have the bits that were saved.
"""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_saver import save

from benchmarks.report import Report, ratio
from benchmarks.workload import ROOT, Tables, scratch
from recpoint import Seed
from recpoint.catalog.foreign.recognize import open_foreign
from recpoint.trainer_plugin.restore.warm_start import WarmStart
from recpoint.trainer_plugin.state.model import ModelState
from recpoint.trainer_plugin.state.optimizers import OptimizerState
from recpoint.trainer_plugin.state.training_state import TrainingState
from recpoint.trainer_plugin.tables import find_tables

__all__ = ["KEYS", "run"]

KEYS = ("import_vs_read", "import_peak_mb")

_DIM = 32
_BUFFER_BYTES = 16 << 20

_CHILD = """
import json, sys
from benchmarks.warm_start import load
print(json.dumps(load(sys.argv[1], rows=int(sys.argv[2]))))
"""


def run(*, smoke: bool) -> Report:
    """Measure both, one after the other, in each round."""
    rows, rounds = (4_000, 1) if smoke else (4_000_000, 5)
    report = Report(name="warm_start", columns=("what", "MB", "s", "peak MB"))
    with scratch(in_memory=False) as folder:
        directory = folder / "dcp"
        size_bytes = _save(directory, rows=rows)
        read_seconds, loads = [], []
        for _ in range(rounds):
            read_seconds.append(_read(directory))
            loads.append(_load(directory, rows=rows))
    import_seconds = [measured["seconds"] for measured in loads]
    peak_mb = max(measured["peak_bytes"] for measured in loads) / 1e6
    report.put("import_vs_read", ratio(import_seconds, read_seconds))
    report.figures["import_peak_mb"] = peak_mb
    report.timed("read", read_seconds)
    report.timed("import", import_seconds)
    report.rows.append(("read", size_bytes / 1e6, min(read_seconds), ""))
    report.rows.append(("import", size_bytes / 1e6, min(import_seconds), peak_mb))
    return report


def _trained(rows: int) -> tuple[Tables, torch.optim.Optimizer]:
    """Return tables and Adagrad, all of whose memory has been written."""
    model = Tables(count=2, rows=rows, dim=_DIM)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1, initial_accumulator_value=0.1)
    return model, optimizer


def _fill(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Give parameters and sums distinct values that depend on their place only."""
    with torch.no_grad():
        for number, tensor in enumerate(_tensors(model, optimizer)):
            flat = tensor.view(-1)
            torch.arange(flat.numel(), out=flat)
            flat.mul_(1e-3).add_(number)


def _tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    parameters = [parameter.detach() for parameter in model.parameters()]
    return parameters + [optimizer.state[parameter]["sum"] for parameter in model.parameters()]


def _save(directory: Path, *, rows: int) -> int:
    model, optimizer = _trained(rows)
    _fill(model, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that it saves in a single process
        save({"model": model.state_dict(), "opt": optimizer.state_dict()}, checkpoint_id=directory)
    return sum(file.stat().st_size for file in directory.iterdir())


def _read(directory: Path) -> float:
    buffer = bytearray(_BUFFER_BYTES)
    started = perf_counter()
    for path in directory.iterdir():
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    return perf_counter() - started


def _load(directory: Path, *, rows: int) -> dict[str, Any]:
    process = subprocess.run(
        [sys.executable, "-c", _CHILD, str(directory), str(rows)],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    measured: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    return measured


def load(directory: str, *, rows: int) -> dict[str, float]:
    """Load the checkpoint into a model of this process; return seconds and bytes.

    Raises:
        AssertionError: the model or its optimizer does not have the bits that were saved.
    """
    model, optimizer = _trained(rows)
    tables = find_tables(model, [optimizer]).tables
    state = TrainingState(
        model=ModelState(model, tables),
        optimizers=OptimizerState(model, [optimizer], tables),
        schedulers=(),
        reader=None,
        extras={},
    )
    seed = Seed(directory, tables=["*"], dense=["*"], optimizer_states="carry")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = _status_bytes("VmRSS")
    started = perf_counter()
    with open_foreign(directory) as checkpoint:
        warm_start = WarmStart(checkpoint, seed, tables, state, cache=None, elsewhere=())
        warm_start.plan()
        warm_start.load()
    seconds = perf_counter() - started
    peak_bytes = _status_bytes("VmHWM") - before
    restored = [tensor.clone() for tensor in _tensors(model, optimizer)]
    _fill(model, optimizer)
    assert all(map(torch.equal, restored, _tensors(model, optimizer)))
    return {"seconds": seconds, "peak_bytes": peak_bytes}


def _status_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024
