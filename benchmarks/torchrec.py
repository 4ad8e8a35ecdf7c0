"""Measures checkpoints in TorchRec's recommended pipeline, on two ranks, against the same without.

Two ranks on this machine train two copies of one DLRM under `TrainPipelineSparseDist`, a stretch of
batches of one copy after the same stretch of the other. One copy has a `Checkpointer`, and one
checkpoint falls due in the middle of each of its stretches. Between stretches, and not timed, the
staged jobs are stored, as an agent does it on a core of its own. Marks are timed inside the
training.
"""

from __future__ import annotations

import gc
import multiprocessing
import statistics
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.report import Report, ratio, spread_of
from benchmarks.torchrec_tracker import INSTALL, installed
from benchmarks.workload import scratch
from recpoint import Checkpointer, ResumableLoader, Staging, Timeouts
from recpoint.catalog.check.validate import validate
from recpoint.catalog.persist import persist
from recpoint.catalog.run.run import Run
from recpoint.catalog.staging.area import StagedRun, staged_runs
from recpoint.catalog.store.store import open_store
from recpoint.errors import RanksMissing
from recpoint.format.naming import ManifestName

__all__ = ["KEYS", "bag_tables", "lookup", "row_wise", "run", "run_ranks"]

_FEATURE_COUNTS = (26, 100, 400)
KEYS = (
    "pipelined_vs_none",
    "mark_share",
    *(f"mark_us_{count}_features" for count in _FEATURE_COUNTS),
)

_RANKS = 2
_DIM = 64
_TABLES = 26
_LOOKUP_SAMPLES = 32
_DENSE_FEATURES = 13
_PATIENCE_SECONDS = 60.0


class _Sizes(NamedTuple):
    """Sizes of the benchmark.

    Attributes:
        rows: of each table.
        samples: of a batch, on each rank.
        batches: of a stretch; one checkpoint is due in each.
        pairs: of stretches that are timed.
        lookups: timed for each number of features.
    """

    rows: int
    samples: int
    batches: int
    pairs: int
    lookups: int


class _Times(NamedTuple):
    """What one rank measured, in seconds.

    Attributes:
        plain: of each stretch without checkpoints.
        saved: of each stretch with a checkpoint.
        marks: of all marking in each stretch with a checkpoint.
        stalls: of training, for each checkpoint.
        lookups: of each marking of one lookup, by number of features.
    """

    plain: list[float]
    saved: list[float]
    marks: list[float]
    stalls: list[float]
    lookups: dict[int, list[float]]


def run(*, smoke: bool) -> Report:
    """Measure two ranks.

    `pipelined_vs_none` is samples a second with checkpoints over those without. `mark_share` is the
    share of marking in the time of a batch. `mark_us_400_features` is the time in which the rows of
    one lookup of 400 features are marked. Before a figure is reported, both copies of the model
    must have the same bits, and every checkpoint must validate.
    """
    sizes = (
        _Sizes(rows=500, samples=8, batches=6, pairs=2, lookups=3)
        if smoke
        else _Sizes(rows=20_000, samples=1_024, batches=100, pairs=10, lookups=200)
    )
    report = Report(
        name="torchrec", columns=("rank", "plain ms a batch", "saved ms a batch", "stall ms")
    )
    if not installed():
        report.leave_out(KEYS, f"TorchRec and FBGEMM are not installed: {INSTALL}")
        return report
    times_of_ranks = [_Times(*times) for times in run_ranks(_RANKS, _rank, sizes)]
    for rank, times in enumerate(times_of_ranks):
        report.rows.append(
            (
                rank,
                1e3 * statistics.median(times.plain) / sizes.batches,
                1e3 * statistics.median(times.saved) / sizes.batches,
                1e3 * statistics.median(times.stalls),
            )
        )
    # A stretch ends when the slowest rank has ended it.
    plain = [max(values) for values in zip(*(times.plain for times in times_of_ranks), strict=True)]
    saved = [max(values) for values in zip(*(times.saved for times in times_of_ranks), strict=True)]
    marks = [max(values) for values in zip(*(times.marks for times in times_of_ranks), strict=True)]
    report.timed("stretch without checkpoints", plain)
    report.timed("stretch with a checkpoint", saved)
    report.timed("marks in a stretch", marks)
    report.put("pipelined_vs_none", ratio(plain, saved))
    report.put("mark_share", ratio(marks, saved))
    for count in _FEATURE_COUNTS:
        lookups = [1e6 * s for times in times_of_ranks for s in times.lookups[count]]
        report.put(f"mark_us_{count}_features", spread_of(lookups))
    report.notes.append(
        f"{_TABLES} tables of {sizes.rows:,} rows of {_DIM} F32 values, row-wise over {_RANKS} "
        f"ranks; {sizes.samples:,} samples a rank and batch; a checkpoint every {sizes.batches} "
        f"batches; lookups of features: {_LOOKUP_SAMPLES} samples a rank"
    )
    return report


