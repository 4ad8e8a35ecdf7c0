"""Whatever a training loop does between two cuts, the rows that changed are dirty at the second."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Optimizer, SparseAdam

from recpoint.embeddings.tables.marks import Tracker
from recpoint.embeddings.tables.optimizers import OptimizerWatch
from recpoint.kernels import dirty_bitmap
from recpoint.trainer_plugin.tables import find_tables
from tests.example_counts import examples

ROWS = 40

_ids = st.lists(st.integers(0, ROWS - 1), min_size=1, max_size=4)
_actions = st.one_of(
    st.tuples(st.sampled_from(["lookup", "evaluation lookup", "direct use", "by hand"]), _ids),
    st.tuples(st.sampled_from(["other weights", "failed lookup", "one write"]), _ids),
    st.tuples(st.sampled_from(["step", "forget gradient", "zero gradient", "cut"]), _ids),
)


class _Loop:
    def __init__(self, make: Callable[[list[Tensor]], Optimizer], module: nn.Embedding) -> None:
        model = nn.ModuleDict({"table": module})
        self.module = module
        self.optimizer = make([module.weight])
        (table,) = find_tables(model, [self.optimizer]).tables
        self.tracker = Tracker(table)
        self.watch = OptimizerWatch([self.optimizer], {"table": self.tracker})
        self.tracker.install()
        self.watch.install()
        self.stored = self._values()

    def do(self, action: str, ids: list[int]) -> None:
        weight = self.module.weight
        if action == "lookup":
            self.module(torch.tensor(ids)).pow(2).sum().backward()
        elif action == "evaluation lookup":
            self.module.eval()
            self.module(torch.tensor(ids)).pow(2).sum().backward()
            self.module.train()
        elif action == "direct use":
            nn.functional.embedding(
                torch.tensor(ids), weight, sparse=self.module.sparse
            ).sum().backward()
        elif action == "other weights":
            other = {"weight": torch.ones(ROWS, 4)}
            torch.func.functional_call(self.module, other, (torch.tensor(ids),))
        elif action == "failed lookup":
            with pytest.raises(IndexError):
                self.module(torch.tensor([*ids, ROWS]))
        elif action == "one write":
            with torch.no_grad():
                weight.index_fill_(0, torch.tensor(ids), 1)
        elif action == "by hand":
            with torch.no_grad():
                weight[ids] += 1
        elif action == "step":
            self.optimizer.step()
        elif action == "cut":
            self.cut()
        else:
            self.optimizer.zero_grad(set_to_none=action == "forget gradient")

    def cut(self) -> None:
        self.watch.follow_groups()
        self.tracker.follow_weight()
        taken = self.tracker.take()
        values = self._values()
        changed = {
            row
            for row in range(ROWS)
            if any(
                not torch.equal(a[row], b[row]) for a, b in zip(values, self.stored, strict=True)
            )
        }
        dirty = set(dirty_bitmap.collect(taken.bitmap, rows=ROWS).tolist())
        assert taken.all_rows or changed <= dirty
        self.tracker.release(taken)
        self.stored = values

    def _values(self) -> list[Tensor]:
        state = self.optimizer.state.get(self.module.weight, {})
        rows = [state[name].clone() for name in ("sum", "exp_avg", "exp_avg_sq") if name in state]
        rows += [torch.zeros(ROWS, 4)] * (2 - len(rows))  # before the optimizer's first step
        return [self.module.weight.detach().clone(), *rows]


@pytest.mark.parametrize(
    ("make", "sparse"),
    [
        (lambda p: SGD(p, lr=0.1), True),
        (lambda p: Adagrad(p, lr=0.1), True),
        (lambda p: SparseAdam(p, lr=0.1), True),
        (lambda p: SGD(p, lr=0.1), False),
        (lambda p: Adagrad(p, lr=0.1), False),
    ],
    ids=["SGD-sparse", "Adagrad-sparse", "SparseAdam-sparse", "SGD-dense", "Adagrad-dense"],
)
@settings(deadline=None, max_examples=examples(60))
@given(max_norm=st.sampled_from([None, 0.5]), program=st.lists(_actions, max_size=14))
def test_no_changed_row_is_missed(
    make: Callable[[list[Tensor]], Optimizer],
    sparse: bool,
    max_norm: float | None,
    program: list[tuple[str, list[int]]],
) -> None:
    loop = _Loop(make, nn.Embedding(ROWS, 4, sparse=sparse, max_norm=max_norm))
    for action, ids in program:
        loop.do(action, ids)
    loop.cut()
