"""Several Lookaheads read for one cache, as a training and its evaluation in mid-epoch do."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.optim import Adagrad

from recpoint import Lookahead
from recpoint.embeddings.cache.progress import CacheStats
from recpoint.errors import SettingsError
from tests.cached_training import (
    Batches,
    Model,
    Rows,
    cached_model,
    lookahead,
    plain_model,
    rows_of_cache,
    rows_of_plain,
    train,
)
from tests.combinations import combinations
from tests.several_trainers import added, loss_of, present
from tests.simulated_trainers import Trainer, on_threads

BATCHES = 9
EVERY = 4  # batches after which is evaluated
EVALUATED = 3  # batches
HELD_OUT = 100  # seeds of the batches that are evaluated


class Found(NamedTuple):
    rows: Rows
    scores: list[float]
    stats: CacheStats


def made_once(trainer: Trainer) -> Callable[[], Lookahead]:
    reader = trainer.reader(length=EVALUATED, seed=HELD_OUT)
    return lambda: reader


def made_each_time(trainer: Trainer) -> Callable[[], Lookahead]:
    return lambda: trainer.reader(length=EVALUATED, seed=HELD_OUT)


def left_by_break(trainer: Trainer) -> Callable[[], Lookahead]:
    reader = trainer.reader(length=EVALUATED * 5, seed=HELD_OUT, window=8)
    return lambda: reader


@pytest.mark.parametrize(
    ("evaluation", "sparse"),
    combinations(
        list(itertools.product([made_once, made_each_time, left_by_break], [1, 2, 3])),
        [True, False],
    ),
)
def test_an_evaluation_in_mid_epoch_changes_nothing(
    evaluation: tuple[Callable[[Trainer], Callable[[], Lookahead]], int], sparse: bool
) -> None:
    readers, ranks = evaluation
    found = on_threads(lambda trainer: _trained(trainer, readers), ranks=ranks, sparse=sparse)
    expected, scores = _whole(ranks, sparse, goes_on=readers is not made_each_time)
    for rank, one in enumerate(found):
        assert isinstance(one, Found), one
        assert one.rows.differences(expected) == []
        assert one.scores == scores[rank]
        assert one.stats.misses == 0


def test_an_evaluation_may_come_between_a_backward_pass_and_its_step() -> None:
    found = on_threads(_trained_with_evaluations_before_steps, sparse=True)
    expected, scores = _whole(2, sparse=True, goes_on=True, before_steps=True)
    for rank, one in enumerate(found):
        assert isinstance(one, Found), one
        assert one.rows.differences(expected) == []
        assert one.scores == scores[rank]


def test_a_cache_of_one_trainer_fetches_the_rows_of_each_reader_before() -> None:
    model, cache = cached_model({"users": 60, "items": 80}, sparse=True)
    optimizer = Adagrad(model.parameters(), lr=0.1)
    evaluation = lookahead(Batches(EVALUATED, seed=HELD_OUT), model, window=4)

    def evaluate(done: int) -> None:
        if done % EVERY == 0:
            with torch.no_grad():
                for batch in evaluation:
                    model(batch)

    train(model, optimizer, lookahead(Batches(12), model, window=5), batches=16, after=evaluate)
    assert cache.stats.misses == 0
    assert cache.stats.hits > 0
    cache.close()


def test_a_row_that_only_a_later_batch_needs_is_refused() -> None:
    def act(trainer: Trainer) -> None:
        def ids(batch: dict[str, Tensor]) -> dict[str, Tensor]:
            return {"users": batch["users"][:1], "items": batch["items"]}

        reader = iter(trainer.reader(ids=ids))
        batches = [next(reader) for _ in range(2)]
        later = Batches(seed=trainer.rank).batch(2)
        with pytest.raises(SettingsError) as refused:
            trainer.model({**batches[1], "users": later["users"][:1].repeat(8)})
        assert trainer.cache.planned > trainer.cache.batch
        assert "a lookup of rows that are not in the ids of the batch" in str(refused.value)
        trainer.model({**batches[1], "users": batches[1]["users"][:1].repeat(8)})

    assert on_threads(act, sparse=True) == [None, None]


def _trained(trainer: Trainer, readers: Callable[[Trainer], Callable[[], Lookahead]]) -> Found:
    optimizer = Adagrad(trainer.model.parameters(), lr=0.1)
    reader_of = readers(trainer)
    scores: list[float] = []

    def evaluate(done: int) -> None:
        if done % EVERY == 0:
            scores.extend(_scores(trainer.model, reader_of()))

    trainer.train(trainer.reader(), [optimizer], BATCHES, after=evaluate)
    return Found(rows_of_cache(trainer.cache), scores, trainer.cache.stats)


def _trained_with_evaluations_before_steps(trainer: Trainer) -> Found:
    optimizer = Adagrad(trainer.model.parameters(), lr=0.1)
    evaluation = trainer.reader(length=EVALUATED, seed=HELD_OUT)
    scores: list[float] = []
    reader = iter(trainer.reader())
    for done in range(1, BATCHES + 1):
        trainer.backward(next(reader))
        if done % EVERY == 0:
            scores.extend(_scores(trainer.model, evaluation))
        optimizer.step()
        optimizer.zero_grad()
    return Found(rows_of_cache(trainer.cache), scores, trainer.cache.stats)


def _scores(model: Model, reader: Lookahead) -> list[float]:
    scores = []
    with torch.no_grad():
        for number, batch in enumerate(reader, 1):
            scores.append(loss_of(model, batch).item())
            if number == EVALUATED:
                break
    return scores


def _whole(
    ranks: int, sparse: bool, *, goes_on: bool, before_steps: bool = False
) -> tuple[Rows, list[list[float]]]:
    """Train whole tables with the gradients of all ranks; return the scores of each rank, too.

    Args:
        ranks: number of ranks.
        sparse: the tables have sparse gradients.
        goes_on: an evaluation has the batches after those of the evaluation before.
        before_steps: evaluations come between a backward pass and its step.
    """
    model = plain_model(sparse=sparse)
    optimizer = Adagrad(model.parameters(), lr=0.1)
    scores: list[list[float]] = [[] for _ in range(ranks)]
    for number in range(BATCHES):
        parts: list[list[Tensor]] = []
        for rank in range(ranks):
            model.zero_grad()
            loss_of(model, Batches(seed=rank).batch(number)).backward()
            parts.append([present(one.grad) for one in model.parameters()])
        for parameter, *gradients in zip(model.parameters(), *parts, strict=True):
            parameter.grad = added(gradients)
        if not before_steps:
            optimizer.step()
        if (number + 1) % EVERY == 0:
            with torch.no_grad():
                for rank in range(ranks):
                    held_out = Batches(seed=HELD_OUT + rank)
                    first = len(scores[rank]) if goes_on else 0
                    scores[rank] += [
                        loss_of(model, held_out.batch(at)).item()
                        for at in range(first, first + EVALUATED)
                    ]
        if before_steps:
            optimizer.step()
    return rows_of_plain(model, optimizer), scores
