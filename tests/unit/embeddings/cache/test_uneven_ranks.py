"""Ranks that share rows and do different things end with an error that says what each did."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp import GradScaler
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.optim import SGD, Adagrad

from recpoint import Lookahead
from recpoint.embeddings.cache.lookup_hooks import cache_of
from recpoint.embeddings.cache.turns import refuse_other_counts
from recpoint.embeddings.home import channel
from recpoint.embeddings.home.channel import GlooChannel
from recpoint.embeddings.server.processes import servers
from recpoint.errors import RankLost, RanksDiffer
from tests.cached_training import (
    Batches,
    Model,
    Rows,
    cached_model,
    plain_model,
    rows_of_cache,
    rows_of_plain,
)
from tests.polling import until
from tests.several_trainers import (
    Case,
    Part,
    added,
    checkpoints_of,
    join,
    loss_of,
    present,
    run_ranks,
)
from tests.simulated_trainers import Trainer, on_threads

UNEVEN_RANK = 1


def left_out_after_its_loss(trainer: Trainer, window: int = 5) -> None:
    """`if not isfinite(loss): continue` in the batches of one rank."""
    optimizer = SGD(trainer.model.parameters(), lr=0.1)
    for number, batch in enumerate(trainer.reader(window=window), 1):
        loss = loss_of(trainer.model, batch)
        if trainer.rank == UNEVEN_RANK and number == 3:
            loss = loss * math.inf
        if not torch.isfinite(loss):
            continue
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def left_out_before_an_end(trainer: Trainer) -> None:
    optimizer = SGD(trainer.model.parameters(), lr=0.1)
    for number, batch in enumerate(trainer.reader(length=4), 1):
        loss_of(trainer.model, batch).backward()
        if trainer.rank != UNEVEN_RANK or number != 4:
            optimizer.step()
        optimizer.zero_grad()


def left_out_by_a_scaler(trainer: Trainer, *, fused: bool = False) -> None:
    model = trainer.model
    optimizer = SGD([model.users.weight, model.items.weight], lr=0.1, fused=fused)
    scaler = GradScaler("cpu", init_scale=2.0)
    for number, batch in enumerate(trainer.reader(), 1):
        loss = loss_of(trainer.model, batch)
        if trainer.rank == UNEVEN_RANK and number == 3:
            loss = loss * math.inf
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def rows_read_on_one_rank(trainer: Trainer) -> None:
    optimizer = SGD(trainer.model.parameters(), lr=0.1)
    for number, batch in enumerate(trainer.reader(), 1):
        loss_of(trainer.model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        if trainer.rank == UNEVEN_RANK and number == 3:
            rows_of_cache(trainer.cache)


def an_evaluation_in_place_of_a_batch(trainer: Trainer) -> None:
    reader, evaluation = trainer.reader(), trainer.reader(seed=7)
    next(iter(reader))
    next(iter(evaluation if trainer.rank == UNEVEN_RANK else reader))


def windows_that_differ(trainer: Trainer) -> None:
    reader = trainer.reader(window=4 + trainer.rank)
    with pytest.raises(RanksDiffer) as refused:
        next(iter(reader))
    raise refused.value


def steps_in_another_order(trainer: Trainer) -> None:
    model = trainer.model
    optimizers = [SGD([model.users.weight], lr=0.1), SGD([model.items.weight], lr=0.1)]
    for batch in trainer.reader():
        loss_of(model, batch).backward()
        for optimizer in optimizers if trainer.rank != UNEVEN_RANK else reversed(optimizers):
            optimizer.step()


LEFT_OUT = "makes an optimizer's step after batch"

CASES: dict[str, tuple[Callable[[Trainer], None], list[str]]] = {
    "a loss that is not finite": (
        left_out_after_its_loss,
        [f"rank 0, 2 {LEFT_OUT} 3; rank 1 asks for batch 4", "ShardedGradScaler"],
    ),
    "a loss that is not finite, no batch is planned": (
        lambda trainer: left_out_after_its_loss(trainer, window=1),
        [f"rank 0, 2 {LEFT_OUT} 3; rank 1", "ShardedGradScaler"],
    ),
    "the last step of an epoch": (
        left_out_before_an_end,
        [f"rank 0, 2 {LEFT_OUT} 4; rank 1 asks for batch 5"],
    ),
    "GradScaler": (left_out_by_a_scaler, [f"rank 0, 2 {LEFT_OUT} 3; rank 1 asks for batch 4"]),
    "GradScaler, fused": (
        lambda trainer: left_out_by_a_scaler(trainer, fused=True),
        ["rank 0 has scale 2 and no overflow; rank 1 has scale 2 and an overflow"],
    ),
    "rows are read": (
        rows_read_on_one_rank,
        ["rank 0, 2 asks for batch 4", "rank 1 copies or reads rows after batch 3"],
    ),
    "an evaluation in place of a batch": (
        an_evaluation_in_place_of_a_batch,
        ["ranks that read with different Lookaheads"],
    ),
    "windows": (windows_that_differ, ["Lookahead.window: found [4, 5, 6] on ranks 0 to 2"]),
    "other optimizers": (
        steps_in_another_order,
        ["rank 0 of ['users']; rank 1 of ['items']", "in one order"],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_ranks_that_differ_say_what_each_does(name: str) -> None:
    act, expected = CASES[name]
    slots = {"users": 203, "items": 303}
    for one in on_threads(act, ranks=3, slots=slots, sparse=name != "GradScaler, fused"):
        assert isinstance(one, RanksDiffer), one
        for part in expected:
            assert part in str(one)


@pytest.mark.parametrize("sparse", [True, False])
def test_a_step_that_all_ranks_leave_out_changes_no_row(sparse: bool) -> None:
    def act(trainer: Trainer) -> Rows:
        optimizer = Adagrad(trainer.model.parameters(), lr=0.1)
        for number, batch in enumerate(trainer.reader(length=8)):
            trainer.backward(batch)
            if number % 3:
                optimizer.step()
            optimizer.zero_grad()
        return rows_of_cache(trainer.cache)

    model = plain_model(sparse=sparse)
    optimizer = Adagrad(model.parameters(), lr=0.1)
    for number in range(8):
        parts: list[list[Tensor]] = []
        for rank in range(2):
            model.zero_grad()
            loss_of(model, Batches(seed=rank).batch(number)).backward()
            parts.append([present(one.grad) for one in model.parameters()])
        for parameter, *gradients in zip(model.parameters(), *parts, strict=True):
            parameter.grad = added(gradients)
        if number % 3:
            optimizer.step()
    for one in on_threads(act, sparse=sparse):
        assert isinstance(one, Rows), one
        assert one.differences(rows_of_plain(model, optimizer)) == []


def test_a_hook_on_one_rank_has_all_ranks_make_whole_steps() -> None:
    def act(trainer: Trainer) -> tuple[int, int, int]:
        optimizer = SGD(trainer.model.parameters(), lr=0.1)
        calls: list[Any] = []
        if trainer.rank == UNEVEN_RANK:
            optimizer.register_step_post_hook(lambda *_: calls.append(None))
        trainer.train(trainer.reader(), [optimizer], 5)
        stats = trainer.cache.stats
        return len(calls), stats.reduced_at_once, stats.reduced_rows

    for rank, one in enumerate(on_threads(act, sparse=True)):
        assert isinstance(one, tuple), one
        calls, at_once, rows = one
        assert calls == (5 if rank == UNEVEN_RANK else 0)
        assert at_once == rows > 0


def test_other_numbers_of_rows_are_refused_before_they_are_sent() -> None:
    with pytest.raises(RanksDiffer, match=r"found \[3\] rows from ranks \[1\]; expected \[5\]"):
        refuse_other_counts(
            "values", torch.tensor([[0, 4], [1, 2]]), torch.tensor([[0, 4], [3, 2]])
        )


def test_over_gloo(tmp_path: Path) -> None:
    codes, logs = run_ranks(__name__, 2, tmp_path / "ranks", "")
    assert codes == [0, 0], "\n".join(logs)


# What each rank does.


def _rank(directory: Path, rank: int, ranks: int) -> None:
    join(directory, rank, ranks)
    _short_message(rank)
    _long_wait(directory, rank)
    with servers(count=1) as home:
        model, cache = cached_model({"users": 203, "items": 303}, home)
        optimizer = SGD([model.users.weight, model.items.weight], lr=0.5, fused=True)
        with pytest.raises(RanksDiffer) as differing:
            _train(directory, rank, model, optimizer)
        for part in (
            "rank 0 makes an optimizer's step after batch 5",
            "rank 1 takes a checkpoint or ends after batch 5",
        ):
            assert part in str(differing.value), str(differing.value)
        cache.close()
    dist.destroy_process_group()


def _train(directory: Path, rank: int, model: Model, optimizer: SGD) -> None:
    """Train with an overflow that ranks share; a rank leaves out the step before the end."""
    place, cache = directory.parent, cache_of(model)
    case = Case(
        run=str(place / "run"),
        staging=str(place / "staging"),
        interval=10 * BATCHES,
        wait_seconds=1.0,
    )
    reader = Lookahead(Part(12, seed=rank), model, window=4)
    scaler = ShardedGradScaler("cpu", init_scale=4.0)
    with checkpoints_of(case, model, [optimizer], reader) as checkpoints:
        assert checkpoints is not None and cache is not None
        for number, batch in enumerate(checkpoints.batches(total=BATCHES + 3), 1):
            loss = loss_of(model, batch)
            if rank == UNEVEN_RANK and number == OVERFLOWING:
                loss = loss * math.inf
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            if rank != UNEVEN_RANK or number != BATCHES + 1:
                scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            if number == BATCHES:
                assert rows_of_cache(cache).differences(_without_the_overflow()) == []
            if number == BATCHES + 1:
                break


BATCHES = 4
OVERFLOWING = 3


def _short_message(rank: int) -> None:
    rows = GlooChannel("rows")
    parts = [torch.full((size,), 7, dtype=torch.uint8) for size in (3, 3)]
    if rank == 0:
        assert [len(one) for one in rows.swap(parts, [3, 3])] == [3, 3]
    else:
        with pytest.raises(RankLost, match=r"messages of ranks \[0\] are shorter"):
            rows.swap(parts, [5, 3])
    rows.close()


def _long_wait(directory: Path, rank: int) -> None:
    """Rank 0 waits for rank 1, which goes on once rank 0 has said so."""
    told, found = directory.parent / "told", GlooChannel("rows")
    nothing = torch.empty(0, dtype=torch.uint8)
    if rank == 0:
        handler = logging.FileHandler(told, delay=True)
        logging.getLogger("recpoint").addHandler(handler)
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(channel, "_TOLD_SECONDS", 0.05)
            found.swap([nothing] * 2, [0, 0])
        logging.getLogger("recpoint").removeHandler(handler)
        assert "rank 0 of 2 has waited 0.05 s for rows from the other ranks" in told.read_text()
    else:
        until(told.exists)
        found.swap([nothing] * 2, [0, 0])
    found.close()


def _without_the_overflow() -> Rows:
    model = plain_model()
    optimizer = SGD([model.users.weight, model.items.weight], lr=0.5, fused=True)
    for number in range(1, BATCHES + 1):
        parts: list[list[Tensor]] = []
        for rank in range(2):
            model.zero_grad()
            loss_of(model, Batches(seed=rank).batch(number - 1)).backward()
            parts.append([present(model.users.weight.grad), present(model.items.weight.grad)])
        model.users.weight.grad, model.items.weight.grad = map(added, zip(*parts, strict=True))
        if number != OVERFLOWING:
            optimizer.step()
    return rows_of_plain(model, optimizer)


if __name__ == "__main__":
    _rank(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
