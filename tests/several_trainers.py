"""Trains one model on several ranks that share its rows, and the same in one process without.

As a program, it is one rank: it reads the cases that it is given and writes what it has found.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adagrad, Optimizer, SparseAdam

import recpoint.embeddings
from recpoint import Checkpointer, Lookahead
from recpoint.embeddings.home.contract import Home
from recpoint.embeddings.home.initial import Uniform
from recpoint.embeddings.parity.stripes import Parity
from recpoint.embeddings.server.home import ServedHome
from recpoint.embeddings.server.processes import servers
from tests import cached_training
from tests.cached_training import (
    ITEMS,
    USERS,
    Batches,
    Model,
    Rows,
    cached_model,
    plain_model,
    rows_of_cache,
    rows_of_plain,
)
from tests.flat_settings import arguments
from tests.forked_program import ForkedProgram, be_module
from tests.polling import until

__all__ = [
    "Case",
    "Found",
    "NEW_USERS",
    "Part",
    "added",
    "alone",
    "change_rates",
    "checkpoints_of",
    "given_to",
    "join",
    "loss_of",
    "on_ranks",
    "optimizers_of",
    "present",
    "run_ranks",
    "train_on_ranks",
    "train_here",
]


#: First values of users that a checkpoint lacks.
NEW_USERS = Uniform(seed=3, low=-0.5, high=0.5)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One training.

    Attributes:
        run: URL of the run; "": without checkpoints.
        staging: the staging area of all ranks.
        batches: batches in all; 0: the newest checkpoint is restored, and nothing is trained.
        kills: batches after which rank 0 kills an embedding server; each kills another one, once
            the one before is recovered if there is parity.
        kills_at_once: how many servers are killed each time.
        parity: rows and parity rows of a stripe; (0, 0): no parity.
        dies: the batch after which the last rank kills itself; 0: it does not.
        fails: the batch in which the script of rank 0 raises an error; 0: it does not.
        servers: embedding servers; on a Ray cluster, on each of its nodes.
        ray: address of the Ray cluster that has the servers; "": they are processes of rank 0.
        pause_seconds: after each batch.
        wrapped: DistributedDataParallel wraps the model.
        more_users: how many more users there are than at first; checkpoints may lack them.
        at_servers: embedding servers stage their rows of checkpoints.
        wait_seconds: how long a rank waits for the agent; for another rank, five times as long.
    """

    kills: tuple[int, ...] = ()
    dies: int = 0
    fails: int = 0
    run: str = ""
    staging: str = ""
    interval: int = 5
    optimizer: str = "adagrad"
    sparse: bool = True
    mode: str = "sum"
    weighted: bool = False
    padding: int | None = None
    is_meta: bool = True
    slots: dict[str, int] = field(default_factory=lambda: {"users": 40, "items": 60})
    window: int = 5
    batches: int = 30
    epoch: int = 12
    batches_a_step: int = 1
    lr_factor: float = 1.0
    servers: int = 1
    ray: str = ""
    kills_at_once: int = 1
    parity: tuple[int, int] = (0, 0)
    wrapped: bool = False
    more_users: int = 0
    at_servers: bool = False
    wait_seconds: float = 120.0
    pause_seconds: float = 0.0


@dataclass
class Found:
    """What a training leaves; on ranks, also what rank 0's cache has done."""

    rows: Rows
    dense: Tensor
    losses: list[float]
    stats: dict[str, Any] = field(default_factory=dict)


class Part(Batches):
    """A rank's batches. All ranks are at the same position, so another number of them may go on."""

    def load_state_dicts(self, states: Sequence[dict[str, Any]], rank: int, ranks: int) -> None:
        self.load_state_dict(states[0])


def optimizers_of(case: Case, model: Model) -> list[Optimizer]:
    tables = [model.users.weight, model.items.weight]
    dense = SGD(model.top.parameters(), lr=0.1)
    if case.optimizer == "sgd":
        return [SGD(tables, lr=0.5), dense]
    if case.optimizer == "adagrad":
        return [Adagrad(tables, lr=0.1, lr_decay=0.01, initial_accumulator_value=0.2), dense]
    if case.optimizer == "row-wise adagrad":
        from torchrec.optim.rowwise_adagrad import RowWiseAdagrad  # not installed everywhere

        return [RowWiseAdagrad(tables, lr=0.1), dense]
    return [SparseAdam(tables, lr=0.01), dense]


def change_rates(case: Case, optimizers: Sequence[Optimizer]) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] *= case.lr_factor


