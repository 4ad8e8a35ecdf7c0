"""Several ranks on one host: what agreeing costs beside the copy, and what dividing rows saves.

One model of a fixed size is divided by tables among 1, 2 and 4 processes; 4 MB of dense layers are
on each of them, are compared at each cut, and are copied by the first. The stall is measured by
the training loop of each rank; what a rank's own cut takes is taken off the slowest rank's, and the
rest is coordination: two exchanges, and waiting for the slowest. On fewer cores than ranks the
copies take turns, so that the stall of the whole cannot fall below that of one process.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.report import Report
from recpoint import Checkpointer
from recpoint.catalog.persisting import persist
from recpoint.catalog.staging import staged
from recpoint.errors import RanksMissing
from recpoint.trainer_plugin.cutter import Cut, Cutter

__all__ = ["run"]

_DIM = 64
_TABLES = 4
_WIDTH, _LAYERS = 512, 4
_DIRTY_SHARE = 0.26
_PATIENCE_SECONDS = 600.0


def run(*, quick: bool) -> Report:
    """Measure it."""
    rows, checkpoints = (100_000, 5) if quick else (1_000_000, 9)
    report = Report(
        name="ranks",
        columns=("ranks", "rows a rank", "stall ms", "own cut ms", "coordination ms", "persist s"),
    )
    stalls: dict[int, float] = {}
    for ranks in (1, 2, 4):
        found, persist_seconds = _job(ranks, rows, checkpoints)
        each = [list(values) for values in zip(*(one["stalls_ms"] for one in found), strict=True)]
        cuts = [max(values) for values in zip(*(one["cuts_ms"] for one in found), strict=True)]
        stall = [max(values) for values in each]
        # The first is a full.
        stalls[ranks] = statistics.median(stall[1:])
        between = [whole - own for whole, own in zip(stall[1:], cuts[1:], strict=True)]
        coordination = statistics.median(between)
        report.rows.append(
            (
                ranks,
                rows // ranks,
                stalls[ranks],
                statistics.median(cuts[1:]),
                coordination,
                persist_seconds,
            )
        )
        report.figures[f"coordination_ms_{ranks}"] = coordination
        report.figures[f"persist_seconds_{ranks}"] = persist_seconds
    report.figures["coordination_ms"] = report.figures["coordination_ms_4"]
    report.figures["stall_4_vs_1"] = stalls[4] / stalls[1]
    report.notes.append(
        f"{rows:,} rows of {_DIM} F32 values over all ranks, {_DIRTY_SHARE:.0%} of them dirty; "
        "medians of increments; persist: of the full, one agent's work after another"
    )
    return report


def _job(ranks: int, rows: int, checkpoints: int) -> tuple[list[dict[str, Any]], float]:
    """What each rank measured, and seconds that agents need for the full of all ranks."""
    with tempfile.TemporaryDirectory(prefix="recpoint-ranks-") as name:
        folder = Path(name)
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", "benchmarks.ranks", name, *map(str, (rank, ranks, rows))]
                + [str(checkpoints)],
                stdout=subprocess.PIPE,
            )
            for rank in range(ranks)
        ]
        found = []
        for process in processes:
            out, _ = process.communicate(timeout=_PATIENCE_SECONDS)
            if process.returncode:
                raise RuntimeError(f"a rank ended with {process.returncode}")
            found.append(json.loads(out.splitlines()[-1]))
        (run,) = staged.run_directories(folder / "staging")
        fulls = [path for path in staged.staged_jobs(run) if staged.read_job(path).kind == "full"]
        started = time.perf_counter()
        for path in fulls:
            try:
                persist.persist_job(path)
            except RanksMissing:
                continue  # its part is stored; the last one commits
        return found, time.perf_counter() - started


def _rank(folder: Path, rank: int, ranks: int, rows: int, checkpoints: int) -> None:
    torch.set_num_threads(1)
    if ranks > 1:
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=ranks
        )
    tables = {
        f"t{n}": nn.Embedding(rows // _TABLES, _DIM, sparse=True)
        for n in range(rank, _TABLES, ranks)
    }
    torch.manual_seed(0)  # dense layers are alike on all ranks, and stored by the first
    dense = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(_LAYERS)))
    model = nn.ModuleDict({**tables, "dense": dense})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    cuts_ms = _measure_cuts()
    generator = torch.Generator().manual_seed(rank)
    with Checkpointer(
        model,
        optimizer,
        run=str(folder / "run"),
        staging=folder / "staging",
        interval_batches=10**9,
        max_staged_jobs=checkpoints,
        close_wait_seconds=0.0,
    ) as checkpointer:
        checkpointer.restore()
        for number in range(checkpoints):
            for table in tables:
                ids = torch.randperm(rows // _TABLES, generator=generator)
                checkpointer.mark(table, ids[: int(_DIRTY_SHARE * len(ids))])
            checkpointer.step()
            if ranks > 1:
                dist.barrier()  # as the gradients of a batch do
            if not checkpointer.checkpoint():
                raise RuntimeError(f"checkpoint {number} was not cut: {checkpointer.stats}")
        stalls_ms = list(checkpointer.stats.stalls_ms)[:checkpoints]
    print(json.dumps({"stalls_ms": stalls_ms, "cuts_ms": cuts_ms[:checkpoints]}))
    if ranks > 1:
        dist.destroy_process_group()


def _measure_cuts() -> list[float]:
    """Milliseconds of each cut of this process, without what ranks say to each other."""
    found: list[float] = []
    cut = Cutter.cut

    def measured(cutter: Cutter, *args: Any, **kwargs: Any) -> Cut:
        started = time.perf_counter()
        try:
            return cut(cutter, *args, **kwargs)
        finally:
            found.append(1e3 * (time.perf_counter() - started))

    setattr(Cutter, "cut", measured)  # noqa: B010
    return found


if __name__ == "__main__":
    _rank(Path(sys.argv[1]), *map(int, sys.argv[2:]))
