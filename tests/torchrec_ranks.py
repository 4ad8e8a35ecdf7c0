"""Real ranks of a TorchRec job on this CPU, for tests: a model, its plans, batches of its own.

    python -m tests.torchrec_ranks FOLDER PLAYS

Imports TorchRec once, which takes seconds, and forks the ranks of one play after the other. A play
is `{"play": function of this module, "ranks": N, ...}`; FOLDER/<number>.<r> is what rank r returns.
"""

from __future__ import annotations

import contextlib
import json
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from recpoint.catalog.persisting import persist
from recpoint.catalog.runs.run import Run
from recpoint.catalog.staging import staged
from recpoint.catalog.staging.agent_lock import AgentLock
from recpoint.catalog.stores.store import open_store
from recpoint.errors import RanksMissing
from recpoint.trainer_plugin.policy import PolicyName

__all__ = ["MISSING", "play"]

MISSING = (
    None
    if find_spec("torchrec") and find_spec("fbgemm_gpu")
    else "torchrec and fbgemm-gpu-cpu are not installed (README, TorchRec)"
)

BAGS = {"t0": (23, ("f0", "g0")), "t1": (40, ("f1",)), "t2": (3, ("f2",))}
ROWS = {"s0": (31, ("h0",)), "s1": (29, ("h1",))}
DIM = 8
_COLLECTIONS = ("bags.", "rows.")
BATCH = 4


