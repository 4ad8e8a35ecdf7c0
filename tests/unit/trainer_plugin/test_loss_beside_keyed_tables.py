"""A loss is measured beside keyed tables that are stored exactly; itself they refuse by name."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from recpoint import Loss
from recpoint.embeddings import local
from recpoint.errors import SettingsError
from tests.keyed_training import KeyedTraining, keyed_checkpointer, state_of
from tests.training_builder import Place
from tests.unit.trainer_plugin.test_loss_bound import count_seconds

BATCHES = 20


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return functional.mse_loss(model(batch[0]), batch[1])


LOSS = Loss(increase=1e-9, of=loss_of, share=0.5)


def built(cached_rows: dict[str, int] | None) -> KeyedTraining:
    if cached_rows is None:
        return KeyedTraining(14)
    return KeyedTraining(14, home=local(), cached_rows=cached_rows, window=2)


@pytest.mark.parametrize("cached_rows", (None, {"users": 14}))
def test_a_keyed_table_is_refused_by_name(place: Place, cached_rows: dict[str, int] | None) -> None:
    with pytest.raises(SettingsError, match=r"'users'.*keys, which give rows to ids"):
        keyed_checkpointer(built(cached_rows), place, bits=LOSS)


@pytest.mark.parametrize("cached_rows", (None, {"users": 14}, {"users": 14, "items": 9}))
def test_training_goes_on_as_without_measuring(
    place: Place, cached_rows: dict[str, int] | None
) -> None:
    states: list[list[object]] = []
    for bits in ("lossless", LOSS):
        training = built(cached_rows)
        own_place = Place(f"{place.run}-{len(states)}", place.staging)
        tables = {"users": "lossless"}
        with keyed_checkpointer(training, own_place, bits=bits, tables=tables) as ckpt:
            if ckpt._parts.loss is not None:
                count_seconds(ckpt)
            ckpt.restore()
            for batch in ckpt.batches(total=BATCHES):
                loss_of(training.model, batch).backward()
                training.step()
            figures = ckpt.stats.loss
            states.append([state_of(training), torch.get_rng_state().tolist()])
            ckpt.close(final=False)
    assert figures is not None and figures.error is None and figures.batches >= BATCHES // 4
    assert states[0] == states[1]
