"""Measures marking of rows against the training step around it, and against TorchRec's tracker.

All work of the plugin in a step between two checkpoints is timed inside real training steps: its
hooks before and after `optimizer.step()`, between two clocks that are hooks too, and
`Checkpointer.step()`. The difference of two whole steps would mostly be noise. If the plugin hooks
into lookups, their cost is the difference to the lookups of a model without hooks.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable
from pathlib import Path
from time import perf_counter_ns
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Adagrad, Optimizer

from benchmarks.criteo_dlrm import KAGGLE, MLPERF, CriteoDLRM
from benchmarks.report import Report, Spread, alternate, ratio
from benchmarks.torchrec_tracker import INSTALL, TorchRecTracker, installed
from benchmarks.workload import StagedTraining, examples_on_path, scratch, staged_run
from recpoint.catalog.staging import job_files
from recpoint.embeddings.tables.marks import Tracker
from recpoint.embeddings.tables.optimizers import OptimizerWatch, after_steps
from recpoint.kernels import dirty_bitmap
from recpoint.trainer_plugin.tables import find_tables

__all__ = ["KEYS", "run"]

_OF_TORCHREC = (
    "vs_torchrec",
    "vs_torchrec_record",
    "native_share_of_marking",
    "torchrec_bytes",
    "our_bytes",
)
KEYS = (
    "mark_share_of_step",
    "mark_share_of_step_512",
    "mark_share_of_step_mlperf",
    "mark_share_of_step_dense",
    "eval_marks",
    *_OF_TORCHREC,
)

_DIFFERENT_BATCHES = 32
_SMOKE_BATCHES = 4


class _Case(NamedTuple):
    model: str
    batch_size: int
    sparse: bool


_CASES = (
    _Case("retail", 512, True),
    _Case("retail", 2048, True),
    _Case("Criteo", 2048, True),
    _Case("MLPerf", 2048, True),
    _Case("retail", 2048, False),
)

_ROUNDS_FEWER = {"retail": 1, "Criteo": 3, "MLPerf": 10}


def run(*, smoke: bool) -> Report:
    """Measure the DLRMs of the example, of the Criteo Kaggle data, and of MLPerf.

    `mark_share_of_step` is the worst of the two small models, with sparse gradients, at 2,048
    samples, the batch with which ECRM (2021) trains Criteo. Marking costs nearly the same at any
    batch size, so its share is larger in the shorter step of 512 samples:
    `mark_share_of_step_512`. `mark_share_of_step_mlperf` is the share in a model of the size that
    MLPerf trains (26 tables of at most 2^18 rows of 128 values, so that they fit in memory; top
    layers of 1024-1024-512-256-1); marking costs the same there. With dense gradients, rows are
    marked at the lookup, and the gradient's rows after the step: `mark_share_of_step_dense`.
    """
    torch.sparse.check_sparse_tensor_invariants.disable()
    examples_on_path()
    report = Report(
        name="tracking",
        columns=(
            "model",
            "gradients",
            "batch",
            "step ms",
            "marking us",
            "of it lookups",
            "share %",
        ),
    )
    shares: dict[_Case, Spread] = {}
    evaluation_marks = 0
    for case in _CASES:
        rounds = 4 if smoke else 400 // _ROUNDS_FEWER[case.model]
        with scratch() as folder:
            measured = _measure(case, rounds, folder, smoke=smoke)
        shares[case] = ratio(measured.marking_s, measured.step_s)
        gradients = "sparse" if case.sparse else "dense"
        name = f"{case.model}, {gradients}, {case.batch_size:,}"
        step_s = report.timed(f"step, {name}", measured.step_s)
        marking_s = report.timed(f"marking, {name}", measured.marking_s)
        evaluation_marks += measured.evaluation_marks
        report.rows.append(
            (
                case.model,
                gradients,
                case.batch_size,
                1e3 * step_s,
                1e6 * marking_s,
                1e6 * measured.lookups_s,
                100 * shares[case].median,
            )
        )
    large = [shares[case] for case in _CASES[1:3]]
    report.put("mark_share_of_step", max(large))
    report.put("mark_share_of_step_512", shares[_CASES[0]])
    report.put("mark_share_of_step_mlperf", shares[_CASES[3]])
    report.put("mark_share_of_step_dense", shares[_CASES[-1]])
    report.figures["eval_marks"] = float(evaluation_marks)
    report.notes.append(
        f"rows marked by lookups in evaluation or without gradients: {evaluation_marks}"
    )
    _against_torchrec(report, batches=8 if smoke else 200, smoke=smoke)
    return report


def _reader(case: _Case, *, smoke: bool) -> Any:
    from criteo import CriteoShapeReader
    from retail import RetailReader

    lines = case.batch_size // (16 if smoke else 1)

    if case.model != "retail":
        rows = 1 << (12 if smoke else 18 if case.model == "MLPerf" else 20)
        return CriteoShapeReader(lines=lines, rows=rows)
    return RetailReader(lines=lines // 2, rows=1 << (12 if smoke else 18), seed=0)


def _built(case: _Case, reader: Any) -> tuple[Any, list[Optimizer]]:
    from train_dlrm import DLRM

    torch.manual_seed(0)
    if case.model != "retail":
        widths = MLPERF if case.model == "MLPerf" else KAGGLE
        model: Any = CriteoDLRM(reader.tables, sparse=case.sparse, widths=widths)
    else:
        model = DLRM(reader.tables, reader.dense_width)
        for table in model.tables.values():
            table.sparse = case.sparse
    dense = [p for n, p in model.named_parameters() if not n.startswith("tables.")]
    return model, [Adagrad(model.tables.parameters(), lr=0.1), Adagrad(dense, lr=0.02)]


class _Clock:
    """Measures the nanoseconds of the hooks registered between the calls of `open` and `close`."""

    def __init__(self) -> None:
        self.ns = self._start_ns = 0

    def _start(self, *_: object) -> None:
        self._start_ns = perf_counter_ns()

    def _stop(self, *_: object) -> None:
        self.ns += perf_counter_ns() - self._start_ns

    def open(self, optimizers: list[Optimizer]) -> None:
        for optimizer in optimizers:
            optimizer.register_step_pre_hook(self._start)

    def close(self, optimizers: list[Optimizer]) -> None:
        for optimizer in optimizers:
            optimizer.register_step_pre_hook(self._stop)
            # Marking registers its hook before all hooks that exist when it begins.
            hooks = optimizer._optimizer_step_post_hooks
            between = dict(hooks)
            hooks.clear()
            optimizer.register_step_post_hook(self._start)
            hooks.update(between)
            optimizer.register_step_post_hook(self._stop)


class _Measured(NamedTuple):
    """Each round's seconds of a step and of marking in it; median seconds of marking at lookups."""

    step_s: list[float]
    marking_s: list[float]
    lookups_s: float
    evaluation_marks: int


