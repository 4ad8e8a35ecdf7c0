"""Trains TorchRec models with managed collisions, for tests."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from recpoint.catalog.run.run import Run
from recpoint.catalog.store.store import open_store

__all__ = [
    "collided",
    "collided_refused",
    "collisions_refused",
    "mapped_parts",
    "mapped_parts_refused",
]

#: Table -> rows and features.
MAPPED = {"t0": (80, ("f0", "g0")), "t1": (60, ("f1",))}
DIM = 4
BATCH = 4


class Head(nn.Module):
    """Computes the loss from looked-up values; a train pipeline does not trace it."""

    def __init__(self) -> None:
        super().__init__()
        self.over = nn.Linear(DIM, 1)

    def forward(self, looked_up: Any) -> Tensor:
        features = looked_up.to_dict() if hasattr(looked_up, "to_dict") else looked_up
        total = torch.zeros(DIM)
        for name in sorted(features.keys()):
            values = features[name]
            values = values if isinstance(values, Tensor) else values.values()
            total = total + values.square().sum(0)
        loss: Tensor = self.over(total)
        return loss.reshape(1)


class Mapped(nn.Module):
    """Tables whose raw ids a managed collision module maps, and a dense layer."""

    def __init__(self, kind: str, policy: str, device: str, interval: int = 3) -> None:
        super().__init__()
        import torchrec
        from torchrec.modules import mc_embedding_modules, mc_modules

        is_bag = kind == "EBC"
        config: Any = torchrec.EmbeddingBagConfig if is_bag else torchrec.EmbeddingConfig
        configs = [
            config(name=name, embedding_dim=DIM, num_embeddings=rows, feature_names=list(features))
            for name, (rows, features) in MAPPED.items()
        ]
        collection: Any = (
            torchrec.EmbeddingBagCollection if is_bag else torchrec.EmbeddingCollection
        )
        modules = {
            name: mc_modules.MCHManagedCollisionModule(
                zch_size=rows,
                device=torch.device(device),
                eviction_policy=getattr(mc_modules, f"{policy}_EvictionPolicy")(),
                eviction_interval=interval,
                input_hash_size=4000,
            )
            for name, (rows, _) in MAPPED.items()
        }
        outer: Any = (
            mc_embedding_modules.ManagedCollisionEmbeddingBagCollection
            if is_bag
            else mc_embedding_modules.ManagedCollisionEmbeddingCollection
        )
        self.mapped = outer(
            collection(tables=configs, device=torch.device(device)),
            mc_modules.ManagedCollisionCollection(modules, configs),
        )
        self.head = Head()

    def forward(self, features: Any) -> tuple[Tensor, Tensor]:
        """Return the loss of one batch, twice, as train pipelines want it."""
        loss = self.head(self.mapped(features)[0])
        return loss, loss.detach()


def mapped_batch(step: int, rank: int) -> Any:
    """Return the features of a step and rank: raw ids, a few often, other ones every 3 steps."""
    from torchrec import KeyedJaggedTensor

    generator = torch.Generator().manual_seed(1000 * step + rank)
    keys, lengths, values = [], [], []
    for _, features in MAPPED.values():
        for feature in features:
            counts = torch.randint(1, 6, (BATCH,), generator=generator)
            often = torch.randint(0, 6, (int(counts.sum()),), generator=generator) * 700 + step // 3
            seldom = torch.randint(0, 4000, often.shape, generator=generator)
            is_often = torch.rand(often.shape, generator=generator) < 0.5
            keys.append(feature)
            lengths.append(counts)
            values.append(torch.where(is_often, often, seldom))
    return KeyedJaggedTensor.from_lengths_sync(keys, torch.cat(values), torch.cat(lengths).int())


def mapped_model(
    kind: str, policy: str, *, sharded: bool, interval: int = 3, kernel: str | None = None
) -> Any:
    """Return a seeded model, whole or sharded by rows over all ranks, in TorchRec's `kernel`."""
    torch.manual_seed(7)
    if not sharded:
        return Mapped(kind, policy, "cpu", interval)
    import torchrec
    from torchrec.distributed import sharding_plan as plans
    from torchrec.distributed.mc_embedding import ManagedCollisionEmbeddingCollectionSharder
    from torchrec.distributed.mc_embeddingbag import ManagedCollisionEmbeddingBagCollectionSharder
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.types import ShardingPlan
    from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

    plain = Mapped(kind, policy, "meta", interval)
    tables = list(plain.mapped._embedding_module.parameters())
    # Not row-wise: FBGEMM has no eviction of its rows on a CPU ("reset_weight_momentum").
    apply_optimizer_in_backward(torchrec.optim.Adagrad, tables, {"lr": 0.1})
    sharder: Any = (
        ManagedCollisionEmbeddingBagCollectionSharder
        if kind == "EBC"
        else ManagedCollisionEmbeddingCollectionSharder
    )()
    world = dist.get_world_size()
    plan = plans.construct_module_sharding_plan(
        plain.mapped,
        {name: plans.row_wise(compute_kernel=kernel) for name in MAPPED},
        local_size=world,
        world_size=world,
        device_type="cpu",
        sharder=sharder,
    )
    return DistributedModelParallel(
        plain,
        device=torch.device("cpu"),
        plan=ShardingPlan(plan={"mapped": plan}),
        sharders=[sharder],
    )