def play(plays: Sequence[Mapping[str, Any]], folder: Path, **environment: str) -> list[list[Any]]:
    """Have these plays performed, one after the other; what each rank of each returned."""
    command = [sys.executable, "-m", "tests.torchrec_ranks", str(folder), json.dumps(list(plays))]
    own = {"OMP_NUM_THREADS": "1", **environment}
    # A session of its own, so that nothing is left of it when it takes too long.
    launcher = subprocess.Popen(
        command,
        env=os.environ | own,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = launcher.communicate(timeout=900)
    except BaseException:
        os.killpg(launcher.pid, signal.SIGKILL)
        raise
    assert launcher.returncode == 0, said
    return [
        [
            torch.load(folder / f"{number}.{rank}", weights_only=False)
            if (folder / f"{number}.{rank}").exists()
            else None
            for rank in range(one["ranks"])
        ]
        for number, one in enumerate(plays)
    ]


class Ranker(nn.Module):
    """Bags and rows, and a dense layer over both."""

    def __init__(self, *, sequences: bool = True, dense: bool = True, device: str = "meta") -> None:
        super().__init__()
        from torchrec import (
            EmbeddingBagCollection,
            EmbeddingBagConfig,
            EmbeddingCollection,
            EmbeddingConfig,
        )

        self.bags = EmbeddingBagCollection(
            device=torch.device(device),
            tables=[
                EmbeddingBagConfig(
                    name=name, embedding_dim=DIM, num_embeddings=rows, feature_names=list(features)
                )
                for name, (rows, features) in BAGS.items()
            ],
        )
        self.rows = (
            EmbeddingCollection(
                device=torch.device(device),
                tables=[
                    EmbeddingConfig(
                        name=name,
                        embedding_dim=DIM,
                        num_embeddings=rows,
                        feature_names=list(features),
                    )
                    for name, (rows, features) in ROWS.items()
                ],
            )
            if sequences
            else None
        )
        self.over = nn.Linear(DIM, 1) if dense else None

    def forward(self, bags: Any, rows: Any) -> Tensor:
        """Loss of one batch."""
        found = self.bags(bags).to_dict()
        total = torch.stack([found[name].square() for name in sorted(found)]).sum(0).mean(0)
        if self.rows is not None:
            looked_up = self.rows(rows)
            for name in sorted(looked_up.keys()):
                total = total + looked_up[name].values().square().sum(0) / BATCH
        result = total.sum() if self.over is None else self.over(total).sum()
        return result


def batch(step: int, rank: int, *, empty: bool = False) -> tuple[Any, Any]:
    """The same for each step and rank, whatever happened before."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return _jagged(BAGS, generator, empty), _jagged(ROWS, generator, empty)


def _jagged(tables: Mapping[str, tuple[int, Any]], generator: torch.Generator, empty: bool) -> Any:
    from torchrec import KeyedJaggedTensor

    keys, lengths, values = [], [], []
    for rows, features in tables.values():
        for feature in features:
            some = torch.randint(0, 3, (BATCH,), generator=generator) * (not empty)
            keys.append(feature)
            lengths.append(some)
            values.append(torch.randint(0, rows, (int(some.sum()),), generator=generator))
    return KeyedJaggedTensor.from_lengths_sync(keys, torch.cat(values), torch.cat(lengths).int())


def sharded(
    kinds: Mapping[str, str],
    *,
    optimizer: str = "RowWiseAdagrad",
    dense: bool = True,
    sequences: bool | None = None,
) -> Any:
    """A `DistributedModelParallel`, each table sharded as `kinds` says; seeded, so that all ranks
    and all plans begin with what their places hold."""
    import torchrec
    from torchrec.distributed import sharding_plan as plans
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.types import ShardingPlan
    from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

    world = dist.get_world_size()
    if sequences is None:  # of replicated tables FBGEMM looks up none on a CPU
        sequences = "data_parallel" not in {kinds[name] for name in ROWS}
    model = Ranker(sequences=sequences, dense=dense)
    ways: dict[str, Callable[[int], Any]] = {
        "table_wise": lambda number: plans.table_wise(rank=number % world),
        "row_wise": lambda _: plans.row_wise(),
        "column_wise": lambda number: plans.column_wise(
            ranks=[number % world, (number + 1) % world]
        ),
        "table_row_wise": lambda _: plans.table_row_wise(host_index=0),
        "data_parallel": lambda _: plans.data_parallel(),
        "dense": lambda _: plans.table_wise(rank=world - 1, compute_kernel="dense"),
    }
    sharders = plans.get_module_to_default_sharders()
    chosen = {}
    for path, module, names in (("bags", model.bags, BAGS), ("rows", model.rows, ROWS)):
        if module is None:
            continue
        each = {}
        for number, name in enumerate(names):
            kind = kinds[name]
            each[name] = ways[kind](number)
            if kind not in ("data_parallel", "dense"):
                own = [p for n, p in module.named_parameters() if n.endswith(f"{name}.weight")]
                apply_optimizer_in_backward(getattr(torchrec.optim, optimizer), own, {"lr": 0.1})
        chosen[path] = plans.construct_module_sharding_plan(
            module,
            each,
            local_size=world,
            world_size=world,
            device_type="cpu",
            sharder=sharders[type(module)],
        )
    torch.manual_seed(7)
    found = DistributedModelParallel(
        model, device=torch.device("cpu"), plan=ShardingPlan(plan=chosen)
    )
    for table in shards(found):
        # Values that follow from the place in the whole table, whoever holds it.
        rows = torch.arange(table.first_row, table.first_row + table.rows).unsqueeze(1)
        first = 0 if table.columns is None else table.columns.first
        columns = torch.arange(first, first + table.dim).unsqueeze(0)
        with torch.no_grad():
            table.weight.copy_(torch.sin(1.0 + rows + 0.37 * columns + len(table.name)))
    return found


def shards(model: nn.Module) -> Sequence[Any]:
    """The tables of a sharded model as recpoint finds them."""
    from recpoint.trainer_plugin.integrations.torchrec import find

    source = find(model)
    assert source is not None
    return source.tables


def found(kinds: Mapping[str, str], optimizer: str = "RowWiseAdagrad") -> Any:
    """What there is on this rank, and that it is the live memory."""
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
    """Rows that recpoint marks, that TorchRec's tracker has, and that have changed."""
    from torchrec.distributed.model_tracker.types import DeltaTrackerConfig

    from recpoint.kernels import dirty_bitmap
    from recpoint.trainer_plugin.integrations.torchrec import find
    from recpoint.trainer_plugin.tracking import Tracker

    rank = dist.get_rank()
    model = sharded(kinds, optimizer=optimizer, dense=dense)
    theirs = model.init_torchrec_delta_tracker(DeltaTrackerConfig())
    source = find(model)
    assert source is not None
    trackers = {table.key: Tracker(table) for table in source.tables}
    source.track(trackers)
    dense_parameters = [] if model.module.over is None else list(model.module.over.parameters())
    sgd = torch.optim.SGD(dense_parameters, lr=0.1) if dense_parameters else None
    results: list[Any] = []

    def look(train: bool, *, empty: bool = False) -> None:
        before = {table.key: table.weight.detach().clone() for table in source.tables}
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
                theirs.step()
        try:
            ids = {name: one.tolist() for name, one in theirs.get_unique_ids().items()}
        except Exception as error:
            ids = {"error": f"{type(error).__name__}: {error}"}
            theirs.clear()
        ours = {}
        for table in source.tables:
            tracker = trackers[table.key]
            assert not tracker.all_rows and not tracker.unapplied
            taken = tracker.take()
            changed = (table.weight != before[table.key]).any(1).nonzero().flatten().tolist()
            marked = dirty_bitmap.collect(taken.bitmap, rows=taken.rows).tolist()
            ours[table.key] = (table.name, marked, changed)
            tracker.release(taken)
        results.append((ours, ids))

    look(True)
    look(False)
    look(True, empty=True)
    look(True)
    source.untrack()
    return results


def tracker_of_theirs() -> dict[str, Any]:
    """Where TorchRec's tracker does not do what recpoint needs."""
    from torchrec.distributed.model_tracker.types import DeltaTrackerConfig

    kinds = dict.fromkeys((*BAGS, *ROWS), "table_wise")
    model = sharded(kinds)
    theirs = model.init_torchrec_delta_tracker(DeltaTrackerConfig())
    model(*batch(0, 0)).backward()
    theirs.step()
    theirs.get_unique_ids()
    without = sharded(kinds, dense=False)
    return {
        "read_twice": _error(theirs.get_unique_ids),
        "no_dense": _error(lambda: without.init_torchrec_delta_tracker(DeltaTrackerConfig())),
        "no_dense_ours": sorted(table.name for table in shards(without)),
    }


def refused() -> dict[str, str]:
    """What is said of what is not supported."""
    import torchrec
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec.optim.clipping import GradientClippingOptimizer
    from torchrec.optim.keyed import KeyedOptimizerWrapper

    from recpoint.trainer_plugin.integrations.torchrec import find

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
    known, torchrec.__version__ = torchrec.__version__, "1.7.0+cpu"
    version = _error(lambda: find(model))
    torchrec.__version__ = known
    # On a CPU FBGEMM makes none that is not supported.
    model.module.bags._lookups[0]._emb_modules[0].emb_module.optimizer = EmbOptimType.LARS_SGD
    return {
        "version": version,
        "rates": "; ".join(rates),
        "clipped": "; ".join(one for one in source.differences(clipped) if t0 in one),
        "optimizer": _error(lambda: source.optimizers([GradientClippingOptimizer(dense)])),
        "fused": _error(lambda: find(model)),
        "adam": _error(lambda: sharded(kinds, optimizer="Adam")),
        "partial": _error(lambda: sharded(kinds, optimizer="PartialRowWiseAdam")),
    }


def _error(call: Callable[[], object]) -> str:
    try:
        call()
    except Exception as error:  # of TorchRec's too, which are of many classes
        return str(error)
    return "no error"


def optimizers(model: nn.Module, kind: str, *, apart: bool = False) -> list[Any]:
    """Those of torch: of dense layers, and of tables that no fused one trains.

    Args:
        model: sharded or plain.
        kind: what fused optimizers do for other tables.
        apart: whether tables have one of their own, and not a group of their own.
    """
    from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

    from recpoint.trainer_plugin.integrations.torchrec import find

    source = find(model)
    names = [table.name for table in source.tables if not table.fused] if source else all_tables()
    named = {name.replace("module.", ""): one for name, one in model.named_parameters()}
    dense = {"params": [one for name, one in named.items() if "over" in name], "lr": 0.05}
    tables = [named[f"{name}.weight"] for name in names]
    kinds = {
        "Adagrad": torch.optim.Adagrad,
        "SGD": torch.optim.SGD,
        "RowWiseAdagrad": RowWiseAdagrad,
    }
    # As TorchRec has it for FBGEMM's.
    own = {"params": tables, "lr": 0.1} | ({} if kind == "SGD" else {"eps": 1e-8})
    if not tables:
        return [torch.optim.Adagrad([dense])]
    if kind == "Adagrad" and not apart:
        return [torch.optim.Adagrad([dense, own])]
    return [kinds[kind]([own]), torch.optim.Adagrad([dense])]


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
) -> Any:
    """Train up to batch `steps` with a checkpoint every two, from the newest one on.

    Args:
        kinds: how each table is sharded; None: by nobody, in one process.
        apart: see `optimizers`.
    """
    from recpoint import Checkpointer

    rank = dist.get_rank()
    model = Ranker(device="cpu") if kinds is None else sharded(kinds, optimizer=optimizer)
    of_torch = optimizers(model, optimizer, apart=apart)
    with Checkpointer(
        model,
        of_torch,
        run=run,
        staging=staging,
        interval_batches=2,
        policy=policy,
        when_busy="wait",
        on_error="raise",
        handle_sigterm=False,
    ) as checkpoints:
        report = checkpoints.restore()
        begun = everything(model, *of_torch)
        while checkpoints.batches_done < steps:
            for one in of_torch:
                one.zero_grad()
            model(*batch(checkpoints.batches_done, rank)).backward()
            for one in of_torch:
                one.step()
            checkpoints.step()
            if checkpoints.batches_done == die_at:
                checkpoints.close(final=False)
                os.kill(os.getpid(), signal.SIGKILL)
    return everything(model, *of_torch) | {
        "lacks": [] if kinds is None else _lacks(model),
        "begun": begun,
        "restored": report and report.restored.step,
        "increments": _increments(run) if rank == 0 else [],
    }


