"""Defines the plays of TorchRec jobs for tests: what a rank does, and what it returns."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from recpoint.catalog.run.run import Run
from recpoint.catalog.store.store import open_store
from recpoint.embeddings import Uniform, cached, local, read_rows
from recpoint.embeddings.cache.lookup_hooks import cache_of
from recpoint.errors import SettingsError
from recpoint.trainer_plugin.policy import PolicyName
from tests.torchrec_collisions import (
    collided,
    collided_refused,
    collisions_refused,
    mapped_parts,
    mapped_parts_refused,
)
from tests.torchrec_model import (
    BAGS,
    ROWS,
    PooledBatch,
    PooledRanker,
    Ranker,
    all_tables,
    batch,
    sharded,
    shards,
)

__all__ = [
    "NEW_ROWS",
    "collided",
    "collided_refused",
    "collisions_refused",
    "found",
    "lived",
    "looked_ahead",
    "mapped_parts",
    "mapped_parts_refused",
    "piped",
    "pipelines_refused",
    "plain",
    "refused",
    "replicated_sequences",
    "same_names",
    "second_moments",
    "tracked",
    "tracker_of_theirs",
    "under_warm_up",
    "warm",
]

#: First values of rows that a checkpoint lacks.
NEW_ROWS = Uniform(seed=3, low=-0.5, high=0.5)

_COLLECTIONS = ("bags.", "rows.")


def found(kinds: Mapping[str, str], optimizer: str = "RowWiseAdagrad") -> Any:
    """Return what recpoint finds on this rank, and whether that is the live memory."""
    model = sharded(kinds, optimizer=optimizer)
    return [
        {
            "name": table.name,
            "rows": (table.first_row, table.rows, table.table_rows),
            "columns": table.columns and (table.columns.first, table.columns.of),
            "dim": table.dim,
            "states": {n: tuple(t.shape) for n, t in (table.row_states or {}).items()},
            "fused": table.fused,
            "same": table.weight is table.weight,
            "values": table.weight.detach().clone(),
        }
        for table in shards(model)
    ]


def tracked(kinds: Mapping[str, str], optimizer: str = "RowWiseAdagrad", dense: bool = True) -> Any:
    """Return the rows that recpoint marks, that TorchRec's tracker has, and that have changed."""
    from torchrec.distributed.model_tracker.types import DeltaTrackerConfig

    from recpoint.embeddings.tables.marks import Tracker
    from recpoint.kernels import dirty_bitmap
    from recpoint.trainer_plugin.integrations.torchrec import find

    rank = dist.get_rank()
    model = sharded(kinds, optimizer=optimizer, dense=dense)
    their_tracker = model.init_torchrec_delta_tracker(DeltaTrackerConfig())
    source = find(model)
    assert source is not None
    trackers = {table.key: Tracker(table) for table in source.tables}
    source.track(trackers)
    dense_parameters = [] if model.module.over is None else list(model.module.over.parameters())
    sgd = torch.optim.SGD(dense_parameters, lr=0.1) if dense_parameters else None
    results: list[Any] = []

    def look(train: bool, *, empty: bool = False) -> None:
        weights_before = {table.key: table.weight.detach().clone() for table in source.tables}
        model.train(train)
        with torch.set_grad_enabled(train):
            for step in range(3):
                loss = model(*batch(10 * len(results) + step, rank, empty=empty))
                if train:
                    if sgd is not None:
                        sgd.zero_grad()
                    loss.backward()
                    if sgd is not None:
                        sgd.step()
                their_tracker.step()
        try:
            ids = {
                name: ids_tensor.tolist()
                for name, ids_tensor in their_tracker.get_unique_ids().items()
            }
        except Exception as error:
            ids = {"error": f"{type(error).__name__}: {error}"}
            their_tracker.clear()
        own_ids = {}
        for table in source.tables:
            tracker = trackers[table.key]
            assert not tracker.all_rows and not tracker.unapplied
            dirty = tracker.take()
            changed = (
                (table.weight != weights_before[table.key]).any(1).nonzero().flatten().tolist()
            )
            marked = dirty_bitmap.collect(dirty.bitmap, rows=dirty.rows).tolist()
            own_ids[table.key] = (table.name, marked, changed)
            tracker.release(dirty)
        results.append((own_ids, ids))

    look(True)
    look(False)
    look(True, empty=True)
    look(True)
    source.untrack()
    return results