def run_ranks(ranks: int, target: Callable[..., None], *arguments: object) -> list[Any]:
    """Run a function on each rank of a process group; return what each rank has sent.

    Args:
        ranks: number of ranks, each a process of its own with one thread.
        target: called with a folder of all ranks, the rank, a pipe and `arguments`. It sends one
            value through the pipe.
        arguments: for `target`.

    Raises:
        RuntimeError: a rank ended without sending a value.
    """
    # Forked from a process that has imported all modules: two imports would take a minute.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.torchrec"])
    with scratch() as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(ranks)]
        processes = [
            context.Process(
                target=_in_group, args=(target, folder, rank, ranks, rank_end, *arguments)
            )
            for rank, (_, rank_end) in enumerate(pipes)
        ]
        for process, (_, rank_end) in zip(processes, pipes, strict=True):
            process.start()
            rank_end.close()  # so that `recv` ends if the rank ends
        values: list[Any] = []
        for process, (own_end, _) in zip(processes, pipes, strict=True):
            try:
                values.append(own_end.recv())
            except EOFError:
                process.join()
                raise RuntimeError(f"a rank ended with {process.exitcode}") from None
            process.join(_PATIENCE_SECONDS)
        return values


def _in_group(
    target: Callable[..., None],
    folder: Path,
    rank: int,
    ranks: int,
    pipe: Connection,
    *arguments: object,
) -> None:
    warnings.simplefilter("ignore")  # TorchRec's own
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/group", rank=rank, world_size=ranks
    )
    target(folder, rank, pipe, *arguments)
    dist.destroy_process_group()


class _Batch:
    """Dense features, ids and labels of one batch, as a pipeline wants them."""

    def __init__(self, dense: Tensor, ids: Any, labels: Tensor) -> None:
        self.dense, self.ids, self.labels = dense, ids, labels

    def to(self, device: torch.device, non_blocking: bool = False) -> _Batch:
        return _Batch(self.dense.to(device), self.ids.to(device), self.labels.to(device))

    def record_stream(self, stream: Any) -> None:
        """Do nothing: a CPU has no streams."""

    def pin_memory(self) -> _Batch:
        return self