def _collisions_of(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Return all that decides how the managed collisions of a model go on, as the module has it."""
    state: dict[str, dict[str, Any]] = {}
    for name, module in model.named_modules():
        if not name.endswith(tuple(f"_managed_collision_modules.{table}" for table in MAPPED)):
            continue
        mapped: Any = module
        length = mapped._current_history_buffer_offset
        state[name] = {
            **{n: t.clone() for n, t in mapped._buffers.items() if not n.startswith("_history")},
            **{f"of {n}": t.clone() for n, t in mapped._mch_metadata.items()},
            **{f"history of {n}": t[:length].clone() for n, t in mapped._history_metadata.items()},
            "numbers": (
                mapped._current_iter,
                mapped._last_eviction_iter,
                mapped._input_history_buffer_size,
                length,
                mapped._evicted,
            ),
        }
        if mapped._input_history_buffer_size >= 0:
            state[name]["history"] = mapped._history_accumulator[:length].clone()
    return state


def _whole_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    from recpoint.trainer_plugin.integrations.torchrec import find

    source = find(model)
    parameters = dict(model.named_parameters())
    return {
        "tables": {
            (table.name, table.first_row): {
                "weight": table.weight.detach().clone(),
                **{n: t.clone() for n, t in (table.row_states or {}).items()},
            }
            for table in (() if source is None else source.tables)
        },
        "parameters": {
            name.replace("module.", ""): p.detach().clone()
            for name, p in parameters.items()
            if source is None or "over" in name
        },
        "optimizer": {
            (number, name): value.clone()
            for number, state in optimizer.state_dict()["state"].items()
            for name, value in state.items()
        },
        "collisions": _collisions_of(model),
    }


def collided(
    kind: str,
    policy: str,
    run: str,
    staging: str,
    steps: int,
    *,
    sharded: bool = True,
    die_at: int | None = None,
    interval: int = 3,
    bits: Literal[8] | None = None,
    pipeline: str = "",
    replicated: Literal["", "own buffers", "buffers of rank 0"] = "",
) -> Any:
    """Train from the newest checkpoint up to batch `steps`, with a checkpoint every two batches.

    Args:
        kind: "EBC" or "EC".
        policy: the eviction policy, by the beginning of its name.
        die_at: batches after which the process kills itself.
        interval: batches between two evictions.
        replicated: whose buffers ranks have in `DistributedDataParallel`; "": it is not used.
        pipeline: name of TorchRec's pipeline that trains; "": a plain loop does.

    Returns:
        All state before the first batch and at the end, the rows given to other ids, the step that
        was restored, and of rank 0 the rows of each increment.
    """
    from recpoint import Checkpointer, Options, Precision, ResumableLoader, Staging

    model = mapped_model(kind, policy, sharded=sharded, interval=interval)
    parameters = [p for n, p in model.named_parameters() if not sharded or "over" in n]
    if replicated:
        model = nn.parallel.DistributedDataParallel(
            model, broadcast_buffers=replicated == "buffers of rank 0"
        )
    optimizer = torch.optim.Adagrad(parameters, lr=0.05)
    evictions = trained = 0
    rank = dist.get_rank()
    batches = [mapped_batch(step, rank) for step in range(steps)]
    precision = Precision(bits="lossless" if bits is None else bits, small_table_values=0)
    with Checkpointer(
        model,
        optimizer,
        reader=ResumableLoader(batches) if pipeline else None,
        run=run,
        staging=Staging(directory=staging, when_busy="wait"),
        interval_batches=2,
        bits=precision,
        options=Options(on_error="raise", handle_sigterm=False, verify_unmarked_rows=1000),
    ) as checkpoints:
        report = checkpoints.restore()
        begun = _whole_state(model, optimizer)
        driver = None
        if pipeline:
            from torchrec.distributed.train_pipeline import train_pipelines

            driver = getattr(train_pipelines, pipeline)(model, optimizer, torch.device("cpu"))
            batches_to_train = checkpoints.batches(total=steps)
        while checkpoints.batches_done < steps:
            ids_before = _ids_of_rows(model)
            if driver is not None:
                try:
                    driver.progress(batches_to_train)
                except StopIteration:
                    break
            else:
                optimizer.zero_grad()
                model(batches[checkpoints.batches_done])[0].sum().backward()
                optimizer.step()
                checkpoints.step()
            ids_after = _ids_of_rows(model)
            evictions += sum(
                int(((ids_before[name] != ids_after[name]) & (ids_before[name] != _NO_ID)).sum())
                for name in ids_after
            )
            trained += 1
            if trained == die_at:
                checkpoints.close(final=False)
                os.kill(os.getpid(), signal.SIGKILL)
    if driver is not None:
        driver.detach()  # a pipelined module looks nothing up outside of its pipeline
    return _whole_state(model, optimizer) | {
        "begun": begun,
        "served": _served(run, kind, policy, model),
        "restored": report and report.restored.step,
        "evictions": evictions,
        "unmarked": checkpoints.stats.unmarked_rows,
        "increments": _increments(run) if rank == 0 else [],
    }


def _rows_of_every_id(model: Any) -> Tensor:
    """Return the row to which a model in evaluation maps each of many ids, [ids, values].

    Below 0 and from 4000 on, TorchRec divides ids otherwise among ranks.
    """
    from torchrec import KeyedJaggedTensor

    ids = torch.cat([torch.arange(-40, 4040), torch.tensor([-(2**63), 2**62, _NO_ID - 1, _NO_ID])])
    keys = [feature for _, features in MAPPED.values() for feature in features]
    features = KeyedJaggedTensor.from_lengths_sync(
        keys, ids.repeat(len(keys)), torch.ones(len(ids) * len(keys), dtype=torch.int32)
    )
    with torch.no_grad():
        looked_up = model.eval().mapped(features)[0]
    if hasattr(looked_up, "to_dict"):
        looked_up = looked_up.to_dict()
    values = [looked_up[key] for key in keys]
    return torch.cat([v if isinstance(v, Tensor) else v.values() for v in values], dim=1)


def _served(run: str, kind: str, policy: str, trained: nn.Module) -> dict[str, Tensor]:
    """Return the rows of ids of the trained model and of followers, which rank 0 makes.

    The followers serve each version up to the newest, so both copies have served.
    """
    from recpoint import Follower

    # Its name in DDP and in TorchRec's wrapper. All ranks look up together.
    rows = {"trained": _rows_of_every_id(getattr(trained, "module", trained))}
    for name, quantized in (("decoded", False), ("quantized", True)) if not dist.get_rank() else ():
        model = mapped_model(kind, policy, sharded=False, interval=1)
        follower = Follower(run, model=model, quantized=quantized)
        for served in reversed(Run.open(open_store(run)).live_line()):
            follower.pin(served.step)
            follower.poll()
        with follower.reading() as version:
            rows[name] = _rows_of_every_id(version.model)
    return rows


_NO_ID = torch.iinfo(torch.int64).max


def _ids_of_rows(model: nn.Module) -> Mapping[str, Tensor]:
    """Return the raw id of each row, as the modules have it."""
    ids = {}
    for name, state in _collisions_of(model).items():
        order = state["_mch_remapped_ids_mapping"].argsort()
        ids[name] = state["_mch_sorted_raw_ids"][order]
    return ids


def collided_refused(**arguments: Any) -> str:
    """Return the error of `collided` with these arguments."""
    return _error_of(lambda: collided(**arguments))


def mapped_parts_refused(run: str, staging: str) -> dict[str, str]:
    """Return the errors for parts of a run with sharded tables of policy LRU, on one rank."""
    from recpoint import Checkpointer, Options, Seed
    from recpoint.catalog.foreign.recognize import open_foreign
    from recpoint.cli.imported_run import planned_run, write_run

    model = mapped_model("EBC", "LRU", sharded=True)
    optimizer = torch.optim.Adagrad([p for n, p in model.named_parameters() if "over" in n])
    table = "mapped._embedding_module.embedding_bags.t0"

    def checkpointer() -> Any:
        return Checkpointer(
            model,
            optimizer,
            run=run,
            staging=staging,
            interval_batches=2,
            options=Options(handle_sigterm=False),
        )

    with checkpointer() as checkpoints:
        part = _error_of(lambda: checkpoints.restore(partial={"tables": [table]}))
        checkpoints.close(final=False)
    with checkpointer() as checkpoints:
        checkpoints.restore()
        deleted = _error_of(lambda: checkpoints.delete_rows(table, torch.tensor([1])))
        checkpoints.close(final=False)
    weights = Path(run).parent / "weights.pt"
    tables = {
        f"{table.removesuffix('t0')}{name}": torch.zeros(rows, DIM)
        for name, (rows, _) in MAPPED.items()
    }
    dense = {f"head.{name}": tensor for name, tensor in Head().state_dict().items()}
    torch.save({f"{name}.weight": rows for name, rows in tables.items()} | dense, weights)
    new_run = f"{run}-seeded"
    with Checkpointer(
        model, optimizer, run=new_run, staging=staging, interval_batches=2
    ) as checkpoints:
        seed = Seed(str(weights), tables={table: f"{table}.weight"}, optimizer_states="drop")
        seeded = _error_of(lambda: checkpoints.restore(seed=seed))
        checkpoints.close(final=False)
    with open_foreign(str(weights)) as foreign:
        planned = planned_run(foreign, {}, list(tables))
        write_run(str(weights), f"{run}-imported", planned, weights.parent)
    with Checkpointer(
        model, optimizer, run=f"{run}-imported", staging=staging, interval_batches=2
    ) as checkpoints:
        imported = _error_of(checkpoints.restore)
        checkpoints.close(final=False)
    model = mapped_model("EBC", "LRU", sharded=True, kernel="dense")
    kernel = _error_of(checkpointer)
    refused = {"part": part, "deleted": deleted, "seeded": seeded}
    return refused | {"imported": imported, "kernel": kernel}


def mapped_parts(run: str, staging: str) -> dict[str, Any]:
    """Load parts of a run whose tables are not sharded, of policy DistanceLFU, and of a file.

    Returns:
        Errors, and the rows of ids of a model that was restored and of those that got parts.
    """
    from recpoint import Checkpointer, Seed

    def model_with(run: str, seed: Seed | None = None) -> nn.Module:
        model: nn.Module = mapped_model("EBC", "DistanceLFU", sharded=False)
        optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
        with Checkpointer(
            model, optimizer, run=run, staging=staging, interval_batches=2
        ) as checkpoints:
            try:
                checkpoints.restore(seed=seed)
            finally:
                checkpoints.close(final=False)
        return model

    tables = [f"mapped._embedding_module.embedding_bags.{name}" for name in MAPPED]
    modules = "mapped._managed_collision_collection._managed_collision_modules"
    restored = model_with(run)
    weights = str(Path(run).parent / "mapped.pt")
    torch.save(restored.state_dict(), weights)
    outcomes: dict[str, Any] = {"restored": _rows_of_every_id(restored)}
    cases: dict[str, dict[str, Any]] = {
        "rows alone": {"tables": tables, "dense": ["head.*"]},
        "ids alone": {"dense": [f"{modules}.t0.*"]},
        "ids of others": {"tables": {tables[0]: tables[0]}, "dense": _swapped(restored)},
    }
    both: dict[str, Any] = {"tables": tables, "dense": ["head.*", f"{modules}.*"]}
    for source, url in (("run", run), ("file", weights)):
        for case, parts in cases.items():
            start = partial(model_with, f"{run}-of-{source}", Seed(url, **parts))
            outcomes[f"{source}, {case}"] = _error_of(start)
        loaded = model_with(f"{run}-of-{source}", Seed(url, **both))
        outcomes[source] = _rows_of_every_id(loaded)
    return outcomes


def _swapped(model: nn.Module) -> dict[str, str]:
    """Return the dense tensors that map ids of t0 -> those of t1."""
    names = [name for name in model.state_dict() if "_modules.t0." in name]
    return {name: name.replace("_modules.t0.", "_modules.t1.") for name in names}


def collisions_refused(folder: str) -> dict[str, str]:
    """Return the errors for managed collisions that no checkpoint can be taken of."""
    from torchrec.modules.hash_mc_modules import HashZchManagedCollisionModule
    from torchrec.modules.mc_modules import LFU_EvictionPolicy

    from recpoint import Checkpointer, Lookahead
    from tests.training_builder import Batches

    other_policy: Any = type("OtherPolicy", (LFU_EvictionPolicy,), {})
    errors = {}

    def build(model: nn.Module, optimizers: Any = None, reader: Any = None) -> None:
        if optimizers is None:
            optimizers = torch.optim.SGD(model.parameters(), lr=0.1)
        run = str(Path(folder) / "run")
        Checkpointer(model, optimizers, run=run, reader=reader, interval_batches=2)

    reader = Lookahead(Batches(1), ids=lambda batch: {})
    model = mapped_model("EBC", "LFU", sharded=True)
    errors["look ahead"] = _error_of(lambda: build(model, [], reader))
    model = mapped_model("EBC", "LFU", sharded=False)
    modules: Any = model.mapped._managed_collision_collection._managed_collision_modules
    modules["t0"]._eviction_policy = other_policy()
    errors["policy"] = _error_of(lambda: build(model))
    modules["t0"] = HashZchManagedCollisionModule(
        zch_size=16, device=torch.device("cpu"), total_num_buckets=1
    )
    errors["hash"] = _error_of(lambda: build(model))
    model.train()
    errors["hash on a CPU"] = _error_of(lambda: model(mapped_batch(0, 0)))
    for name, readonly in (("hash operator", False), ("hash operator that reads", True)):
        errors[name] = _error_of(partial(_hash_ids, readonly=readonly))
    return errors


def _hash_ids(*, readonly: bool) -> None:
    """Map raw ids by the operator of TorchRec's hash modules, on a CPU."""
    operators: Any = torch.ops.fbgemm
    identities, _ = operators.create_zch_buffer(16, long_type=True)
    operators.zero_collision_hash(
        torch.arange(4), identities, max_probe=8, circular_probe=True, readonly=readonly
    )


def _increments(run: str) -> list[int]:
    """Return the number of dirty rows of each increment."""
    opened = Run.open(open_store(run))
    manifests = [opened.manifest(name.step, name.generation) for name in opened.manifest_names()]
    return [manifest.dirty_rows for manifest in manifests if manifest.kind == "increment"]


def _error_of(call: Callable[[], object]) -> str:
    try:
        call()
    except Exception as error:  # TorchRec raises errors of many classes
        return str(error)
    return "no error"