def second_moments(kinds: Mapping[str, str], optimizer: str) -> Any:
    """Train three batches; return each table's second moment, or why the table is refused.

    An Adagrad of torch trains the tables of the compute kernel `dense`.
    """
    from recpoint.format.manifest import RowStateSpec, TableSpec
    from recpoint.trainer_plugin.integrations.torchrec import find
    from recpoint.trainer_plugin.state.second_moments import SecondMoments

    model = sharded(kinds, optimizer=optimizer)
    source = find(model)
    assert source is not None
    by_torch = [table.weight for table in source.tables if not table.fused]
    adagrad = torch.optim.Adagrad([*by_torch, *model.module.over.parameters()], lr=0.1)
    for step in range(3):
        adagrad.zero_grad()
        model(*batch(step, dist.get_rank())).backward()
        adagrad.step()
    moments = SecondMoments([adagrad], [source])
    results: dict[str, Any] = {}
    for table in source.tables:
        states = adagrad.state[table.weight] if table.row_states is None else table.row_states
        names = [name for name in states if name != "step"]
        spec = TableSpec(
            name=table.name,
            rows=table.table_rows,
            dim=table.dim,
            dtype="F32",
            row_states=tuple(
                RowStateSpec(name=name, dtype="F32", shape=(), optimizer=0) for name in names
            ),
        )
        try:
            moment = moments.of(table, spec, 3)
        except SettingsError as error:
            results[table.key] = str(error)
        else:
            assert moment is not None
            results[table.key] = (names[moment.state], moment.scale, moment.initial)
    return results


def tracker_of_theirs() -> dict[str, Any]:
    """Return the cases in which TorchRec's tracker does not do what recpoint needs."""
    from torchrec.distributed.model_tracker.types import DeltaTrackerConfig

    kinds = dict.fromkeys((*BAGS, *ROWS), "table_wise")
    model = sharded(kinds)
    their_tracker = model.init_torchrec_delta_tracker(DeltaTrackerConfig())
    model(*batch(0, 0)).backward()
    their_tracker.step()
    their_tracker.get_unique_ids()
    without = sharded(kinds, dense=False)
    return {
        "read_twice": _error(their_tracker.get_unique_ids),
        "no_dense": _error(lambda: without.init_torchrec_delta_tracker(DeltaTrackerConfig())),
        "no_dense_ours": sorted(table.name for table in shards(without)),
    }