def loss_of(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    return nn.functional.mse_loss(model(dict(batch)), batch["target"])


def alone(case: Case, ranks: int) -> Found:
    """Train with the batches of all ranks, and add the gradients in rank order."""
    model = plain_model(sparse=case.sparse, mode=case.mode, padding=case.padding)
    optimizers = optimizers_of(case, model)
    readers = [Batches(case.epoch, weighted=case.weighted, seed=rank) for rank in range(ranks)]
    parameters = list(model.parameters())
    losses: list[float] = []
    for batch in range(case.batches):
        if batch % case.batches_a_step == 0:
            gradients_of: list[list[Tensor | None]] = [
                [None] * len(parameters) for _ in range(ranks)
            ]
        for rank, reader in enumerate(readers):
            for parameter, gradient in zip(parameters, gradients_of[rank], strict=True):
                parameter.grad = gradient
            loss = loss_of(model, reader.batch(batch))
            loss.backward()
            if rank == 0:
                losses.append(loss.item())
            gradients_of[rank] = [parameter.grad for parameter in parameters]
        if (batch + 1) % case.batches_a_step:
            continue
        for index, parameter in enumerate(parameters):
            parameter.grad = added([present(gradients_of[rank][index]) for rank in range(ranks)])
        for optimizer in optimizers:
            optimizer.step()
        change_rates(case, optimizers)
    return Found(rows_of_plain(model, optimizers[0]), model.top.weight.detach(), losses)


def present(gradient: Tensor | None) -> Tensor:
    assert gradient is not None
    return gradient


def added(gradients: Sequence[Tensor]) -> Tensor:
    """Add gradients in order, each divided by their number."""
    if not gradients[0].is_sparse:
        total = torch.zeros_like(gradients[0])
        for gradient in gradients:
            total += gradient / len(gradients)
        return total
    summed = [gradient.coalesce() for gradient in gradients]
    ids = torch.unique(torch.cat([gradient.indices()[0] for gradient in summed]))
    values = torch.zeros(len(ids), *gradients[0].shape[1:])
    for gradient in summed:
        places = torch.searchsorted(ids, gradient.indices()[0])
        values.index_add_(0, places, gradient.values() / len(gradients))
    return torch.sparse_coo_tensor(
        ids[None], values, gradients[0].shape, is_coalesced=True, check_invariants=False
    )


def on_ranks(cases: Sequence[Case], ranks: int, directory: Path) -> list[Found]:
    """Train each case on so many ranks; return what rank 0 found."""
    codes, logs = train_on_ranks(cases, ranks, directory)
    assert codes == [0] * ranks, "\n".join(logs)
    results: list[Found] = torch.load(directory / "found.pt", weights_only=False)
    return results


def train_on_ranks(
    cases: Sequence[Case], ranks: int, directory: Path
) -> tuple[list[int], list[str]]:
    """Train each case on so many ranks; see `run_ranks`."""
    cases_json = json.dumps([asdict(case) for case in cases])
    return run_ranks("tests.several_trainers", ranks, directory, cases_json)


def run_ranks(
    program: str, ranks: int, directory: Path, content: str
) -> tuple[list[int], list[str]]:
    """Run a program on so many ranks: its arguments are the directory, rank and number of ranks.

    Args:
        program: name of a module.
        content: what each rank reads with `given_to`.

    Returns:
        Exit status and standard error of each rank.
    """
    directory.mkdir(parents=True)
    (directory / "given").write_text(content)
    logs = [directory / f"rank-{rank}.log" for rank in range(ranks)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    # Their imports, of the first optimizer's too, would take longer than most of these trainings.
    running = [
        ForkedProgram(
            be_module,
            (program, str(directory), str(rank), str(ranks)),
            environment=environment,
            output=(log, log),
        )
        for rank, log in enumerate(logs)
    ]
    try:
        codes = [process.wait() for process in running]
    finally:
        for process in running:
            process.kill()
    return codes, [log.read_text() for log in logs]


def given_to(directory: Path) -> str:
    """Return what `run_ranks` gives each rank in this directory."""
    return (directory / "given").read_text()


def _rank(directory: Path, rank: int, ranks: int) -> None:
    cases = [Case(**fields) for fields in json.loads(given_to(directory))]
    cached_training.USERS += max(case.more_users for case in cases)
    join(directory, rank, ranks)
    results = [train_here(case, rank, ranks) for case in cases]
    if rank == 0:
        torch.save(results, directory / "found.pt")
    dist.destroy_process_group()


def join(directory: Path, rank: int, ranks: int) -> None:
    """Join the process group of `run_ranks`."""
    dist.init_process_group(
        "gloo", init_method=f"file://{directory / 'group'}", rank=rank, world_size=ranks
    )


def train_here(case: Case, rank: int, ranks: int, home: Home | None = None) -> Found:
    """Train a case as one of several ranks, with servers of its own or a home, which is closed."""
    with _home_of(case) if home is None else home as home:
        assert isinstance(home, ServedHome)
        model, cache = cached_model(
            case.slots,
            home,
            is_meta=case.is_meta,
            sparse=case.sparse,
            mode=case.mode,
            padding=case.padding,
        )
        trained = DistributedDataParallel(model) if case.wrapped else model
        optimizers = optimizers_of(case, model)
        batches = Part(case.epoch, weighted=case.weighted, seed=rank)
        reader = Lookahead(batches, trained, window=case.window)
        losses: list[float] = []
        kills = list(case.kills)
        pids = [greeting.pid for greeting in home.greetings]
        with checkpoints_of(case, trained, optimizers, reader) as checkpoints:
            number = 0 if checkpoints is None else checkpoints.batches_done
            for batch in _batches(case, reader, checkpoints):
                number = number + 1 if checkpoints is None else checkpoints.batches_done + 1
                loss = loss_of(trained, batch)
                if number == case.fails and rank == 0:
                    raise RuntimeError("an error of the script")
                loss.backward()
                losses.append(loss.item())
                if number % case.batches_a_step == 0:
                    for parameter in () if case.wrapped else model.top.parameters():
                        parameter.grad = _reduced(present(parameter.grad), ranks)
                    for optimizer in optimizers:
                        optimizer.step()
                        optimizer.zero_grad()
                    change_rates(case, optimizers)
                if number in kills:
                    kills.remove(number)
                    if rank == 0:
                        if isinstance(home, ServedHome):
                            until(lambda: not home.being_recovered)
                        for _ in range(case.kills_at_once):
                            os.kill(pids.pop(), signal.SIGKILL)
                time.sleep(case.pause_seconds)
                if number == case.dies and rank == ranks - 1:
                    os.kill(os.getpid(), signal.SIGKILL)
        rows = rows_of_cache(cache)
        result = Found(rows, model.top.weight.detach(), losses, vars(cache.stats))
        cache.close()
        return result


def _home_of(case: Case) -> Home:
    data, parity = case.parity
    form = Parity(data=data, parity=parity) if data else None
    if not case.ray:
        return servers(count=case.servers, parity=form)
    return recpoint.embeddings.ray(
        case.ray, per_node=case.servers, run=case.run or None, parity=form
    )


def _batches(case: Case, reader: Any, checkpoints: Checkpointer | None) -> Iterator[Any]:
    if checkpoints is not None and case.batches:
        yield from checkpoints.batches(total=case.batches)
        return
    batches_done = 0
    while batches_done < case.batches:
        for batch in reader:
            yield batch
            batches_done += 1
            if batches_done == case.batches:
                break


@contextmanager
def checkpoints_of(
    case: Case, model: nn.Module, optimizers: Sequence[Optimizer], reader: Any
) -> Iterator[Checkpointer | None]:
    """Restore the newest checkpoint of the case's run, and take one at the end; None: no run."""
    if not case.run:
        yield None
        return
    settings: dict[str, Any] = {
        "run": case.run,
        "directory": Path(case.staging),
        "at_servers": case.at_servers,
        "grow": {"users": NEW_USERS} if case.more_users else {},
        "reader": reader,
        "interval_batches": case.interval,
        "small_table_values": 0,
        "close_seconds": case.wait_seconds,
        "drain_seconds": case.wait_seconds,
        "ranks_seconds": 5 * case.wait_seconds,
        "handle_sigterm": False,
        "announce": False,
        "rewinds": len(case.kills) if case.kills_at_once > case.parity[1] else 0,
    }
    checkpoints = Checkpointer(model, optimizers, **arguments(settings))
    try:
        checkpoints.restore()
        yield checkpoints
    except BaseException:
        checkpoints.close(final=False)
        raise
    checkpoints.close(final=case.batches > 0)


def _reduced(gradient: Tensor, ranks: int) -> Tensor:
    gathered = [torch.empty_like(gradient) for _ in range(ranks)]
    dist.all_gather(gathered, gradient)
    return added(gathered)


assert (USERS, ITEMS) == (203, 101)  # capacities above fit these

if __name__ == "__main__":
    # By the module's name, by which what it writes can be read again.
    from tests.several_trainers import _rank as rank_of_module

    rank_of_module(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
