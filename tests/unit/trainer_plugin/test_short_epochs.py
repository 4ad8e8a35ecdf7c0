"""Readers that skip batches after a restore: an epoch that comes out short is noticed."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from recpoint import Checkpointer, Options, ResumableLoader, Timeouts
from recpoint.trainer_plugin.state.reader import Stateful
from tests.training_builder import Place

BATCHES = 6


class Stream(IterableDataset[Tensor]):
    """A dataset with a position.

    Args:
        forgets: whether an epoch after the resumed one begins at the beginning.
    """

    def __init__(self, *, forgets: bool) -> None:
        self._forgets = forgets
        self._first = self._next = 0

    def __iter__(self) -> Iterator[Tensor]:
        first = self._first
        if self._forgets:
            self._first = 0
        for self._next in range(first + 1, BATCHES + 1):
            yield torch.tensor(self._next - 1)

    def state_dict(self) -> dict[str, int]:
        return {"next": self._next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._first = self._next = state["next"]


def trained(
    place: Place, reader: Stateful, *, epochs: int | None = None, total: int | None = None
) -> list[int]:
    """Train up to the bound; return the samples."""
    model = nn.ModuleDict({"table": nn.Embedding(BATCHES, 2)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    numbers: list[int] = []
    with (
        place.agent(),
        Checkpointer(
            model,
            optimizer,
            run=place.run,
            staging=place.staging,
            reader=reader,
            interval_batches=1000,
            timeouts=Timeouts(close_seconds=60.0),
            options=Options(handle_sigterm=False, announce=False),
        ) as checkpoints,
    ):
        checkpoints.restore()
        for batch in checkpoints.batches(epochs=epochs, total=total):
            optimizer.zero_grad()
            model["table"](batch).sum().backward()
            optimizer.step()
            numbers += batch.tolist()
    return numbers


def _warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize(
    "workers",
    [{}, {"num_workers": 1, "persistent_workers": True}],
    ids=["no workers", "persistent workers"],
)
def test_a_dataset_that_begins_each_epoch_where_it_was_resumed(
    place: Place, caplog: pytest.LogCaptureFixture, workers: dict[str, Any]
) -> None:
    def reader(*, forgets: bool) -> StatefulDataLoader[Tensor]:
        return StatefulDataLoader(Stream(forgets=forgets), batch_size=1, **workers)

    first = trained(place, reader(forgets=True), total=BATCHES - 1)
    assert first == list(range(BATCHES - 1))
    assert not [text for text in _warnings(caplog) if "ended after" in text]
    skipping = trained(place, reader(forgets=False), epochs=3)
    assert skipping == [BATCHES - 1] * 3
    (short,) = [text for text in _warnings(caplog) if "ended after" in text]
    assert short.startswith("epoch 2 ended after 1 batches, and 6 were expected")


class Ending:
    """A reader with a length that ends each epoch at once after its state was loaded."""

    def __init__(self) -> None:
        self._is_loaded = False
        self._next = 0

    def __len__(self) -> int:
        return BATCHES

    def __iter__(self) -> Iterator[Tensor]:
        is_loaded, self._is_loaded = self._is_loaded, False
        for self._next in range(1, BATCHES + 1 if not is_loaded else 1):
            yield torch.tensor([self._next - 1])

    def state_dict(self) -> dict[str, int]:
        return {"next": self._next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._is_loaded = True


def test_a_resumed_epoch_that_is_shorter_than_its_reader_says(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    assert len(trained(place, Ending(), total=4)) == 4
    assert trained(place, Ending(), epochs=2) == list(range(BATCHES))
    (text,) = [text for text in _warnings(caplog) if "ended after" in text]
    assert text.startswith("epoch 1 ended after 4 batches, and 6 were expected")


def test_whole_epochs_and_epochs_of_many_lengths(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    data = torch.arange(BATCHES)

    def reader() -> ResumableLoader:
        return ResumableLoader(DataLoader(data, batch_size=1, shuffle=True))  # type: ignore[arg-type]

    assert len(trained(place, reader(), total=BATCHES + 2)) == BATCHES + 2
    assert len(trained(place, reader(), epochs=4)) == 3 * BATCHES - 2
    assert not [text for text in _warnings(caplog) if "ended after" in text]