def replicated_sequences(run: str, staging: str, steps: int) -> Any:
    """Replicated tables of sequences, with gradients made here: FBGEMM looks none up on a CPU."""
    from recpoint import Checkpointer

    model = sharded(dict.fromkeys((*BAGS, *ROWS), "data_parallel"), sequences=True)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
    with Checkpointer(
        model,
        optimizer,
        run=run,
        staging=staging,
        interval_batches=2,
        when_busy="wait",
        on_error="raise",
        handle_sigterm=False,
    ) as checkpoints:
        report = checkpoints.restore()
        begun = everything(model, optimizer)
        while checkpoints.batches_done < steps:
            generator = torch.Generator().manual_seed(checkpoints.batches_done)
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
                row = checkpoints.batches_done % len(parameter)
                parameter.grad[row] = torch.randn(parameter[row].shape, generator=generator)
            optimizer.step()
            checkpoints.step()
    return everything(model, optimizer) | {
        "begun": begun,
        "restored": report and report.restored.step,
        "increments": _increments(run) if dist.get_rank() == 0 else [],
        "lookup": _error(lambda: model.module.rows(batch(0, 0)[1])["h0"]),
    }


def _increments(run: str) -> list[int]:
    """Dirty rows of each increment."""
    opened = Run.open(open_store(run))
    found = [opened.manifest(name.step, name.generation) for name in opened.manifest_names()]
    return [one.dirty_rows for one in found if one.kind == "increment"]