def _measure(case: _Case, rounds: int, folder: Path, *, smoke: bool) -> _Measured:
    reader = _reader(case, smoke=smoke)
    batches = list(itertools.islice(reader, _SMOKE_BATCHES if smoke else _DIFFERENT_BATCHES))
    warm_up = 2 if smoke else 10
    plain, _ = _built(case, reader)
    model, optimizers = _built(case, reader)
    clock = _Clock()
    clock.open(optimizers)
    with staged_run(
        model, optimizers, url=str(folder / "run"), staging=folder / "staging"
    ) as tracked:
        clock.close(optimizers)
        step = _training(model, optimizers, batches)
        steps_s: list[float] = []
        marking_s: list[float] = []
        for number in range(warm_up + rounds):
            clock.ns = 0
            started = perf_counter_ns()
            step()
            stepped = perf_counter_ns()
            tracked.checkpointer.step()
            ended = perf_counter_ns()
            if number >= warm_up:
                steps_s.append(1e-9 * (stepped - started - clock.ns))
                marking_s.append(1e-9 * (clock.ns + ended - stepped))
        marks = _evaluation_marks(tracked, model, batches)
        lookups_s = 0.0
        if any(table._forward_pre_hooks for table in model.tables.values()):
            lookups_s = _added_to_lookups(plain, model, batches, rounds)
    return _Measured(steps_s, [marking + lookups_s for marking in marking_s], lookups_s, marks)


def _training(
    model: nn.Module, optimizers: list[Optimizer], batches: list[Any]
) -> Callable[[], None]:
    turn = itertools.cycle(batches)

    def step() -> None:
        batch = next(turn)
        loss = F.binary_cross_entropy_with_logits(model(batch.dense, batch.sparse), batch.label)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    return step


def _added_to_lookups(plain: Any, hooked: Any, batches: list[Any], rounds: int) -> float:
    """Return the seconds that hooks add to a batch's lookups."""

    def lookups(model: Any) -> Callable[[], None]:
        turn = itertools.cycle(batches)
        tables = list(model.tables.values())

        def look_up() -> None:
            batch = next(turn)
            for column, table in enumerate(tables):
                table(batch.sparse[:, column])

        return look_up

    without_s, with_s = alternate(5 * rounds, lookups(plain), lookups(hooked))
    return statistics.median(b - a for a, b in zip(without_s, with_s, strict=True))


def _evaluation_marks(tracked: StagedTraining, model: Any, batches: list[Any]) -> int:
    """Return the number of rows in an increment after lookups that train nothing."""
    tracked.cut_and_persist()  # the full, after which no row is marked
    with torch.no_grad():
        model(batches[0].dense, batches[0].sparse)
    model.eval()
    model(batches[1].dense, batches[1].sparse)
    with torch.no_grad():
        model(batches[2].dense, batches[2].sparse)
    model.train()
    tracked.checkpointer.step()
    return job_files.read_job(tracked.cut()).dirty_rows


