"""A loss is measured on rows that are in a cache: as in memory, and training is the same."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from recpoint import Checkpointer, Loss
from recpoint.embeddings.cache.lookup_hooks import cache_of
from recpoint.errors import SettingsError
from tests.cached_training import Batch
from tests.training_builder import Place
from tests.unit.trainer_plugin.test_cached_checkpoints import SMALL, Both, checkpointing
from tests.unit.trainer_plugin.test_loss_bound import count_seconds, meter

BATCHES = 16
#: So much that no price is decided about while these few batches are trained.
INCREASE = 1e-9


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    return functional.mse_loss(model(batch), batch["target"])


def by_loss(**settings: Any) -> Loss:
    return Loss(**{"increase": INCREASE, "of": loss_of, "share": 0.5, **settings})


def trained(both: Both, ckpt: Checkpointer, total: int = BATCHES) -> None:
    if ckpt._parts.loss is not None:
        count_seconds(ckpt)
    (optimizer,) = both.optimizers
    for batch in ckpt.batches(total=total):
        optimizer.zero_grad()
        loss_of(both.model, batch).backward()
        optimizer.step()


def places(place: Place, *names: str) -> list[Place]:
    return [Place(f"{place.run}-{name}", place.staging) for name in names]


def test_rows_in_slots_are_measured_as_in_memory(place: Place) -> None:
    states = []
    for slots, own_place in zip((None, SMALL), places(place, "memory", "cache"), strict=True):
        both = Both("adagrad", slots)
        with checkpointing(both, own_place, bits=by_loss(), interval_batches=1000) as ckpt:
            trained(both, ckpt)
            figures = ckpt.stats.loss
            assert figures is not None and figures.error is None
            assert figures.trial_price is None and figures.batches >= BATCHES // 4
            states.append(meter(ckpt).state_dict()["search"])
            assert sum(figures.widths.values()) == pytest.approx(1)
            ckpt.close(final=False)
    assert states[0] == states[1]


def test_training_and_the_cache_go_on_as_without_measuring(place: Place) -> None:
    ends, generators = [], []
    for bits, own_place in zip(
        ("lossless", by_loss()), places(place, "lossless", "loss"), strict=True
    ):
        both = Both("adagrad", SMALL)
        with checkpointing(both, own_place, bits=bits, interval_batches=1000) as ckpt:
            trained(both, ckpt)
            cache = ckpt.stats.cache
            assert cache is not None and cache.misses == 0
            ends.append((both, cache.hits, cache.unplanned))
            generators.append(torch.get_rng_state())
            ckpt.close(final=False)
    ends[0][0].same_as(ends[1][0])
    assert ends[0][1:] == ends[1][1:]
    assert torch.equal(*generators)


def test_rows_of_a_cache_get_widths_by_the_price_and_are_restored(place: Place) -> None:
    both = Both("adagrad", SMALL)
    with checkpointing(both, place, bits=by_loss(), interval_batches=10) as ckpt:
        trained(both, ckpt)
        own_meter = meter(ckpt)
        own_meter._search.price = 2.0**-20
        assert all(own_meter.allocation(live) is not None for live in own_meter._live())
        trained(both, ckpt, BATCHES + 10)
        assert ckpt.stats.failed == 0
    restored = Both("adagrad", None)
    with checkpointing(restored, place, bits=by_loss()) as ckpt:
        assert ckpt.batches_done == BATCHES + 10
        for name in ("users", "items"):
            exact, stored = both.rows.arrays[name][0], restored.rows.arrays[name][0]
            spread = exact.amax(1) - exact.amin(1)
            assert bool(((exact - stored).abs().amax(1) <= 0.4 * spread + 1e-6).all())
            assert not torch.equal(exact, stored)
        ckpt.close(final=False)


def test_a_batch_whose_rows_are_in_no_slot_is_not_measured(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[None] = []

    def of(model: nn.Module, batch: Batch) -> Tensor:
        calls.append(None)
        return loss_of(model, {**batch, "users": batch["users"].flip(0) * 0 + 190})

    both = Both("adagrad", SMALL)
    with checkpointing(both, place, bits=by_loss(of=of), interval_batches=1000) as ckpt:
        with caplog.at_level(logging.WARNING, logger="recpoint"):
            trained(both, ckpt)
        figures, cache = ckpt.stats.loss, ckpt.stats.cache
        assert figures is not None and figures.error is None and figures.batches == 0
        assert cache is not None and cache.misses == 0 and len(calls) > 1
        warnings = [r.getMessage() for r in caplog.records if "in no slot" in r.getMessage()]
        assert len(warnings) == 1 and "stats.cache.unplanned" in warnings[0]
        ckpt.close(final=False)
    assert cache_of(both.model) is not None


def test_an_optimizer_without_squared_gradients_is_refused_by_name(place: Place) -> None:
    with pytest.raises(SettingsError, match="SGD"):
        Both("sgd", SMALL).checkpointer(place, bits=by_loss())