def plain(run: str, staging: str, into: str) -> Any:
    """The model without TorchRec's sharding takes the tables and dense layers of `run` to a run of
    its own, `into`, from where a sharded model has them again."""
    from recpoint import Seed

    model = Ranker(device="cpu")
    with _taking_over(model, list(model.parameters()), into, staging) as checkpoints:
        seed = Seed(run, tables={name: name for name in all_tables()}, dense=["over.*"])
        checkpoints.restore(seed=seed)
        checkpoints.checkpoint()
    back = sharded(dict.fromkeys((*BAGS, *ROWS), "column_wise"), optimizer="Adagrad")
    own = [p for n, p in back.named_parameters() if not n.startswith(_COLLECTIONS)]
    with _taking_over(back, own, into, staging) as checkpoints:
        checkpoints.restore(partial={"tables": all_tables(), "dense": ["over.*"]})
    weights = {name: model.get_parameter(f"{name}.weight").detach() for name in all_tables()}
    assert model.over is not None
    return {
        "tables": {(name, 0, 0): {"weight": weight} for name, weight in weights.items()},
        "dense": {f"over.{n}": p.detach() for n, p in model.over.named_parameters()},
        "back": everything(back, torch.optim.SGD(own, lr=0.1)),
    }


def _taking_over(model: nn.Module, trained: Sequence[Tensor], run: str, staging: str) -> Any:
    from recpoint import Checkpointer

    return Checkpointer(
        model,
        torch.optim.SGD(trained, lr=0.1),
        run=run,
        staging=staging,
        interval_batches=1,
        on_error="raise",
        handle_sigterm=False,
    )


