"""Several trainers share the rows of keyed tables: results are those of whole tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.optim import SGD

from recpoint import LeastRecent, LeastUsed, Lookahead, Probability, Seen
from recpoint.embeddings.cache.install import read_rows
from recpoint.embeddings.tables.optimizers import row_states
from tests.keyed_training import OPTIMIZERS, KeyedModel, KeyedReader, ids_of
from tests.several_trainers import added, present
from tests.simulated_trainers import Trainer, on_threads
from tests.training_builder import seed_everything

CAPACITY = 46
SLOTS = {2: 24, 3: 22, 4: 22}  # of users on each rank, by ranks

RULES: dict[str, dict[str, Any]] = {
    "recent": {},
    "ttl": {"evict": LeastRecent(ttl_batches=2)},
    "used": {"evict": LeastUsed()},
    "seen": {"evict": LeastUsed(), "admit": Seen(times=2)},
    "share": {"admit": Probability(share=0.6)},
}


class Reader(KeyedReader):
    """A reader of so many batches."""

    def __init__(self, rank: int, length: int) -> None:
        super().__init__(seed=rank, spread=50)
        self.length = length

    def __next__(self) -> tuple[Tensor, Tensor]:
        if self.position == self.length:
            raise StopIteration
        return super().__next__()


def new_model(**form: Any) -> KeyedModel:
    seed_everything(1)
    return KeyedModel(CAPACITY, **form)


def optimizers_of(model: KeyedModel, optimizer: str, sparse: bool) -> list[Any]:
    tables = [model.users.weight, model.items.weight]
    return [OPTIMIZERS[optimizer](tables, sparse), SGD(model.top.parameters(), lr=0.1)]


def bits(tensors: Sequence[Tensor]) -> list[Any]:
    return [tensor.contiguous().view(-1).view(torch.uint8).tolist() for tensor in tensors]


def keys_of(model: KeyedModel) -> list[Any]:
    slots = model.users.slots
    state = slots.state_dict()
    admission = state["admission"].get("counts", torch.zeros(0))
    numbers = [*model.users.counts, state["steps"]]
    return [numbers, *bits([*slots.row_states.values(), admission])]


def alone(ranks: int, batches: int, optimizer: str, **form: Any) -> list[Any]:
    """Train with the batches of all ranks, and add the gradients in rank order."""
    model = new_model(**form)
    users, sparse = model.users, form["sparse"]
    optimizers = optimizers_of(model, optimizer, sparse)
    readers = [Reader(rank, batches) for rank in range(ranks)]
    parameters = list(model.parameters())
    for _ in range(batches):
        parts = [next(reader) for reader in readers]
        users.slots.take(torch.unique(torch.cat([keys for keys, _ in parts])))
        gradients: list[list[Tensor]] = []
        for keys, target in parts:
            rows = functional.embedding(
                users.slots.find(keys), users.weight, padding_idx=0, sparse=sparse
            )
            out = model.top(rows + model.items(keys % 9)).squeeze(1)
            functional.mse_loss(out, target).backward()
            gradients.append([present(parameter.grad) for parameter in parameters])
            for parameter in parameters:
                parameter.grad = None
        for parameter, of_ranks in zip(parameters, zip(*gradients, strict=True), strict=True):
            parameter.grad = added(of_ranks)
        for each in optimizers:
            each.step()
            each.zero_grad()
    states = row_states(optimizers[0].state.get(users.weight, {}), len(users.weight))
    rows_of_items = read_rows(model, "items", optimizers[0]).values()
    arrays = [users.weight.detach(), *states.values(), *rows_of_items, model.top.weight.detach()]
    return [keys_of(model), bits(arrays)]


def backward(trainer: Trainer, keys: Tensor, target: Tensor) -> None:
    functional.mse_loss(trainer.model(keys), target).backward()
    for parameter in trainer.model.top.parameters():
        parameter.grad = trainer.averaged(present(parameter.grad))


def shared(
    trainer: Trainer, batches: int, optimizer: str, *, sparse: bool, window: int
) -> list[Any]:
    """Train this rank's batches, and return what all ranks have then."""
    model = trainer.model
    optimizers = optimizers_of(model, optimizer, sparse)
    reader = Lookahead(Reader(trainer.rank, batches), model, ids=ids_of, window=window)
    for number, (keys, target) in enumerate(reader):
        backward(trainer, keys, target)
        if number % 3 == 0:
            with torch.no_grad():  # rows of other batches, as an evaluation has them
                model.users(keys[:2] + trainer.rank)
        for each in optimizers:
            each.step()
            each.zero_grad()
    every_slot = torch.arange(CAPACITY + 1)
    arrays = [
        *trainer.cache.rows_of("users", every_slot),
        *read_rows(model, "items", optimizers[0]).values(),
        model.top.weight.detach(),
    ]
    assert trainer.cache.stats.written_rows > 5
    return [keys_of(model), bits(arrays)]


def of_ranks(results: Sequence[Any]) -> Iterator[Any]:
    for result in results:
        if isinstance(result, BaseException):
            raise result
        yield result


@pytest.mark.parametrize(
    ("rule", "optimizer", "sparse", "ranks", "window"),
    [
        ("recent", "adagrad", True, 2, 3),
        ("ttl", "adam", True, 3, 1),
        ("used", "sgd", False, 2, 5),
        ("seen", "adagrad", False, 4, 2),
        ("share", "adagrad", True, 3, 8),
    ],
)
def test_ranks_have_the_rows_of_one_process(
    rule: str, optimizer: str, sparse: bool, ranks: int, window: int
) -> None:
    form = {"sparse": sparse, **RULES[rule]}
    expected = alone(ranks, 30, optimizer, **form)
    assert expected[0][0][2] > 9  # evicted
    results = on_threads(
        lambda trainer: shared(trainer, 30, optimizer, sparse=sparse, window=window),
        ranks=ranks,
        slots={"users": SLOTS[ranks], "items": 9},
        new_model=new_model,
        **form,
    )
    for result in of_ranks(results):
        assert result[0] == expected[0]
        assert result[1] == expected[1]
