"""Measures several ranks on one host: the cost of coordination, and the saving of dividing rows.

One model of a fixed size is divided by tables among 1, 2 and 4 processes. Each process has the 4 MB
of dense layers, which are compared at each cut and copied by the first process. The training loop
of each rank measures the stall. The slowest rank's stall less a rank's own cut is coordination: two
exchanges, and waiting for the slowest. With fewer cores than ranks, the copies take turns, so the
stall of all ranks cannot be shorter than the stall of one process.
"""

from __future__ import annotations

import multiprocessing
import statistics
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.report import Report, ratio, spread_of
from recpoint import Checkpointer, Staging, Timeouts
from recpoint.catalog.persist import persist
from recpoint.catalog.staging import job_files
from recpoint.catalog.staging.area import StagedRun, staged_runs
from recpoint.errors import RanksMissing
from recpoint.trainer_plugin.snapshot.cut import Cut, Cutter

__all__ = ["KEYS", "run"]

_RANKS = (1, 2, 4)
KEYS = (
    *(f"{figure}_{ranks}" for ranks in _RANKS for figure in ("coordination_ms", "persist_seconds")),
    "coordination_ms",
    "stall_4_vs_1",
)

_DIM = 64
_TABLES = 4
_WIDTH, _LAYERS = 512, 4
_DIRTY_SHARE = 0.26
_PATIENCE_SECONDS = 600.0


def run(*, smoke: bool) -> Report:
    """Measure 1, 2 and 4 ranks."""
    rows, checkpoints = (4_000, 3) if smoke else (1_000_000, 9)
    report = Report(
        name="ranks",
        columns=("ranks", "rows a rank", "stall ms", "own cut ms", "coordination ms", "persist s"),
    )
    stalls: dict[int, list[float]] = {}
    for ranks in _RANKS:
        times_of_ranks, persist_seconds = _job(ranks, rows, checkpoints)
        # The slowest rank of each checkpoint; the first checkpoint is a full and is left out.
        stall = [
            max(v)
            for v in zip(*(rank_times.stalls_ms for rank_times in times_of_ranks), strict=True)
        ][1:]
        cuts = [
            max(v) for v in zip(*(rank_times.cuts_ms for rank_times in times_of_ranks), strict=True)
        ][1:]
        stalls[ranks] = stall
        report.timed(f"stall, {ranks} ranks", [ms / 1e3 for ms in stall])
        report.timed(f"own cut, {ranks} ranks", [ms / 1e3 for ms in cuts])
        coordination = spread_of(
            [whole - cut_ms for whole, cut_ms in zip(stall, cuts, strict=True)]
        )
        report.rows.append(
            (
                ranks,
                rows // ranks,
                statistics.median(stall),
                statistics.median(cuts),
                coordination.median,
                persist_seconds,
            )
        )
        report.put(f"coordination_ms_{ranks}", coordination)
        report.figures[f"persist_seconds_{ranks}"] = persist_seconds
    report.put("coordination_ms", report.spreads["coordination_ms_4"])
    report.put("stall_4_vs_1", ratio(stalls[4], stalls[1]))
    report.notes.append(
        f"{rows:,} rows of {_DIM} F32 values over all ranks, {_DIRTY_SHARE:.0%} of them dirty; "
        "medians of increments; persist: of the full, one agent's work after another"
    )
    return report


class _Milliseconds(NamedTuple):
    """Times of one checkpoint of a rank: the whole stall, and the rank's own cut in it."""

    stalls_ms: list[float]
    cuts_ms: list[float]


def _job(ranks: int, rows: int, checkpoints: int) -> tuple[list[_Milliseconds], float]:
    """Return each rank's times, and the seconds that agents need for the full of all ranks."""
    # Forked from a process that has imported all modules: seven imports would take half a minute.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.ranks"])
    with tempfile.TemporaryDirectory(prefix="recpoint-ranks-") as name:
        folder = Path(name)
        pipes = [context.Pipe(duplex=False) for _ in range(ranks)]
        processes = [
            context.Process(target=_rank, args=(folder, rank, ranks, rows, checkpoints, their_end))
            for rank, (_, their_end) in enumerate(pipes)
        ]
        for process, (_, their_end) in zip(processes, pipes, strict=True):
            process.start()
            their_end.close()  # so that `recv` ends if the rank ends
        times_of_ranks: list[_Milliseconds] = []
        for process, (own_end, _) in zip(processes, pipes, strict=True):
            try:
                times_of_ranks.append(_Milliseconds(*own_end.recv()))
            except EOFError:
                process.join()
                raise RuntimeError(f"a rank ended with {process.exitcode}") from None
            process.join(_PATIENCE_SECONDS)
        (run,) = [run.path for run in staged_runs(folder / "staging")]
        fulls = [
            path for path in StagedRun(run).staged_jobs() if job_files.read_job(path).kind == "full"
        ]
        started = time.perf_counter()
        for path in fulls:
            try:
                persist.persist_job(path)
            except RanksMissing:
                continue  # this rank's part is stored; the last rank's agent commits
        return times_of_ranks, time.perf_counter() - started


def _rank(
    folder: Path, rank: int, ranks: int, rows: int, checkpoints: int, pipe: Connection
) -> None:
    torch.set_num_threads(1)
    if ranks > 1:
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=ranks
        )
    tables = {
        f"t{n}": nn.Embedding(rows // _TABLES, _DIM, sparse=True)
        for n in range(rank, _TABLES, ranks)
    }
    torch.manual_seed(0)  # dense layers are equal on all ranks, and the first rank stores them
    dense = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(_LAYERS)))
    model = nn.ModuleDict({**tables, "dense": dense})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    cuts_ms = _measure_cuts()
    generator = torch.Generator().manual_seed(rank)
    with Checkpointer(
        model,
        optimizer,
        run=str(folder / "run"),
        staging=Staging(directory=folder / "staging", jobs=checkpoints),
        interval_batches=10**9,
        timeouts=Timeouts(close_seconds=0.0),
    ) as checkpointer:
        checkpointer.restore()
        for number in range(checkpoints):
            for table in tables:
                ids = torch.randperm(rows // _TABLES, generator=generator)
                checkpointer.mark(table, ids[: int(_DIRTY_SHARE * len(ids))])
            checkpointer.step()
            if ranks > 1:
                dist.barrier()  # as the exchange of gradients synchronizes ranks in each batch
            if not checkpointer.checkpoint():
                raise RuntimeError(f"checkpoint {number} was not cut: {checkpointer.stats}")
        stalls_ms = list(checkpointer.stats.stalls_ms)[:checkpoints]
    pipe.send((stalls_ms, cuts_ms[:checkpoints]))
    if ranks > 1:
        dist.destroy_process_group()


def _measure_cuts() -> list[float]:
    """Start to record the milliseconds of each cut of this process, without the exchanges."""
    cuts_ms: list[float] = []
    cut = Cutter.cut

    def measured(cutter: Cutter, *args: Any, **kwargs: Any) -> Cut:
        started = time.perf_counter()
        try:
            return cut(cutter, *args, **kwargs)
        finally:
            cuts_ms.append(1e3 * (time.perf_counter() - started))

    setattr(Cutter, "cut", measured)  # noqa: B010
    return cuts_ms
