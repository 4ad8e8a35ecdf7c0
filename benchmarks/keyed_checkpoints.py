"""Measures checkpoints of keyed tables, over those of plain tables in which the same rows change.

Both sides train the model of `benchmarks.keyed_training` on the same batches, with as many rows as
ids in use; the plain tables look up the slots that the keyed ones gave to the ids. After each ten
batches both take an increment, in alternating order. `increment_bytes_vs_plain` compares the bytes
of their chunks, lossless, with rows of 16 and of 64 values; the figure is the worse. The stall is
the one that the Checkpointer reports.

`bit_identical` is the share of killed trainings that end in the state of one that was never killed,
bit for bit. They have tables of all rules of admission and eviction, and are killed ten times each,
at random moments.

The benchmark `keyed` calls `measure`; `python -m benchmarks.keyed_checkpoints` runs it alone.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

import torch

from benchmarks.keyed_training import Ids, Side, looked_up_slots
from benchmarks.machine import watch
from benchmarks.report import Report, print_report, ratio, spread_of
from benchmarks.workload import StagedTraining, scratch, staged_run

__all__ = ["KEYS", "measure"]

KEYS = ("increment_bytes_vs_plain", "stall_vs_plain", "bit_identical")

_DIMS = (16, 64)
_BATCHES_EACH = 10  # between two increments
_FIRST = 2  # checkpoints in which buffers are used for the first time
_KILLS_EACH = 10


def measure(report: Report, *, smoke: bool) -> None:
    """Add the figures KEYS."""
    ids_in_use, samples, rounds, trainings = (500, 64, 3, 1) if smoke else (100_000, 2_048, 9, 20)
    torch.sparse.check_sparse_tensor_invariants.disable()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        pairs = [_Pair(dim, ids_in_use, samples) for dim in _DIMS]
        for pair in pairs:
            pair.measure(rounds)
            pair.describe(report)
    finally:
        torch.set_num_threads(threads)
    report.put("increment_bytes_vs_plain", max(ratio(*pair.sizes) for pair in pairs))
    report.put("stall_vs_plain", max(ratio(*pair.stalls) for pair in pairs))
    report.put("bit_identical", spread_of([_identical_share(trainings)]))


class _Pair:
    """A training with keyed tables, one with plain ones, and the figures of their increments.

    Args:
        dim: values in a row.
        ids_in_use: of each table.
        samples: of a batch.

    Attributes:
        sizes: bytes of each increment, of both.
        stalls: seconds of each stall, of both.
    """

    def __init__(self, dim: int, ids_in_use: int, samples: int) -> None:
        self._dim, self._ids_in_use, self._samples = dim, ids_in_use, samples
        self.sizes: tuple[list[float], list[float]] = ([], [])
        self.stalls: tuple[list[float], list[float]] = ([], [])
        self._changed_rows = self._tables = 0

    def measure(self, rounds: int) -> None:
        """Train, and take increments."""
        ids = Ids(self._ids_in_use)
        keyed = Side(self._ids_in_use, keyed=True, dim=self._dim)
        plain = Side(self._ids_in_use, keyed=False, dim=self._dim)
        keyed.fill(ids)
        self._tables = len(keyed.tables())
        with ExitStack() as opened:
            folder = opened.enter_context(scratch())
            runs = [
                opened.enter_context(_started(keyed, folder / "keyed")),
                opened.enter_context(_started(plain, folder / "plain")),
            ]
            for turn in range(_FIRST + rounds):
                if turn % _BATCHES_EACH == 0:
                    ids.renew()
                for _ in range(_BATCHES_EACH):
                    dense, keys = ids.batch(self._samples)
                    keyed.step(dense, keys)
                    plain.step(dense, looked_up_slots(keyed, keys))
                    for tracked in runs:
                        tracked.checkpointer.step()
                self._cut(runs, turn)

    def _cut(self, runs: list[StagedTraining], turn: int) -> None:
        changed_rows = [0, 0]
        for side in (0, 1) if turn % 2 else (1, 0):
            job, outcome = runs[side].cut_and_persist()
            changed_rows[side] = job.dirty_rows
            if turn >= _FIRST:
                self.sizes[side].append(outcome.stored_bytes)
                self.stalls[side].append(runs[side].checkpointer.stats.stalls_ms[-1] / 1e3)
        self._changed_rows, plain_rows = changed_rows
        # Row 0 of a keyed table is marked with the rows of a batch in which a key was new.
        if not 0 <= self._changed_rows - plain_rows <= self._tables:
            raise AssertionError(
                f"{self._changed_rows} rows of keyed tables, {plain_rows} of plain"
            )

    def describe(self, report: Report) -> None:
        """Add times and a note."""
        for side, stalls in zip(("keyed tables", "nn.Embedding"), self.stalls, strict=True):
            report.timed(f"stall, {side}, {self._dim} values", stalls)
        size, stall = ratio(*self.sizes).median, ratio(*self.stalls).median
        report.notes.append(
            f"Increments with rows of {self._dim} values: {self._changed_rows:,} rows; bytes are "
            f"{size:.3f} of those of plain tables, stalls {stall:.3f}."
        )


def _started(side: Side, folder: Path) -> AbstractContextManager[StagedTraining]:
    return staged_run(
        side.model, side.optimizers, url=str(folder / "run"), staging=folder / "staging"
    )


def _identical_share(trainings: int) -> float:
    from tests.fault.keyed_kills import LONG, killed_at_random, live

    with scratch() as folder:
        whole = live(folder / "whole", last_batch=LONG)
        ends = [
            killed_at_random(folder / str(seed), seed=seed, kills=_KILLS_EACH, last_batch=LONG)
            for seed in range(trainings)
        ]
    return sum(end == whole for end in ends) / trainings


if __name__ == "__main__":
    alone = Report(name="keyed_checkpoints", columns=("does",))
    with watch() as watched:
        measure(alone, smoke=False)
    print_report(alone, smoke=False, busy=watched.busy)
