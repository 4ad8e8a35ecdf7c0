"""Buffers and row states that few models have: what is committed of them is restored."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recpoint import Checkpointer, Options, Timeouts
from recpoint.errors import IncompatibleModel
from tests.training_builder import Place


def sparse(indices: list[list[int]], shape: tuple[int, ...], value: float = 1.0) -> Tensor:
    where = torch.tensor(indices, dtype=torch.int64)
    values = torch.full((where.shape[1], *shape[where.shape[0] :]), value)
    return torch.sparse_coo_tensor(where, values, shape, check_invariants=True)


class Model(nn.Module):
    def __init__(self, buffer: Tensor) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 4)
        self.register_buffer("seen", buffer)


def life(place: Place, buffer: Tensor, batches: int, **restoring: Any) -> tuple[bool, Tensor]:
    """Restore, train and store; whether anything was restored, and the buffer after that."""
    model = Model(buffer)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        place.agent(),
        Checkpointer(
            model,
            [optimizer],
            run=place.run,
            staging=place.staging,
            interval_batches=2,
            timeouts=Timeouts(close_seconds=120.0),
            options=Options(handle_sigterm=False),
        ) as ckpt,
    ):
        report = ckpt.restore(**restoring)
        found = model.get_buffer("seen").clone()
        for batch in range(batches):
            optimizer.zero_grad()
            model.table(torch.tensor([batch])).sum().backward()
            optimizer.step()
            ckpt.step()
    return report is not None, found


@pytest.mark.parametrize(
    ("trained", "built"),
    [
        (lambda: sparse([[0, 3], [1, 0]], (4, 3)), lambda: sparse([[], []], (4, 3))),
        (lambda: sparse([[0, 3]], (4, 3)).coalesce(), lambda: sparse([[1, 2, 2]], (4, 3), 5.0)),
        (
            lambda: sparse([[5, 5], [7, 7]], (2_000_000_000, 1_000_000_000)),
            lambda: sparse([[], []], (2_000_000_000, 1_000_000_000)),
        ),
    ],
    ids=["sparse", "hybrid", "huge"],
)
def test_sparse_ones(
    place: Place, trained: Callable[[], Tensor], built: Callable[[], Tensor]
) -> None:
    assert not life(place, trained(), 2)[0]
    restored, found = life(place, built(), 0)
    want = trained()
    assert restored and found.shape == want.shape
    assert found.is_coalesced() == want.is_coalesced()
    assert found._indices().equal(want._indices()) and found._values().equal(want._values())


def test_booleans_whatever_their_bytes(place: Place) -> None:
    life(place, torch.tensor([0, 1, 2], dtype=torch.uint8).view(torch.bool), 2)
    restored, found = life(place, torch.zeros(3, dtype=torch.bool), 0)
    assert restored and found.tolist() == [False, True, True]


class Touched(torch.optim.SGD):
    """Remembers which rows it has changed, in bytes that nobody made 0 and 1."""

    def step(self, closure: Any = None) -> Any:
        (weight,) = self.param_groups[0]["params"]
        state = self.state[weight]
        if "touched" not in state:
            state["touched"] = torch.zeros(len(weight), dtype=torch.uint8).view(torch.bool)
        state["touched"].view(torch.uint8)[weight.grad.abs().sum(1) > 0] += 2
        return super().step(closure)


def test_row_states_of_booleans_whatever_their_bytes(place: Place) -> None:
    def training() -> tuple[nn.Embedding, Touched, Checkpointer]:
        table = nn.Embedding(20, 4)
        optimizer = Touched(table.parameters(), lr=0.1)
        ckpt = Checkpointer(
            nn.ModuleDict({"table": table}),
            [optimizer],
            run=place.run,
            staging=place.staging,
            interval_batches=2,
            options=Options(row_local_optimizers=(Touched,), handle_sigterm=False),
            timeouts=Timeouts(close_seconds=120.0),
        )
        return table, optimizer, ckpt

    with place.agent():
        table, optimizer, ckpt = training()
        with ckpt:
            assert ckpt.restore() is None
            for batch in range(6):
                optimizer.zero_grad()
                table(torch.tensor([batch // 2])).sum().backward()
                optimizer.step()
                ckpt.step()
        table, optimizer, ckpt = training()
        with ckpt:
            report = ckpt.restore()
    assert report is not None
    touched = optimizer.state[table.weight]["touched"]
    assert touched.view(torch.uint8).tolist() == [1] * 3 + [0] * 17


@pytest.mark.parametrize(
    "built",
    [lambda: torch.zeros(4, 3), lambda: sparse([[]], (4, 3))],
    ids=["dense", "other sparse dimensions"],
)
@pytest.mark.parametrize("restoring", [{}, {"partial": {"dense": ["seen"]}}], ids=["all", "part"])
def test_another_layout_is_refused(
    place: Place, built: Callable[[], Tensor], restoring: dict[str, Any]
) -> None:
    life(place, sparse([[0, 3], [1, 0]], (4, 3)), 2)
    with pytest.raises(IncompatibleModel, match="sparse in 2 of its dimensions"):
        life(place, built(), 0, **restoring)


def test_a_sparse_one_by_name(place: Place) -> None:
    want = sparse([[0, 3], [1, 0]], (4, 3))
    life(place, want, 2)
    restored, found = life(place, sparse([[], []], (4, 3)), 0, partial={"dense": ["seen"]})
    assert restored and found._indices().equal(want._indices())