def all_tables() -> list[str]:
    """Full names of all tables of the plain model."""
    return [f"bags.embedding_bags.{name}" for name in BAGS] + [
        f"rows.embeddings.{name}" for name in ROWS
    ]


def everything(model: nn.Module, *optimizers: torch.optim.Optimizer) -> dict[str, Any]:
    """All that training goes on from, as tensors; of each table alike, whatever trains it."""
    from recpoint.trainer_plugin.integrations.torchrec import find

    source = find(model)
    named = {n.replace("module.", ""): p for n, p in model.named_parameters()}
    found: dict[str, Any] = {
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
        found["tables"][place] = {"weight": table.weight.detach().clone(), **states}
        if table.fused:
            state = found["fused"][table.name]
            eps = () if state["optimizer"] == "exact_sgd" else (state["eps"],)
            found["rates"][table.name] = (state["group_lr"], *eps)
    trained = {
        id(p): (one, group)
        for one in optimizers
        for group in one.param_groups
        for p in group["params"]
    }
    for name, parameter in named.items():
        if id(parameter) not in trained:
            continue
        one, group = trained[id(parameter)]
        state = one.state.get(parameter, {})
        if "over" in name:
            found["optimizer"] |= {f"{name}.{key}": value.clone() for key, value in state.items()}
            continue
        own = name.removesuffix(".weight")
        sums = {"sum": state["sum"].squeeze(1).clone()} if "sum" in state else {}
        found["tables"][own, 0, 0] = {"weight": parameter.detach().clone(), **sums}
        eps = (group["eps"],) if sums else ()
        found["rates"][own] = (group["lr"], *eps)
        found["steps"] |= {own: int(state["step"])} if sums else {}
    return found


def _lacks(model: nn.Module) -> list[bool]:
    """Whether it needs states of further ranks beside none, and beside those of its own tables."""
    from recpoint.trainer_plugin.integrations.torchrec import find

    source = find(model)
    assert source is not None
    return [source.lacks_states([]), source.lacks_states([source.state_dict()])]


def _agent(staging: str) -> None:
    """What the agent of a host does, for all ranks that stage there; until it is killed."""
    with AgentLock(Path(staging)):
        while True:
            for run in staged.run_directories(Path(staging)):
                for job in staged.staged_jobs(run):
                    with contextlib.suppress(RanksMissing, FileNotFoundError):
                        persist.persist_job(job)
            time.sleep(0.01)


def _perform(number: int, rank: int, one: dict[str, Any], folder: Path) -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    meeting = f"file://{folder / f'meeting.{number}'}"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=one.pop("ranks"))
    result = globals()[one.pop("play")](**one)
    torch.save(result, folder / f"{number}.{rank}")
    dist.destroy_process_group()


def _main(folder: Path, plays: list[dict[str, Any]]) -> int:
    warnings.simplefilter("ignore")
    # Before the forks, so that no rank has to import them anew, which takes each of them longer
    # than its play. No thread is started by any of it.
    import torch.distributed.optim  # noqa: F401
    import torchrec.distributed.model_parallel
    import torchrec.distributed.sharding_plan  # noqa: F401

    import recpoint.trainer_plugin.checkpointer
    import recpoint.trainer_plugin.integrations.torchrec_source  # noqa: F401
    from recpoint import kernels

    kernels.warm_up()

    context = multiprocessing.get_context("fork")
    failed = 0
    for number, one in enumerate(plays):
        processes = [
            context.Process(target=_perform, args=(number, rank, dict(one), folder))
            for rank in range(one["ranks"])
        ]
        agent = context.Process(target=_agent, args=(one.get("staging"),), daemon=True)
        if "staging" in one:
            agent.start()
        for process in processes:
            process.start()
        wanted = -signal.SIGKILL if one.get("die_at") else 0
        while alive := [process.sentinel for process in processes if process.exitcode is None]:
            wait(alive)
            if any(process.exitcode not in (None, wanted) for process in processes):
                for process in processes:
                    process.kill()  # they would wait for the one that failed
        for process in processes:
            process.join()
        if "staging" in one:
            agent.kill()
            agent.join()
        failed += sum(process.exitcode != wanted for process in processes)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(_main(Path(sys.argv[1]), json.loads(sys.argv[2])))
