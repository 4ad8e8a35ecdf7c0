"""Gradients are clipped by one norm on all ranks: that of the averages."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from recpoint.embeddings import clip_grad_norm_
from recpoint.errors import RanksDiffer, SettingsError
from tests.cached_training import (
    Batches,
    Model,
    Rows,
    as_bits,
    cached_model,
    plain_model,
    rows_of_cache,
    rows_of_plain,
)
from tests.several_trainers import added, loss_of, present
from tests.simulated_trainers import Trainer, on_threads

BATCHES = 5
LARGE = 1e9


class Found(NamedTuple):
    rows: Rows
    dense: Tensor
    norms: list[float]


@pytest.mark.parametrize("norm_type", [2.0, 1.0, math.inf])
@pytest.mark.parametrize("ranks", [2, 3])
def test_all_ranks_clip_by_the_norm_of_the_averages(norm_type: float, ranks: int) -> None:
    found = on_threads(lambda trainer: _trained(trainer, 0.01, norm_type), ranks=ranks)
    expected = _whole(ranks, 0.01, norm_type)
    assert all(norm > 0.01 for norm in expected.norms), "each step is clipped"
    for one in found:
        assert isinstance(one, Found), one
        assert one.norms == pytest.approx(expected.norms, rel=1e-5)
        for name, (values, *_) in one.rows.arrays.items():
            torch.testing.assert_close(values, expected.rows.arrays[name][0], rtol=1e-5, atol=1e-8)
        assert isinstance(found[0], Found)
        assert torch.equal(as_bits(one.dense), as_bits(found[0].dense)), "replicas are exact"


@pytest.mark.parametrize("sparse", [True, False])
def test_gradients_that_are_not_clipped_keep_their_bits(sparse: bool) -> None:
    found = on_threads(lambda trainer: _trained(trainer, LARGE), sparse=sparse)
    expected = _whole(2, LARGE if not sparse else None, sparse=sparse)
    for one in found:
        assert isinstance(one, Found), one
        assert one.rows.differences(expected.rows) == []
        assert torch.equal(as_bits(one.dense), as_bits(expected.dense))


def test_sparse_gradients_have_the_norm_of_dense_ones() -> None:
    (sparse, _), (dense, _) = (
        on_threads(lambda trainer: _trained(trainer, 0.01), sparse=one) for one in (True, False)
    )
    assert isinstance(sparse, Found) and isinstance(dense, Found)
    assert sparse.norms == pytest.approx(dense.norms, rel=1e-5)


def test_an_overflow_of_one_rank_is_in_the_norm_of_all() -> None:
    """So a script may leave the step out where the norm is not finite."""

    def act(trainer: Trainer) -> tuple[Rows, list[bool]]:
        optimizer = SGD(trainer.model.parameters(), lr=0.1)
        steps = []
        for number, batch in enumerate(trainer.reader(length=BATCHES)):
            is_overflow = trainer.rank == 1 and number == 2
            trainer.backward(batch, scale=math.inf if is_overflow else 1.0)
            norm = clip_grad_norm_(trainer.model.parameters(), LARGE)
            steps.append(bool(norm.isfinite()))
            if steps[-1]:
                optimizer.step()
            optimizer.zero_grad(set_to_none=number != 2)  # in place, too
        return rows_of_cache(trainer.cache), steps

    for one in on_threads(act):
        assert isinstance(one, tuple), one
        rows, steps = one
        assert steps == [True, True, False, True, True]
        assert rows.differences(_whole(2, LARGE, left_out=2).rows) == []


def test_gradients_add_up_over_batches_before_they_are_clipped() -> None:
    def act(trainer: Trainer) -> list[float]:
        reader = iter(trainer.reader())
        for _ in range(2):
            trainer.backward(next(reader))
        return [float(clip_grad_norm_(trainer.model.parameters(), 0.01)) for _ in range(2)]

    for one in on_threads(act):
        assert isinstance(one, list), one
        assert one[0] > 0.01
        assert one[1] == pytest.approx(0.01, rel=1e-3), "it was clipped"


def test_what_ranks_do_apart_is_refused() -> None:
    def backward_after_it(trainer: Trainer) -> None:
        reader = iter(trainer.reader())
        trainer.backward(next(reader))
        clip_grad_norm_(trainer.model.parameters(), 1.0)
        trainer.backward(next(reader))

    def gradients_that_are_not_averaged(trainer: Trainer) -> None:
        loss_of(trainer.model, next(iter(trainer.reader()))).backward()
        clip_grad_norm_(trainer.model.parameters(), 1.0)

    def on_one_rank(trainer: Trainer) -> None:
        optimizer = SGD(trainer.model.parameters(), lr=0.1)
        trainer.backward(next(iter(trainer.reader())))
        if trainer.rank:
            clip_grad_norm_(trainer.model.parameters(), 1.0)
        optimizer.step()

    for act, kind, message in (
        (backward_after_it, SettingsError, "a backward pass after clip_grad_norm_"),
        (gradients_that_are_not_averaged, RanksDiffer, "gradients of dense layers with the norms"),
        (on_one_rank, RanksDiffer, "rank 1 clips gradients after batch 1"),
    ):
        for one in on_threads(act):
            assert isinstance(one, kind), one
            assert message in str(one)
    with pytest.raises(SettingsError, match="a number above 0"):
        raise on_threads(lambda trainer: clip_of_order_zero(trainer))[0]  # type: ignore[misc]


def test_torchs_function_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    def act(trainer: Trainer) -> None:
        optimizer = SGD(trainer.model.parameters(), lr=0.1)
        for batch in trainer.reader(length=3):
            trainer.backward(batch)
            nn.utils.clip_grad_norm_(trainer.model.parameters(), 0.01)
            optimizer.step()
            optimizer.zero_grad()

    assert on_threads(act) == [None, None]
    found = [one.message for one in caplog.records if "clip_grad_norm_()" in one.message]
    assert len(found) == 2, "once on each rank"
    assert "other values on ranks [1] than on rank 0" in found[0]


def clip_of_order_zero(trainer: Trainer) -> None:
    trainer.backward(next(iter(trainer.reader())))
    clip_grad_norm_(trainer.model.parameters(), 1.0, 0.0)


def test_one_trainer_has_torchs_function() -> None:
    model, cache = cached_model({"users": 20, "items": 60})
    loss_of(model, Batches().batch(0)).backward()
    expected = nn.utils.get_total_norm([present(one.grad) for one in model.parameters()])
    assert torch.equal(clip_grad_norm_(model.parameters(), 0.01), expected)
    with pytest.raises(RuntimeError, match="non-finite"):
        present(model.top.weight.grad).fill_(math.inf)
        clip_grad_norm_(model.parameters(), 0.01, error_if_nonfinite=True)
    cache.close()


def _trained(trainer: Trainer, max_norm: float, norm_type: float = 2.0) -> Found:
    model = trainer.model
    optimizer = SGD(model.parameters(), lr=0.5)
    norms: list[float] = []
    for batch in trainer.reader(length=BATCHES):
        trainer.backward(batch)
        norms.append(float(clip_grad_norm_(model.parameters(), max_norm, norm_type)))
        optimizer.step()
        optimizer.zero_grad()
    return Found(rows_of_cache(trainer.cache), model.top.weight.detach(), norms)


def _whole(
    ranks: int,
    max_norm: float | None,
    norm_type: float = 2.0,
    *,
    sparse: bool = False,
    left_out: int | None = None,
) -> Found:
    """Train whole tables with averaged gradients; torch clips them, unless they are sparse."""
    model = plain_model(sparse=sparse)
    optimizer = SGD(model.parameters(), lr=0.5 if left_out is None else 0.1)
    norms: list[float] = []
    for number in range(BATCHES):
        _average(model, ranks, number)
        if max_norm is not None:
            norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type)
            norms.append(float(norm))
        if number != left_out:
            optimizer.step()
    return Found(rows_of_plain(model, optimizer), model.top.weight.detach(), norms)


def _average(model: Model, ranks: int, number: int) -> None:
    parts: list[list[Tensor]] = []
    for rank in range(ranks):
        model.zero_grad()
        loss_of(model, Batches(seed=rank).batch(number)).backward()
        parts.append([present(one.grad) for one in model.parameters()])
    for parameter, *gradients in zip(model.parameters(), *parts, strict=True):
        parameter.grad = added(gradients)
