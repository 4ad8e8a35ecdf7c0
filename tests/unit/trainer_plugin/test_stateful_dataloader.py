"""torchdata's StatefulDataLoader as the reader, whatever its workers and wherever the cut."""

from __future__ import annotations

from collections.abc import Generator
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from recpoint import Checkpointer
from tests.training_builder import (
    ROWS,
    Place,
    Recommender,
    Training,
    checkpointer,
    everything,
    seed_everything,
    until,
)

BATCH, BATCHES_AN_EPOCH = 8, 5
#: In the middle of an epoch, at its end, and in the second one.
CUTS, END = (3, 5, 8), 12


class Sample(NamedTuple):
    """What was looked at, by whom, and how it went."""

    number: Tensor
    user: Tensor
    items: Tensor
    target: Tensor


class Samples(Dataset[Sample]):
    """Samples that follow from their numbers."""

    def __len__(self) -> int:
        return BATCH * BATCHES_AN_EPOCH

    def __getitem__(self, number: int) -> Sample:
        generator = torch.Generator().manual_seed(number)
        return Sample(
            torch.tensor(number),
            torch.randint(ROWS, (), generator=generator),
            torch.randint(ROWS // 2, (3,), generator=generator),
            torch.rand((), generator=generator),
        )


class Life:
    """A training in epochs, and the numbers of the samples of each batch that it trained."""

    def __init__(self, seed: int, workers: dict[str, Any]) -> None:
        seed_everything(seed)
        model = Recommender(sparse=True)
        tables = [model.users.weight, model.items.weight]
        dense = [*model.norm.parameters(), *model.top.parameters()]
        optimizers = [torch.optim.Adagrad(tables, lr=0.1), torch.optim.Adam(dense, lr=0.01)]
        self.loader = StatefulDataLoader(Samples(), BATCH, shuffle=True, **workers)
        self.training: Training = Training(model, optimizers, self.loader)
        self.seen: list[list[int]] = []
        self._batches = self._epochs()

    def end(self) -> None:
        """End the workers. Collected as garbage the loader waits for each of them for five seconds:
        what would tell them to end is gone then, as part of the same garbage."""
        self._batches.close()
        self.loader._iterator = None

    def _epochs(self) -> Generator[Sample, None, None]:
        while True:
            yield from self.loader

    def batch(self) -> None:
        number, user, items, target = next(self._batches)
        self.seen.append(number.tolist())
        for optimizer in self.training.optimizers:
            optimizer.zero_grad()
        nn.functional.mse_loss(self.training.model(user, items), target).backward()
        for optimizer in self.training.optimizers:
            optimizer.step()


def _committed(ckpt: Checkpointer, count: int) -> bool:
    return ckpt.stats.committed == count


# Of torchdata itself, which tells torch that it is there.
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize(
    "workers",
    [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}],
    ids=["no workers", "workers", "persistent workers"],
)
def test_resumed_is_bit_identical(workers: dict[str, Any], place: Place) -> None:
    uninterrupted = Life(1, workers)
    for _ in range(END):
        uninterrupted.batch()
    assert sorted(sum(uninterrupted.seen[:BATCHES_AN_EPOCH], [])) == list(range(len(Samples())))
    expected = everything(uninterrupted.training)
    uninterrupted.end()
    first = Life(1, workers)
    with place.agent(), checkpointer(first.training, place, interval_batches=1000) as ckpt:
        ckpt.restore()
        for committed, cut in enumerate(CUTS):
            until(partial(_committed, ckpt, committed))
            while ckpt.batches_done < cut:
                first.batch()
                ckpt.step()
            assert ckpt.checkpoint()
        until(partial(_committed, ckpt, len(CUTS)))
        first.batch()
        ckpt.step()
        ckpt.close(final=False)  # the last batch is lost, as by a kill
    first.end()
    for cut in CUTS:
        second = Life(9, workers)
        with checkpointer(second.training, place, interval_batches=1000) as again:
            report = again.restore(cut, generation=1)
            assert report is not None and again.batches_done == cut
            for _ in range(cut, END):
                second.batch()
                again.step()
            again.close(final=False)
        assert second.seen == uninterrupted.seen[cut:]
        assert everything(second.training) == expected
        second.end()