def refused() -> dict[str, str]:
    """Return the error messages for models that are not supported."""
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec.optim.keyed import KeyedOptimizerWrapper, OptimizerWrapper

    from recpoint.trainer_plugin.integrations.torchrec import find

    class OwnWrapper(OptimizerWrapper):  # type: ignore[misc]
        """An optimizer of a user around another one, which may have state."""

    kinds = dict.fromkeys((*BAGS, *ROWS), "table_wise")
    model = sharded(kinds)
    source = find(model)
    assert source is not None
    dense = KeyedOptimizerWrapper(
        {n: p for n, p in model.named_parameters() if "over" in n},
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
    assert source.optimizers([dense, model.fused_optimizer]) == [dense._optimizer]
    states = source.state_dict()
    t0, t1 = (f"bags.embedding_bags.{name}" for name in ("t0", "t1"))
    assert source.differences([states]) == []
    rates = source.differences([states | {t1: states[t1] | {"group_lr": 0.3}}])
    clipped = [{name: state | {"max_gradient": 1e-4} for name, state in states.items()}]
    lacking = _lacking(model)
    # Set here, because FBGEMM makes no unsupported optimizer on a CPU.
    model.module.bags._lookups[0]._emb_modules[0].emb_module.optimizer = EmbOptimType.LARS_SGD
    return {
        **lacking,
        "rates": "; ".join(rates),
        "clipped": "; ".join(
            difference for difference in source.differences(clipped) if t0 in difference
        ),
        "optimizer": _error(lambda: source.optimizers([OwnWrapper(dense)])),
        "fused": _error(lambda: find(model)),
        "adam": _error(lambda: sharded(kinds, optimizer="Adam")),
        "partial": _error(lambda: sharded(kinds, optimizer="PartialRowWiseAdam")),
    }


def _lacking(model: Any) -> dict[str, str]:
    """Return the error messages for a TorchRec and an FBGEMM that lack something.

    Each name is taken out of the real packages. `source` is imported anew, as after a start.
    """
    import fbgemm_gpu.split_table_batched_embeddings_ops_training as training
    import torchrec
    import torchrec.distributed.embedding_types as types
    import torchrec.optim.keyed as keyed
    from fbgemm_gpu.split_embedding_configs import EmbOptimType

    from recpoint.trainer_plugin.integrations.torchrec import find

    bags = model.module.bags
    lookup = bags._lookups[0]
    wrapper = lookup._emb_modules[0]
    tbe = wrapper.emb_module
    table = wrapper.config.embedding_tables[0]
    source = "recpoint.trainer_plugin.integrations.torchrec_source"
    errors = {}
    for name, owner, attribute in (
        ("lacks_class", keyed, "KeyedOptimizerWrapper"),
        ("lacks_base", types, "ShardedEmbeddingModule"),
        ("lacks_method", training.SplitTableBatchedEmbeddingBagsCodegen, "get_optimizer_state"),
        ("lacks_environment", bags, "_env"),
        ("lacks_lookups", bags, "_lookups"),
        ("lacks_modules", lookup, "_emb_modules"),
        ("lacks_kernel", wrapper, "_feature_table_map"),
        ("lacks_arguments", tbe, "optimizer_args"),
        ("lacks_offsets", table.local_metadata, "shard_offsets"),
    ):
        value = getattr(owner, attribute)
        delattr(owner, attribute)
        loaded = sys.modules.pop(source)
        errors[name] = _error(lambda: find(model))
        sys.modules[source] = loaded
        setattr(owner, attribute, value)
    kind = training.SplitTableBatchedEmbeddingBagsCodegen
    forward, kind.forward = kind.forward, kind.split_embedding_weights
    errors["lacks_parameter"] = _error(lambda: find(model))
    kind.forward = forward
    count, optimizer = tbe.iter_cpu, tbe.optimizer
    del tbe.iter_cpu
    tbe.optimizer = EmbOptimType.ADAM
    errors["lacks_count"] = _error(lambda: find(model))
    tbe.iter_cpu, tbe.optimizer = count, optimizer
    real_version, torchrec.__version__ = torchrec.__version__, "99.0.0"
    errors["other_version"] = _error(lambda: find(model))
    torchrec.__version__ = real_version
    return errors


def _error(call: Callable[[], object]) -> str:
    try:
        call()
    except Exception as error:  # TorchRec raises errors of many classes
        return str(error)
    return "no error"


def optimizers(model: nn.Module, kind: str, *, apart: bool = False) -> list[Any]:
    """Return torch's optimizers for dense layers and for tables without a fused optimizer.

    Args:
        model: sharded or plain.
        kind: the optimizer, the same as the fused one of other tables.
        apart: whether the tables have a separate optimizer instead of a separate group.
    """
    from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

    from recpoint.trainer_plugin.integrations.torchrec import find

    source = find(model)
    names = [table.name for table in source.tables if not table.fused] if source else all_tables()
    named = {name.replace("module.", ""): parameter for name, parameter in model.named_parameters()}
    dense = {
        "params": [parameter for name, parameter in named.items() if "over" in name],
        "lr": 0.05,
    }
    tables = [named[f"{name}.weight"] for name in names]
    kinds = {
        "Adagrad": torch.optim.Adagrad,
        "SGD": torch.optim.SGD,
        "RowWiseAdagrad": RowWiseAdagrad,
    }
    # The same value as TorchRec sets for FBGEMM's optimizers.
    of_tables = {"params": tables, "lr": 0.1} | ({} if kind == "SGD" else {"eps": 1e-8})
    if not tables:
        return [torch.optim.Adagrad([dense])]
    if kind == "Adagrad" and not apart:
        return [torch.optim.Adagrad([dense, of_tables])]
    return [kinds[kind]([of_tables]), torch.optim.Adagrad([dense])]


def lived(
    kinds: Mapping[str, str] | None,
    run: str,
    staging: str,
    steps: int,
    *,
    optimizer: str = "RowWiseAdagrad",
    die_at: int | None = None,
    policy: PolicyName = "consecutive",
    apart: bool = False,
    in_cache: bool = False,
    more_rows: Mapping[str, int] | None = None,
    fulls_ahead: bool = False,
) -> Any:
    """Train from the newest checkpoint up to batch `steps`, with a checkpoint every two batches.

    Args:
        kinds: how each table is sharded; None: not at all, in one process.
        apart: see `optimizers`.
        in_cache: whether a cache has the tables; they are not sharded then.
        more_rows: table -> rows that it has now, for tables that have other rows than at first.
        fulls_ahead: whether each checkpoint is a full that is copied before its cut.
    """
    from recpoint import Checkpointer, Consecutive, Options, Staging

    for name, rows in (more_rows or {}).items():
        tables = BAGS if name in BAGS else ROWS
        tables[name] = (rows, tables[name][1])
    rank = dist.get_rank()
    model = Ranker(device="cpu") if kinds is None else sharded(kinds, optimizer=optimizer)
    if in_cache:
        cached(model, local(), capacity_rows=90)
    of_torch = optimizers(model, optimizer, apart=apart)
    with Checkpointer(
        model,
        of_torch,
        run=run,
        staging=Staging(directory=staging, when_busy="wait"),
        interval_batches=2,
        policy=Consecutive(full_every=1) if fulls_ahead else policy,
        options=Options(
            on_error="raise",
            handle_sigterm=False,
            verify_unmarked_rows=1000,
            copy_fulls_ahead=int(fulls_ahead),
            grow=dict.fromkeys(all_tables(), NEW_ROWS) if more_rows else {},
        ),
    ) as checkpoints:
        report = checkpoints.restore()
        state_before = everything(model, *of_torch)
        plain_reasons = []
        while checkpoints.batches_done < steps:
            for torch_optimizer in of_torch:
                torch_optimizer.zero_grad()
            model(*batch(checkpoints.batches_done, rank)).backward()
            for torch_optimizer in of_torch:
                torch_optimizer.step()
            checkpoints.step()
            copied = checkpoints.stats.copied
            if copied is not None and checkpoints.batches_done % 2 == 0:
                plain_reasons.append(copied.why_plain)
            if checkpoints.batches_done == die_at:
                checkpoints.close(final=False)
                os.kill(os.getpid(), signal.SIGKILL)
    return everything(model, *of_torch) | {
        "lacks": [] if kinds is None else _lacks(model),
        "unmarked": checkpoints.stats.unmarked_rows,
        "begun": state_before,
        "restored": report and report.restored.step,
        "plain_reasons": plain_reasons,
        "increments": _increments(run) if rank == 0 else [],
    }


def under_warm_up(
    kind: str, run: str, staging: str, steps: int, *, die_at: int | None = None
) -> Any:
    """Train under one CombinedOptimizer whose rates change at each step, also of fused tables.

    Args:
        kind: "warm-up": TorchRec's warm-ups set the rates, with clipped gradients of the dense
            part; "scheduler": a scheduler of torch sets those of the whole CombinedOptimizer.
        die_at: batches after which each rank kills itself; the newest checkpoint is older.
    """
    from torchrec.optim.clipping import GradientClipping, GradientClippingOptimizer
    from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
    from torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage

    from recpoint import Checkpointer, Options, Staging

    model = sharded(dict.fromkeys((*BAGS, *ROWS), "row_wise"))
    dense: Any = KeyedOptimizerWrapper(
        {name: p for name, p in model.named_parameters() if "over" in name},
        lambda parameters: torch.optim.Adagrad(parameters, lr=0.05),
    )
    fused = model.fused_optimizer
    schedulers: list[Any] = []
    if kind == "warm-up":
        dense = GradientClippingOptimizer(dense, clipping=GradientClipping.NORM, max_gradient=0.5)
        # After four steps comes a stage that decays, so that batch 5 is in the second stage.
        stages = [(WarmupPolicy.LINEAR, 4, 0.1), (WarmupPolicy.POLY, 20, 0.9)]
        dense, fused = (
            WarmupOptimizer(
                optimizer,
                [WarmupStage(policy=how, max_iters=end, value=value) for how, end, value in stages],
                lr=rate,
            )
            for optimizer, rate in ((dense, 0.05), (fused, 0.2))
        )
    optimizer = CombinedOptimizer([("fused", fused), ("dense", dense)])
    if kind == "scheduler":
        schedulers = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)]
    rates = []
    with Checkpointer(
        model,
        optimizer,
        schedulers=schedulers,
        run=run,
        staging=Staging(directory=staging, when_busy="wait"),
        interval_batches=2,
        options=Options(on_error="raise", handle_sigterm=False),
    ) as checkpoints:
        report = checkpoints.restore()
        while checkpoints.batches_done < steps:
            optimizer.zero_grad()
            model(*batch(checkpoints.batches_done, dist.get_rank())).backward()
            rates.append([group["lr"] for group in optimizer.param_groups])
            optimizer.step()
            for scheduler in schedulers:
                scheduler.step()
            checkpoints.step()
            if checkpoints.batches_done == die_at:
                checkpoints.close(final=False)
                os.kill(os.getpid(), signal.SIGKILL)
    parts = [p for _, p in optimizer.optimizers]
    return everything(model, dense_of(parts[1])) | {
        "rates": rates,
        "restored": report and report.restored.step,
        "positions": [part._get_warmup_state() for part in parts] if kind == "warm-up" else [],
    }


