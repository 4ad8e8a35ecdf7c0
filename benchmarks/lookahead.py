"""Compares jobs that copy rows before their checkpoints with the same jobs that do not.

Each job is a process of its own, and both kinds take turns. What a job stages must be the same with
and without `Lookahead`, byte for byte, and a job that was killed and resumed must end in the same
state: otherwise nothing is measured. Persisting is not in the measured time.

- Rows left: a DLRM on samples of Criteo's shape, 2,048 a batch, a checkpoint every 1,000 batches, a
  window of 200. `remainder_share` is the rows copied in the stall over the rows of the increment,
  `remainder_vs_last_batch` over the rows that the last batch looked up.
- Stall: one table of 10 M rows of 64 values with Adagrad's state, of which an interval changes 3 M.
  `stall_vs_plain` is the stall over that of a job without Lookahead. `stall_growth` is the stall
  with 3 M dirty rows over the one with 10,000. A hundredth of the dirty rows is of the last batch:
  these are always left to copy.
- Cost: `cpu_vs_plain` and `wall_vs_plain` compare whole training loops of the DLRM, pair by pair.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.lookahead_job import Result, Taken, Task, play
from benchmarks.report import Report, ratio, spread_of
from benchmarks.workload import ROOT, scratch

__all__ = ["KEYS", "run"]

KEYS = (
    "remainder_share",
    "remainder_vs_last_batch",
    "stall_vs_plain",
    "stall_growth",
    "cpu_vs_plain",
    "wall_vs_plain",
    "bytes_identical",
    "bit_identical",
)

_INTERVAL = 100  # of the table's jobs


def run(*, smoke: bool, plot: bool = False) -> Report:
    """Compare the jobs; `plot` draws the stall against the number of dirty rows."""
    report = Report(name="lookahead", columns=("job", "dirty rows", "left", "stall ms", "plain ms"))
    _gate(report, smoke=smoke)
    _left(report, smoke=smoke)
    _stalls(report, smoke=smoke, plot=plot)
    _costs(report, smoke=smoke)
    return report


def _table(dirty: int, rounds: int, *, rows: int, window: int) -> Task:
    return Task(
        kind="table", folder="", rows=rows, lookups=dirty // _INTERVAL,
        batches=_INTERVAL * (rounds + 1), interval=_INTERVAL, window=window, digests=False,
    )  # fmt: skip


def _criteo(*, batches: int, interval: int, window: int, smoke: bool, rows: int = 1 << 20) -> Task:
    shrink = 50 if smoke else 1
    return Task(
        kind="criteo", folder="", rows=1 << 10 if smoke else rows, lookups=64 if smoke else 2048,
        batches=batches // shrink, interval=interval // shrink, window=max(1, window // shrink),
        digests=False,
    )  # fmt: skip


def _played(task: Task) -> Result:
    """Run a job in new directories; its slot is in memory."""
    with scratch() as folder:
        result = play(replace(task, folder=str(folder)))
    if result is None:
        raise RuntimeError(f"{task}: killed")
    return result


def _gate(report: Report, *, smoke: bool) -> None:
    """Compare what jobs stage, and kill and resume one.

    Raises:
        RuntimeError: something differs.
    """
    rows = 100_000 if smoke else 1_000_000
    tasks = [
        replace(_table(rows // 10, 3, rows=rows, window=60), digests=True),
        replace(
            _criteo(batches=600, interval=200, window=40, smoke=smoke, rows=1 << 16),
            digests=True,
        ),
    ]
    for task in tasks[:1] if smoke else tasks:
        ahead, plain = _played(task), _played(replace(task, window=0))
        for with_lookahead, without in zip(ahead.taken, plain.taken, strict=True):
            if with_lookahead.digest != without.digest or with_lookahead.rows_before <= 0:
                raise RuntimeError(f"{task}: staged {with_lookahead}, expected {without}")
        if ahead.state != plain.state:
            raise RuntimeError(f"{task}: other state with Lookahead than without")
        with scratch() as folder:
            for kill_at in (2 * task.interval - 5, 2 * task.interval + 1)[: 1 if smoke else 2]:
                if play(replace(task, folder=str(folder), kill_at=kill_at)) is not None:
                    raise RuntimeError(f"{task}: was not killed at batch {kill_at}")
            resumed = play(replace(task, folder=str(folder)))
        if resumed is None or resumed.state != ahead.state:
            raise RuntimeError(f"{task}: another state after SIGKILL than without")
    report.figures |= {"bytes_identical": 1.0, "bit_identical": 1.0}


def _increments(result: Result) -> list[Taken]:
    return [checkpoint for checkpoint in result.taken if checkpoint.kind == "increment"]


def _left(report: Report, *, smoke: bool) -> None:
    batches = 2_000
    task = _criteo(batches=batches, interval=1_000, window=200, smoke=smoke, rows=1 << 23)
    increments = _increments(_played(task))
    report.put(
        "remainder_share",
        spread_of([increment.rows_in_stall / increment.dirty_rows for increment in increments]),
    )
    last = [increment.rows_in_stall / increment.last_rows for increment in increments]
    report.put("remainder_vs_last_batch", spread_of(last))
    _add(report, "Criteo's shape", increments, None)


def _stalls(report: Report, *, smoke: bool, plot: bool) -> None:
    rows, rounds = (100_000, 3) if smoke else (10_000_000, 5)
    most = 3 * rows // 10
    counts = [rows // 1_000, most] if smoke else [rows // 1_000, rows // 100, rows // 10, most]
    stalls: list[list[float]] = []
    for count in counts:
        task = _table(count, rounds, rows=rows, window=60)
        ahead = _increments(_played(task))
        plain = _increments(_played(replace(task, window=0)))
        _add(report, f"table, {count:,} dirty rows", ahead, plain)
        stalls.append([increment.stall_ms for increment in ahead])
        if count == most:
            report.put(
                "stall_vs_plain", ratio(stalls[-1], [increment.stall_ms for increment in plain])
            )
        report.timed(
            f"{count:,} dirty rows, stall", [increment.stall_ms / 1e3 for increment in ahead]
        )
        report.timed(
            f"{count:,} dirty rows, plain", [increment.stall_ms / 1e3 for increment in plain]
        )
    report.put("stall_growth", ratio(stalls[-1], stalls[0]))
    if plot:
        report.notes.append(f"plotted: {_plot(counts, stalls).relative_to(ROOT)}")


def _costs(report: Report, *, smoke: bool) -> None:
    pairs = 1 if smoke else 10
    task = _criteo(batches=600, interval=300, window=60, smoke=smoke)
    cpu: list[float] = []
    wall: list[float] = []
    for number in range(pairs):
        order = (task, replace(task, window=0))
        first, second = (_played(task) for task in (order if number % 2 else order[::-1]))
        ahead, plain = (first, second) if number % 2 else (second, first)
        cpu.append(ahead.cpu_seconds / plain.cpu_seconds)
        wall.append(ahead.wall_seconds / plain.wall_seconds)
    for key, values in (("cpu_vs_plain", cpu), ("wall_vs_plain", wall)):
        report.put(key, spread_of(values))
        if pairs > 1:
            low, high = _interval(values)
            report.notes.append(f"{key}: 95 % interval of the mean {low:.3f} to {high:.3f}")


def _interval(values: Sequence[float]) -> tuple[float, float]:
    """Return a 95 % interval of the mean; the factor is Student's for nine degrees of freedom."""
    mean = statistics.fmean(values)
    half = 2.262 * statistics.stdev(values) / len(values) ** 0.5
    return mean - half, mean + half


def _add(report: Report, name: str, ahead: Sequence[Taken], plain: Sequence[Taken] | None) -> None:
    report.rows.append(
        (
            name,
            round(statistics.median(increment.dirty_rows for increment in ahead)),
            round(statistics.median(increment.rows_in_stall for increment in ahead)),
            statistics.median(increment.stall_ms for increment in ahead),
            "-" if plain is None else statistics.median(increment.stall_ms for increment in plain),
        )
    )


def _plot(counts: Sequence[int], stalls: Sequence[Sequence[float]]) -> Path:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 3.5))
    middle = [statistics.median(stall) for stall in stalls]
    axes.errorbar(
        counts, middle, marker="o", capsize=3,
        yerr=[
            [m - min(stall) for m, stall in zip(middle, stalls, strict=True)],
            [max(stall) - m for m, stall in zip(middle, stalls, strict=True)],
        ],
    )  # fmt: skip
    axes.set(xscale="log", xlabel="dirty rows", ylabel="stall, ms", ylim=(0, None))
    figure.tight_layout()
    path = ROOT / "docs" / "images" / "lookahead.png"
    figure.savefig(path, dpi=120)
    return path