class _Ranker(nn.Module):
    """A DLRM whose forward pass takes a batch and returns its loss, as pipelines want it."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        from torchrec.models.dlrm import DLRM, DLRMTrain

        self.train_module = DLRMTrain(
            DLRM(
                embedding_bag_collection=bag_tables(_TABLES, rows, _DIM),
                dense_in_features=_DENSE_FEATURES,
                dense_arch_layer_sizes=[512, 256, _DIM],
                over_arch_layer_sizes=[512, 512, 256, 1],
            )
        )

    def forward(self, batch: Any) -> Any:
        model: Any = self.train_module.model
        logits = model(batch.dense, batch.ids).squeeze(-1)
        return self.train_module.loss_fn(logits, batch.labels), logits


def bag_tables(tables: int, rows: int, dim: int) -> Any:
    """Return a collection of tables without storage, each of one feature."""
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig

    return EmbeddingBagCollection(
        device=torch.device("meta"),
        tables=[
            EmbeddingBagConfig(
                name=f"t{n}", embedding_dim=dim, num_embeddings=rows, feature_names=[f"f{n}"]
            )
            for n in range(tables)
        ],
    )


def row_wise(model: nn.Module, bags: Any, path: str) -> Any:
    """Return the model, sharded, with all tables row-wise and under fused row-wise Adagrad.

    Args:
        model: the model.
        bags: its collection of tables.
        path: full name of the collection.
    """
    from torchrec.distributed import sharding_plan as plans
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.types import ShardingPlan
    from torchrec.optim import RowWiseAdagrad
    from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

    apply_optimizer_in_backward(RowWiseAdagrad, bags.parameters(), {"lr": 0.02})
    plan = plans.construct_module_sharding_plan(
        bags,
        {config.name: plans.row_wise() for config in bags.embedding_bag_configs()},
        local_size=dist.get_world_size(),
        world_size=dist.get_world_size(),
        device_type="cpu",
        sharder=plans.get_module_to_default_sharders()[type(bags)],
    )
    return DistributedModelParallel(
        model, device=torch.device("cpu"), plan=ShardingPlan(plan={path: plan})
    )


def lookup(features: int, rows: int, samples: int, generator: torch.Generator) -> Any:
    """Return one id of each feature for each sample; low ids are popular."""
    from torchrec import KeyedJaggedTensor

    values = (torch.rand(features * samples, generator=generator) ** 3 * rows).long()
    return KeyedJaggedTensor(
        keys=[f"f{n}" for n in range(features)],
        values=values,
        lengths=torch.ones(features * samples, dtype=torch.int32),
    )


class _Training:
    """One copy of the model in a pipeline."""

    def __init__(self, rows: int) -> None:
        from torchrec.distributed.train_pipeline.train_pipelines import TrainPipelineSparseDist

        torch.manual_seed(7)  # both copies begin with the same values
        ranker = _Ranker(rows)
        bags = ranker.train_module.model.sparse_arch.embedding_bag_collection
        self.model = row_wise(
            ranker, bags, "train_module.model.sparse_arch.embedding_bag_collection"
        )
        dense = [p for n, p in self.model.named_parameters() if "sparse_arch" not in n]
        self.optimizer = torch.optim.Adagrad(dense, lr=0.02)
        self._pipeline = TrainPipelineSparseDist(
            self.model, self.optimizer, torch.device("cpu"), execute_all_batches=False
        )

    def train(self, batches: Iterator[_Batch], count: int) -> float:
        """Train `count` batches; return the seconds, after all ranks were ready."""
        gc.collect()
        dist.barrier()
        started = perf_counter()
        for _ in range(count):
            self._pipeline.progress(batches)
        return perf_counter() - started

    def tensors(self) -> dict[str, Tensor]:
        """Return this rank's tensors of the model, by name."""
        state = self.model.state_dict()
        return {
            name: value.local_tensor() if hasattr(value, "local_tensor") else value
            for name, value in state.items()
        }


def _rank(folder: Path, rank: int, pipe: Connection, sizes: _Sizes) -> None:
    from torchrec.streamable import Pipelineable

    Pipelineable.register(_Batch)
    marking = _MarkClock()
    lookups = {count: _lookups(count, rank, sizes, marking) for count in _FEATURE_COUNTS}
    trained = _pairs(folder, rank, sizes, marking)
    pipe.send(tuple(trained._replace(lookups=lookups)))