def dense_of(optimizer: Any) -> torch.optim.Optimizer:
    """Return the optimizer of torch in wrappers of TorchRec."""
    while hasattr(optimizer, "_optimizer"):
        optimizer = optimizer._optimizer
    inner: torch.optim.Optimizer = optimizer
    return inner


def piped(
    how: str,
    pipeline: str,
    run: str,
    staging: str,
    *,
    kind: str = "row_wise",
    stop_after: int | None = None,
    die_at: str | None = None,
) -> Any:
    """Train ten batches in a pipeline of TorchRec, with a checkpoint every two batches.

    Args:
        how: "batches": the pipeline gets `batches()`; "step": it gets the reader, and `step` is
            called; "pipelined": `Checkpointer.pipelined` counts its batches.
        pipeline: name of the pipeline's class; "": a plain loop.
        kind: how each table is sharded. Row-wise tables have a row on each rank, because FBGEMM
            cannot train a shard without rows on a CPU; a smaller table is table-wise.
        stop_after: batches after which this life stops without a last checkpoint.
        die_at: phase of the sixth batch of this life in which all ranks kill themselves; see
            `_die_in`.
    """
    from torchrec.distributed.train_pipeline import train_pipelines
    from torchrec.streamable import Pipelineable

    from recpoint import Checkpointer, Options, ResumableLoader, Staging

    is_small = {name: rows < dist.get_world_size() for name, (rows, _) in (BAGS | ROWS).items()}
    kinds = {
        name: "table_wise" if small and kind == "row_wise" else kind
        for name, small in is_small.items()
    }
    model = sharded(kinds, model=PooledRanker())
    Pipelineable.register(PooledBatch)
    dense = [p for name, p in model.named_parameters() if "over" in name]
    optimizer = torch.optim.Adagrad(dense, lr=0.05)
    batches = [PooledBatch(number, batch(number, dist.get_rank())[0]) for number in range(10)]
    trained: list[int] = []

    def note(_: nn.Module, arguments: tuple[PooledBatch]) -> None:
        trained.append(arguments[0].number)

    model.register_forward_pre_hook(note)
    reader = ResumableLoader(batches)
    pipeline_class = getattr(train_pipelines, pipeline) if pipeline else None
    inner = pipeline_class and pipeline_class(model, optimizer, torch.device("cpu"))
    if die_at is not None:
        _die_in(die_at, model, optimizer, inner, run, Path(f"{staging}.dying"))
    with Checkpointer(
        model,
        optimizer,
        reader=reader,
        run=run,
        staging=Staging(directory=staging, when_busy="wait"),
        interval_batches=2,
        options=Options(on_error="raise", handle_sigterm=False),
    ) as checkpoints:
        checkpoints.restore()
        first_batch = checkpoints.batches_done
        driven = checkpoints.pipelined(inner) if how == "pipelined" else inner
        source = iter(reader) if how == "step" else checkpoints.batches(total=10)
        while len(trained) != stop_after:
            if driven is None:
                next_batch = next(source, None)
                if next_batch is None:
                    break
                optimizer.zero_grad()
                model(next_batch)[0].sum().backward()
                optimizer.step()
                continue
            try:
                driven.progress(source)
            except StopIteration:
                break
            if how == "step":
                checkpoints.step()
        if stop_after is not None:
            checkpoints.close(final=False)
    return everything(model, optimizer) | {
        "begun": first_batch,
        "trained": trained,
        "done": checkpoints.batches_done,
    }