def _against_torchrec(report: Report, *, batches: int, smoke: bool) -> None:
    """Measure one interval of batches on the same ids: recording, then collecting the rows."""
    if not installed():
        report.leave_out(_OF_TORCHREC, f"TorchRec is not installed: {INSTALL}")
        return
    case = _Case("Criteo", 2048, True)
    reader = _reader(case, smoke=smoke)
    drawn = [batch.sparse for batch in itertools.islice(reader, batches)]
    our_tracker = _Ours(reader.tables)
    gradients = [our_tracker.gradients(ids) for ids in drawn[:_DIFFERENT_BATCHES]]
    with TorchRecTracker.started(reader.tables) as tracker:
        records = [tracker.batch(ids) for ids in drawn]
        ours_ns, theirs_ns = [], []
        for number, record in enumerate(records):
            if number >= _DIFFERENT_BATCHES:
                gradients[number % _DIFFERENT_BATCHES] = our_tracker.gradients(drawn[number])
            our_tracker.backward(gradients[number % _DIFFERENT_BATCHES])
            started = perf_counter_ns()
            our_tracker.step()
            between = perf_counter_ns()
            tracker.record(record)
            theirs_ns.append(perf_counter_ns() - between)
            ours_ns.append(between - started)
        torchrec_bytes = tracker.stored_bytes()
        started = perf_counter_ns()
        our_ids = our_tracker.take()
        between = perf_counter_ns()
        their_ids = tracker.take()
        theirs_take_ns, ours_take_ns = perf_counter_ns() - between, between - started
    for a, b in zip(our_ids, their_ids, strict=True):
        if not torch.equal(a, b.sort().values):
            raise RuntimeError("the two trackers found different rows")
    record_ns, mark_ns = statistics.median(theirs_ns), statistics.median(ours_ns)
    their_total, our_total = (
        batches * record_ns + theirs_take_ns,
        batches * mark_ns + ours_take_ns,
    )
    report.timed("marking a batch", [1e-9 * ns for ns in ours_ns])
    report.timed("TorchRec records a batch", [1e-9 * ns for ns in theirs_ns])
    report.put("vs_torchrec_record", ratio(theirs_ns, ours_ns))
    native_ns = [
        our_tracker.native_call_ns(gradients[number % len(gradients)]) for number in range(200)
    ]
    report.timed("marking a batch: the native call alone", [1e-9 * ns for ns in native_ns])
    report.figures["native_share_of_marking"] = statistics.median(native_ns) / mark_ns
    report.figures |= {
        "vs_torchrec": their_total / our_total,
        "torchrec_bytes": float(torchrec_bytes),
        "our_bytes": float(our_tracker.bitmap_bytes()),
    }
    report.notes.append(
        f"{batches} batches of {len(drawn[0]):,} Criteo-shaped samples, 26 tables, us a batch: "
        f"marking {mark_ns / 1e3:.1f} and {ours_take_ns / 1e3 / batches:.1f} to collect the rows; "
        f"TorchRec {record_ns / 1e3:.1f} to record and {theirs_take_ns / 1e3 / batches:.1f} to "
        f"find the distinct ones. Bytes: {our_tracker.bitmap_bytes():,} and {torchrec_bytes:,}. "
        f"Both found the same {sum(len(rows) for rows in our_ids):,} rows."
    )


class _Ours:
    """Makes recpoint's calls of a training step, without the step."""

    def __init__(self, tables: dict[str, int]) -> None:
        model = nn.ModuleDict(
            {name: nn.Embedding(rows, 1, sparse=True) for name, rows in tables.items()}
        )
        optimizer = Adagrad(model.parameters(), lr=0.1)
        found_tables = find_tables(model, [optimizer]).tables
        self.trackers = [Tracker(table) for table in found_tables]
        OptimizerWatch([optimizer], {t.table.name: t for t in self.trackers})

    def gradients(self, ids: Tensor) -> list[Tensor]:
        """Return sparse gradients of lookups of `ids`, I64 [n, tables]."""
        values = torch.zeros(len(ids), 1)
        return [
            torch.sparse_coo_tensor(ids[:, c].clone()[None], values, tracker.weight.shape)
            for c, tracker in enumerate(self.trackers)
        ]

    def backward(self, gradients: list[Tensor]) -> None:
        for tracker, gradient in zip(self.trackers, gradients, strict=True):
            tracker.weight.grad = gradient
            torch.autograd.graph.increment_version(tracker.weight)  # as the optimizer's step does

    def step(self) -> None:
        after_steps(self.trackers)

    def native_call_ns(self, gradients: list[Tensor]) -> int:
        """Return the nanoseconds of the one native call of `step`, after `backward`'s work."""
        self.backward(gradients)
        tables: list[int] = []
        for tracker, gradient in zip(self.trackers, gradients, strict=True):
            ids = gradient._indices()
            tables += tracker.bitmap.data_ptr(), ids.data_ptr(), ids.numel(), tracker.rows
        started = perf_counter_ns()
        dirty_bitmap.mark_tables(*tables)
        return perf_counter_ns() - started

    def take(self) -> list[Tensor]:
        dirty = [(tracker, tracker.take()) for tracker in self.trackers]
        return [dirty_bitmap.collect(dirty.bitmap, rows=tracker.rows) for tracker, dirty in dirty]

    def bitmap_bytes(self) -> int:
        """Return the bytes of both bitmaps of all tables."""
        return 2 * sum(tracker.bitmap_bytes for tracker in self.trackers)