def _pairs(folder: Path, rank: int, sizes: _Sizes, marking: _MarkClock) -> _Times:
    """Train both copies in turn, and compare them at the end."""
    generator = torch.Generator().manual_seed(rank)
    batches = [
        _Batch(
            torch.rand(sizes.samples, _DENSE_FEATURES, generator=generator),
            lookup(_TABLES, sizes.rows, sizes.samples, generator),
            torch.randint(0, 2, (sizes.samples,), generator=generator).float(),
        )
        for _ in range(64)
    ]
    total = sizes.batches * (sizes.pairs + 3)
    sequence = [batches[n % len(batches)] for n in range(total)]
    plain, saved = _Training(sizes.rows), _Training(sizes.rows)
    times = _Times([], [], [], [], {})
    with Checkpointer(
        saved.model,
        saved.optimizer,
        reader=ResumableLoader(sequence),
        run=str(folder / "run"),
        staging=Staging(directory=folder / "staging", jobs=3),
        interval_batches=sizes.batches,
        timeouts=Timeouts(close_seconds=0.0),
    ) as checkpoints:
        checkpoints.restore()
        plain_batches, saved_batches = iter(sequence), checkpoints.batches(total=total)
        # The first checkpoints are a full and the one that follows it, and are not timed. From here
        # on one is due in the middle of each stretch.
        half = sizes.batches // 2
        for count, committed in ((half, 0), (sizes.batches, 1), (sizes.batches, 2)):
            plain.train(plain_batches, count)
            saved.train(saved_batches, count)
            _store(folder, rank, checkpoints=committed)
        for pair in range(sizes.pairs):
            times.plain.append(plain.train(plain_batches, sizes.batches))
            marking.seconds.clear()
            times.saved.append(saved.train(saved_batches, sizes.batches))
            times.marks.append(sum(marking.seconds))
            _store(folder, rank, checkpoints=3 + pair)
        times.stalls.extend(ms / 1e3 for ms in checkpoints.stats.stalls_ms)
        checkpoints.close(final=False)
    plain_tensors, saved_tensors = plain.tensors(), saved.tensors()
    differing = [n for n, value in plain_tensors.items() if not value.equal(saved_tensors[n])]
    if differing:
        raise RuntimeError(f"checkpoints changed the training of {differing}")
    if rank == 0:
        _require_all(folder, checkpoints=sizes.pairs + 2)
    return times


def _store(folder: Path, rank: int, *, checkpoints: int) -> None:
    """Have rank 0 store staged jobs, as an agent does, until so many checkpoints are committed.

    Raises:
        RuntimeError: they are not committed in time.
    """
    dist.barrier()
    if rank == 0:
        deadline = perf_counter() + _PATIENCE_SECONDS
        while len(_checkpoints(folder)) < checkpoints:
            if perf_counter() > deadline:
                raise RuntimeError(f"{_checkpoints(folder)}, expected {checkpoints} checkpoints")
            for staged in staged_runs(folder / "staging"):
                for job in StagedRun(staged.path).staged_jobs():
                    try:
                        persist.persist_job(job)
                    except (RanksMissing, FileNotFoundError):
                        continue  # another rank's job commits, or has answered this one
    dist.barrier()


def _checkpoints(folder: Path) -> list[ManifestName]:
    return sorted(Run.open(open_store(str(folder / "run"))).representations())


def _require_all(folder: Path, *, checkpoints: int) -> None:
    """Count the checkpoints, and validate the newest with its chain.

    Raises:
        RuntimeError: a checkpoint is missing, or the newest does not validate.
    """
    names = _checkpoints(folder)
    if len(names) != checkpoints:
        raise RuntimeError(f"{len(names)} checkpoints, expected {checkpoints}: {names}")
    stored_run = Run.open(open_store(str(folder / "run")))
    validation = validate(stored_run, names[-1], level="full")
    if not validation.passed:
        raise RuntimeError(f"checkpoint {names[-1]} does not validate: {validation}")


class _MarkClock:
    """Times each marking of a lookup in this process.

    Attributes:
        seconds: of each marking.
    """

    def __init__(self) -> None:
        from recpoint.embeddings.tables.marks import LookupMarker

        self.seconds: list[float] = []
        mark = LookupMarker.mark

        def timed(marker: LookupMarker, *arguments: Any) -> None:
            started = perf_counter()
            mark(marker, *arguments)
            self.seconds.append(perf_counter() - started)

        setattr(LookupMarker, "mark", timed)  # noqa: B010


def _lookups(features: int, rank: int, sizes: _Sizes, marking: _MarkClock) -> list[float]:
    """Return the seconds of marking each lookup of `features` features, in real backward passes."""
    from recpoint.embeddings.tables.marks import Tracker
    from recpoint.trainer_plugin.integrations.torchrec import find

    model = nn.ModuleDict({"bags": bag_tables(features, sizes.rows, 8)})
    sharded = row_wise(model, model["bags"], "bags")
    source = find(sharded)
    assert source is not None
    trackers = {table.key: Tracker(table) for table in source.tables}
    source.track(trackers)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(sizes.lookups):
        ids = lookup(features, sizes.rows, _LOOKUP_SAMPLES, generator)
        sharded.module["bags"](ids).values().sum().backward()
    source.untrack()
    seconds, marking.seconds = marking.seconds[1:], []
    return seconds