def looked_ahead(
    kinds: Mapping[str, str], run: str, pipeline: str = "", *, in_pieces: bool = False
) -> Any:
    """Train with and without a Lookahead, which finds the ids in the batches itself.

    Args:
        kinds: how each table is sharded.
        pipeline: name of the pipeline's class; "": a plain loop.
        in_pieces: take fulls only, and copy them ahead as those of tables on a GPU, without a
            Lookahead.
    """
    from torchrec.distributed.train_pipeline import train_pipelines
    from torchrec.streamable import Pipelineable

    from recpoint import Consecutive, Lookahead, Options, ResumableLoader
    from recpoint.trainer_plugin.snapshot import cut
    from tests.ahead_ranks import INTERVAL, WINDOW, RankJob, train_alike

    if in_pieces:  # for the life of this process
        pytest.MonkeyPatch().setattr(cut, "are_copied_in_pieces", lambda tables: True)
    Pipelineable.register(PooledBatch)
    batches = [PooledBatch(number, batch(number, dist.get_rank())[0]) for number in range(90)]

    def job(name: str, window: int) -> RankJob:
        torch.manual_seed(3)
        model = sharded(kinds, model=PooledRanker())
        of_torch = optimizers(model, "RowWiseAdagrad")
        loader: Any = ResumableLoader(batches)
        reader = Lookahead(loader, window=window) if window and not in_pieces else loader
        settings: dict[str, Any] = {}
        if in_pieces:
            settings["policy"] = Consecutive(full_every=1)
            settings["options"] = Options(
                handle_sigterm=False, announce=False, on_error="raise", copy_fulls_ahead=window
            )
        kind = pipeline and getattr(train_pipelines, pipeline)
        inner = kind(model, of_torch[0], torch.device("cpu")) if kind else None

        def train(source: Any) -> None:
            if inner is not None:
                inner.progress(source)
                return
            for optimizer in of_torch:
                optimizer.zero_grad()
            model(next(source))[0].sum().backward()
            for optimizer in of_torch:
                optimizer.step()

        return RankJob(Path(run) / name, model, of_torch, reader, train, **settings)

    return train_alike(job("plain", 0), job("ahead", WINDOW), 3 * INTERVAL)


