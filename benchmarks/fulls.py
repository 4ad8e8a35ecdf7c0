"""Measures the stall of fulls that are copied before their cuts, against fulls copied in the stall.

On one rank and on two, a model of TorchRec's tables is trained. One run takes fulls in its stall,
the next has them copied ahead, and so on in turn. Before a figure is reported, each full must hold
the values that the model had at its cut.
"""

from __future__ import annotations

import shutil
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.report import Report, ratio
from benchmarks.torchrec import bag_tables, lookup, row_wise, run_ranks
from benchmarks.torchrec_tracker import INSTALL, installed
from recpoint import Checkpointer, Consecutive, Options, Staging, Timeouts
from recpoint.catalog.staging import job_files
from recpoint.catalog.staging.area import StagedRun, staged_runs
from recpoint.trainer_plugin.integrations.torchrec import find

__all__ = ["KEYS", "run"]

_RANKS = (1, 2)
KEYS = tuple(f"full_stall_vs_plain_{ranks}" for ranks in _RANKS)

_TABLES = 4
_DIM = 64


class _Sizes(NamedTuple):
    """Sizes of the benchmark.

    Attributes:
        rows: of each table, over all ranks.
        samples: of a batch, on each rank.
        window: batches in which a full is copied ahead.
        rounds: runs of each kind.
    """

    rows: int
    samples: int
    window: int
    rounds: int


def run(*, smoke: bool) -> Report:
    """Measure one rank and two.

    `full_stall_vs_plain_1` is the stall of a full that was copied ahead over that of a plain full,
    on one rank; with two ranks, each rank's stall counts that is the longer one.
    """
    sizes = (
        _Sizes(rows=4_000, samples=8, window=300, rounds=2)
        if smoke
        else _Sizes(rows=2_000_000, samples=64, window=1_000, rounds=5)
    )
    report = Report(
        name="fulls", columns=("ranks", "plain stall ms", "ahead stall ms", "rows in it", "before")
    )
    if not installed():
        report.leave_out(KEYS, f"TorchRec and FBGEMM are not installed: {INSTALL}")
        return report
    for ranks in _RANKS:
        values = run_ranks(ranks, _rank, sizes)
        plain, ahead = (
            [max(stalls) for stalls in zip(*(value[kind] for value in values), strict=True)]
            for kind in ("plain", "ahead")
        )
        plain_s = report.timed(f"stall of a plain full, {ranks} ranks", plain)
        ahead_s = report.timed(f"stall of a full copied ahead, {ranks} ranks", ahead)
        report.put(f"full_stall_vs_plain_{ranks}", ratio(ahead, plain))
        counts = [sum(value[name] for value in values) for name in ("in_stall", "before")]
        report.rows.append((ranks, 1e3 * plain_s, 1e3 * ahead_s, *counts))
    full_bytes = _TABLES * sizes.rows * 4 * (_DIM + 1)
    report.notes.append(
        f"fulls of {full_bytes / 1e9:.2f} GB: {_TABLES} tables of {sizes.rows:,} rows of {_DIM} "
        f"F32 values with one row state, row-wise over the ranks; copied ahead over {sizes.window} "
        f"batches of {sizes.samples} samples"
    )
    return report


class _Scorer(nn.Module):
    """Tables that TorchRec shards, and a small dense layer."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.bags = bag_tables(_TABLES, rows, _DIM)
        self.top = nn.Linear(_TABLES * _DIM, 1)

    def forward(self, ids: Any) -> torch.Tensor:
        scores: torch.Tensor = self.top(self.bags(ids).values())
        return scores


def _rank(folder: Path, rank: int, pipe: Connection, sizes: _Sizes) -> None:
    model = _Scorer(sizes.rows)
    sharded = row_wise(model, model.bags, "bags")
    optimizer = torch.optim.SGD(
        [p for name, p in sharded.named_parameters() if name.startswith("top")], lr=0.1
    )
    generator = torch.Generator().manual_seed(rank)
    values: dict[str, list[float] | int] = {"plain": [], "ahead": [], "in_stall": 0, "before": 0}
    for number in range(2 * sizes.rounds):
        kind = ("plain", "ahead")[number % 2]
        place = folder / f"{number}"
        with Checkpointer(
            sharded,
            optimizer,
            run=str(place / "run"),
            staging=Staging(directory=place / "staging"),
            interval_batches=sizes.window + 10,
            policy=Consecutive(full_every=1),
            timeouts=Timeouts(close_seconds=0.0),
            options=Options(
                announce=False, copy_fulls_ahead=sizes.window if kind == "ahead" else 0
            ),
        ) as checkpoints:
            checkpoints.restore()
            for _ in range(sizes.window + 10):
                ids = lookup(_TABLES, sizes.rows, sizes.samples, generator)
                optimizer.zero_grad()
                sharded(ids).sum().backward()
                optimizer.step()
                checkpoints.step()
            (stall_ms,) = checkpoints.stats.stalls_ms
            stalls = values[kind]
            assert isinstance(stalls, list)
            stalls.append(stall_ms / 1e3)
            copied = checkpoints.stats.copied
            if copied is not None:
                if copied.why_plain is not None:
                    raise RuntimeError(f"a full was not copied ahead: {copied.why_plain}")
                values["in_stall"], values["before"] = copied.rows_in_stall, copied.rows_before
            checkpoints.close(final=False)
        _require_equal(sharded, place, rank)
        dist.barrier()
        if rank == 0:
            shutil.rmtree(place)
    pipe.send(values)


def _require_equal(sharded: nn.Module, place: Path, rank: int) -> None:
    """Compare the staged rows of this rank with those of the model, which has not trained since.

    Raises:
        RuntimeError: a value differs.
    """
    source = find(sharded)
    assert source is not None
    for staged in staged_runs(place / "staging"):
        staged_run = StagedRun(staged.path)
        for path in staged_run.staged_jobs():
            job = job_files.read_job(path)
            if job.rank != rank:
                continue
            slot = staged_run.slots_directory / job.slot
            segments = {segment.name: segment for segment in job.segments}
            for number, table in enumerate(source.tables):
                segment = segments[f"t{number}.values"]
                staged_values = _mapped(slot, segment.offset, segment.bytes)
                if not staged_values.view_as(table.weight).equal(table.weight):
                    raise RuntimeError(f"staged rows of table {table.name!r} differ")


def _mapped(slot: Path, offset: int, size_bytes: int) -> torch.Tensor:
    whole = torch.from_file(str(slot), size=(offset + size_bytes) // 4, dtype=torch.float32)
    return whole[offset // 4 :]