def _die_in(phase: str, model: Any, optimizer: Any, pipeline: Any, run: str, folder: Path) -> None:
    """Have all ranks kill themselves in a phase of the sixth batch.

    Args:
        phase: "distribution": the batch's ids are on their way to the ranks that hold their rows;
            "lookup": its rows are about to be looked up; "step": the optimizer's step is done.
        run: they die when the checkpoint after two batches is committed.
        folder: where ranks leave a file when they are there; none dies before all are.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    batches = 0

    def pass_by(*_: Any, **__: Any) -> None:
        nonlocal batches
        batches += 1
        if batches < 6:
            return
        folder.mkdir(exist_ok=True)
        (folder / str(rank)).touch()
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and (
            len(list(folder.iterdir())) < ranks
            or all(name.step < 2 for name in Run.open(open_store(run)).manifest_names())
        ):
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGKILL)

    if phase == "distribution":
        start = pipeline.start_sparse_data_dist

        def start_and_pass_by(*arguments: Any, **keywords: Any) -> None:
            start(*arguments, **keywords)
            pass_by()

        pipeline.start_sparse_data_dist = start_and_pass_by
    elif phase == "lookup":
        model.module.bags._lookups[0].register_forward_pre_hook(pass_by)
    else:
        optimizer.register_step_post_hook(pass_by)


def pipelines_refused(run: str, staging: str) -> dict[str, str]:
    """Return the errors for pipelines that no checkpoint can be taken of."""
    from torchrec.distributed.train_pipeline.experimental_pipelines import (
        TrainPipelineSparseDistEmbStash,
        TrainPipelineSparseDistOptStash,
    )
    from torchrec.distributed.types import ShardingEnv2D

    from recpoint import Checkpointer, Options, ResumableLoader
    from recpoint.trainer_plugin.integrations.torchrec import find

    errors = {}
    for kind in (TrainPipelineSparseDistEmbStash, TrainPipelineSparseDistOptStash):
        model = sharded(dict.fromkeys((*BAGS, *ROWS), "row_wise"), model=PooledRanker())
        optimizer = torch.optim.Adagrad(model.module.head.parameters(), lr=0.05)
        with Checkpointer(
            model,
            optimizer,
            reader=ResumableLoader([]),
            run=f"{run}-{kind.__name__}",
            staging=staging,
            interval_batches=2,
            options=Options(handle_sigterm=False),
        ) as checkpoints:
            checkpoints.restore()
            stashing = kind.__new__(kind)  # its own set-up asks for a GPU
            errors[kind.__name__] = _error(partial(checkpoints.pipelined, stashing))
            checkpoints.close(final=False)
    pooled = sharded(dict.fromkeys((*BAGS, *ROWS), "row_wise"), model=PooledRanker())
    # A DMPCollection needs GPUs; this is what it gives to the modules inside it.
    pooled.module.bags._env = ShardingEnv2D.__new__(ShardingEnv2D)
    errors["inside"] = _error(lambda: find(pooled))
    errors["plain"] = _error(lambda: piped("batches", "TrainPipelineSparseDistLite", run, staging))
    return errors


def replicated_sequences(run: str, staging: str, steps: int) -> Any:
    """Train replicated sequence tables with gradients made here: FBGEMM has no CPU lookup."""
    from recpoint import Checkpointer, Options, Staging

    model = sharded(dict.fromkeys((*BAGS, *ROWS), "data_parallel"), sequences=True)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
    with Checkpointer(
        model,
        optimizer,
        run=run,
        staging=Staging(directory=staging, when_busy="wait"),
        interval_batches=2,
        options=Options(on_error="raise", handle_sigterm=False),
    ) as checkpoints:
        report = checkpoints.restore()
        state_before = everything(model, optimizer)
        while checkpoints.batches_done < steps:
            generator = torch.Generator().manual_seed(checkpoints.batches_done)
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
                row = checkpoints.batches_done % len(parameter)
                parameter.grad[row] = torch.randn(parameter[row].shape, generator=generator)
            optimizer.step()
            checkpoints.step()
    return everything(model, optimizer) | {
        "begun": state_before,
        "restored": report and report.restored.step,
        "increments": _increments(run) if dist.get_rank() == 0 else [],
        "lookup": _error(lambda: model.module.rows(batch(0, 0)[1])["h0"]),
    }


class _TwoModules(nn.Module):
    """Two collections with a table of one name, and other rows."""

    def __init__(self) -> None:
        super().__init__()
        from torchrec import EmbeddingBagCollection, EmbeddingBagConfig

        self.first, self.second = (
            EmbeddingBagCollection(
                device=torch.device("meta"),
                tables=[
                    EmbeddingBagConfig(
                        name="t", embedding_dim=4, num_embeddings=rows, feature_names=["f"]
                    )
                ],
            )
            for rows in (20, 30)
        )


def same_names(run: str, staging: str) -> Any:
    """Train two tables of one name; after two batches, the second one gets no new rows."""
    import torchrec
    from torchrec.distributed import sharding_plan as plans
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.types import ShardingPlan
    from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

    from recpoint import Checkpointer, Options, Staging

    plain = _TwoModules()
    apply_optimizer_in_backward(torchrec.optim.RowWiseAdagrad, plain.parameters(), {"lr": 0.1})
    sharders = plans.get_module_to_default_sharders()
    world = dist.get_world_size()
    chosen = {
        path: plans.construct_module_sharding_plan(
            module,
            {"t": plans.row_wise()},
            local_size=world,
            world_size=world,
            device_type="cpu",
            sharder=sharders[type(module)],
        )
        for path, module in plain.named_children()
    }
    model = DistributedModelParallel(
        plain, device=torch.device("cpu"), plan=ShardingPlan(plan=chosen)
    )

    def weights() -> list[Any]:
        return [table.weight.tolist() for table in shards(model)]

    with Checkpointer(
        model,
        [],
        run=run,
        staging=Staging(directory=staging, when_busy="wait"),
        interval_batches=2,
        options=Options(on_error="raise", handle_sigterm=False),
    ) as checkpoints:
        checkpoints.restore()
        first_batch, initial = checkpoints.batches_done, weights()
        while checkpoints.batches_done < 6:
            step = checkpoints.batches_done
            rows = torch.tensor([step, step + 11])
            features = torchrec.KeyedJaggedTensor.from_lengths_sync(
                ["f"], rows, torch.tensor([len(rows)], dtype=torch.int32)
            )
            loss = model.module.first(features).values().sum()
            if step < 2:
                loss = loss + model.module.second(features).values().sum()
            loss.backward()
            checkpoints.step()
    return {
        "names": [table.name for table in shards(model)],
        "begun": first_batch,
        "initial": initial,
        "weights": weights(),
    }


def _increments(run: str) -> list[int]:
    """Return the number of dirty rows of each increment."""
    opened = Run.open(open_store(run))
    manifests = [opened.manifest(name.step, name.generation) for name in opened.manifest_names()]
    return [manifest.dirty_rows for manifest in manifests if manifest.kind == "increment"]


def plain(run: str, staging: str, into: str) -> Any:
    """Move the tables and dense layers of `run` through an unsharded model to another run, `into`.

    A sharded model then restores them from `into`.
    """
    from recpoint import Seed

    model = Ranker(device="cpu")
    with _taking_over(model, list(model.parameters()), into, staging) as checkpoints:
        seed = Seed(run, tables={name: name for name in all_tables()}, dense=["over.*"])
        checkpoints.restore(seed=seed)
        checkpoints.checkpoint()
    restored = sharded(dict.fromkeys((*BAGS, *ROWS), "column_wise"), optimizer="Adagrad")
    parameters = [p for n, p in restored.named_parameters() if not n.startswith(_COLLECTIONS)]
    with _taking_over(restored, parameters, into, staging) as checkpoints:
        checkpoints.restore(partial={"tables": all_tables(), "dense": ["over.*"]})
    weights = {name: model.get_parameter(f"{name}.weight").detach() for name in all_tables()}
    assert model.over is not None
    return {
        "tables": {(name, 0, 0): {"weight": weight} for name, weight in weights.items()},
        "dense": {f"over.{n}": p.detach() for n, p in model.over.named_parameters()},
        "back": everything(restored, torch.optim.SGD(parameters, lr=0.1)),
    }


def warm(kinds: Mapping[str, str], folder: str, run: str, staging: str, optimizer: str) -> Any:
    """Begin a run with the checkpoint of a job that knows nothing of recpoint.

    Args:
        kinds: how the run shards each table; the job shards all by rows.
        folder: where the job writes its checkpoint.
    """
    from torch.distributed.checkpoint.state_dict_saver import save

    from recpoint import Checkpointer, Options, Seed

    rank = dist.get_rank()
    source: Any = sharded(dict.fromkeys((*BAGS, *ROWS), "row_wise"), optimizer=optimizer)
    of_torch = optimizers(source, optimizer)
    for number in range(2):
        of_torch[0].zero_grad()
        source(*batch(number, rank)).backward()
        of_torch[0].step()
    saved = {
        "model": source.state_dict(),
        "fused": source.fused_optimizer.state_dict(),
        "dense": of_torch[0].state_dict(),
    }
    save(saved, checkpoint_id=folder)
    begun = sharded(kinds, optimizer=optimizer)
    with torch.no_grad():
        for table in shards(begun):
            table.weight.fill_(7.0)
    dense = optimizers(begun, optimizer)
    with Checkpointer(
        begun,
        dense,
        run=run,
        staging=staging,
        interval_batches=1,
        options=Options(on_error="raise", handle_sigterm=False),
    ) as checkpoints:
        everything_in = partial(Seed, tables=["*"], dense=["*"], optimizer_states="carry")
        refusal = _error(
            lambda: checkpoints.restore(seed=everything_in(folder if rank == 0 else f"{folder}x"))
        )
        untouched = all(bool((table.weight == 7.0).all()) for table in shards(begun))
        checkpoints.restore(seed=everything_in(folder))
        outcomes = {
            "source": everything(source, *of_torch),
            "begun": everything(begun, *dense),
            "refusal": refusal,
            "untouched": untouched,
        }
    return outcomes | {
        "imported": _begun_with_import(kinds, folder, f"{run}-2", staging, optimizer)
    }


def _begun_with_import(
    kinds: Mapping[str, str], folder: str, run: str, staging: str, optimizer: str
) -> Any:
    """Begin with what `recpoint import` wrote; return the start, the state, and that before it."""
    from recpoint import Checkpointer, Options

    if dist.get_rank() == 0:
        words = [folder, run, "--map", "model.*=*", "--scratch", str(Path(folder).parent)]
        words += [word for name in all_tables() for word in ("--table", name)]
        subprocess.run([sys.executable, "-m", "recpoint", "import", *words], check=True)
    dist.barrier()
    model = sharded(kinds, optimizer=optimizer)
    dense = optimizers(model, optimizer)
    fresh = everything(model, *dense)
    with Checkpointer(
        model,
        dense,
        run=run,
        staging=staging,
        interval_batches=1,
        options=Options(on_error="raise", handle_sigterm=False),
    ) as checkpoints:
        report = checkpoints.restore()
        begun = everything(model, *dense)
        checkpoints.close(final=False)
    return {"fresh": fresh, "begun": begun, "step": report and report.restored.step}


def _taking_over(model: nn.Module, trained: Sequence[Tensor], run: str, staging: str) -> Any:
    from recpoint import Checkpointer, Options

    return Checkpointer(
        model,
        torch.optim.SGD(trained, lr=0.1),
        run=run,
        staging=staging,
        interval_batches=1,
        options=Options(on_error="raise", handle_sigterm=False),
    )


def everything(model: nn.Module, *optimizers: torch.optim.Optimizer) -> dict[str, Any]:
    """Return all training state as tensors, in the same form for any optimizer of a table."""
    from recpoint.trainer_plugin.integrations.torchrec import find

    source = find(model)
    named = {n.replace("module.", ""): p for n, p in model.named_parameters()}
    whole_state: dict[str, Any] = {
        "tables": {},
        "rates": {},
        "steps": {},
        "fused": {} if source is None else source.state_dict(),
        "dense": {n: p.detach().clone() for n, p in named.items() if "over" in n},
        "optimizer": {},
    }
    for table in () if source is None else source.tables:
        place = (table.name, table.first_row, 0 if table.columns is None else table.columns.first)
        states = {n: t.clone() for n, t in (table.row_states or {}).items()}
        whole_state["tables"][place] = {"weight": table.weight.detach().clone(), **states}
        if table.fused:
            state = whole_state["fused"][table.name]
            eps = () if state["optimizer"] == "exact_sgd" else (state["eps"],)
            whole_state["rates"][table.name] = (state["group_lr"], *eps)
    trained = {
        id(p): (optimizer, group)
        for optimizer in optimizers
        for group in optimizer.param_groups
        for p in group["params"]
    }
    for name, parameter in named.items():
        if id(parameter) not in trained:
            continue
        optimizer, group = trained[id(parameter)]
        state = optimizer.state.get(parameter, {})
        if "over" in name:
            whole_state["optimizer"] |= {
                f"{name}.{key}": value.clone() for key, value in state.items()
            }
            continue
        table_name = name.removesuffix(".weight")
        rows = {"values": parameter.detach(), "sum": state.get("sum")}
        if cache_of(model) is not None:
            rows = {"sum": None} | read_rows(model, table_name, optimizer)
        sums = {} if rows["sum"] is None else {"sum": rows["sum"].squeeze(1).clone()}
        whole_state["tables"][table_name, 0, 0] = {"weight": rows["values"].clone(), **sums}
        eps = (group["eps"],) if sums else ()
        whole_state["rates"][table_name] = (group["lr"], *eps)
        whole_state["steps"] |= {table_name: int(state["step"])} if sums else {}
    return whole_state


def _lacks(model: nn.Module) -> list[bool]:
    """Whether the model lacks ranks' states, given no states, and given its own tables' states."""
    from recpoint.trainer_plugin.integrations.torchrec import find

    source = find(model)
    assert source is not None
    return [source.lacks_states([]), source.lacks_states([source.state_dict()])]
