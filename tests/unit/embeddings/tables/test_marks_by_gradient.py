"""What a step marks, of the gradient that it applied."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad

from tests.tracked import KNOWN, ROWS, Tracked, sparse_table


@pytest.mark.parametrize("make", KNOWN)
def test_a_step_marks_the_rows_of_its_sparse_gradient(make: Any) -> None:
    tracked = sparse_table(make)
    assert not tracked.module._forward_pre_hooks, "its lookups cost nothing"
    tracked.train(torch.tensor([[1, 69], [1, 0]]))
    assert tracked.dirty() == [0, 1, 69]
    assert tracked.dirty() == []
    tracked.train(input=torch.tensor([33], dtype=torch.int32))
    assert tracked.dirty() == [33]


def test_sparse_bags_mark_the_rows_they_change() -> None:
    tracked = Tracked(nn.EmbeddingBag(ROWS, 4, mode="sum", sparse=True, padding_idx=6))
    before = tracked.module.weight.detach().clone()
    tracked.train(torch.tensor([5, 6, 8]), torch.tensor([0, 2]), per_sample_weights=torch.ones(3))
    changed = (tracked.module.weight.detach() != before).any(1).nonzero().squeeze(1).tolist()
    assert changed == tracked.dirty() == [5, 8]


def test_a_sparse_gradient_is_marked_when_it_is_applied() -> None:
    tracked = sparse_table()
    tracked.module(torch.tensor([5])).sum().backward()
    assert tracked.dirty() == []
    tracked.module(torch.tensor([6])).sum().backward()
    tracked.optimizers[0].step()
    assert tracked.dirty() == [5, 6]
    tracked.optimizers[0].step()
    assert tracked.dirty() == [5, 6], "the same gradient once more"
    tracked.optimizers[0].zero_grad(set_to_none=False)
    tracked.optimizers[0].step()
    assert tracked.dirty() == []


def test_sparse_training_in_evaluation_mode_or_through_the_weight_is_marked_exactly() -> None:
    tracked = sparse_table()
    tracked.model.eval()
    tracked.train(torch.tensor([1]))
    tracked.optimizers[0].zero_grad()
    nn.functional.embedding(torch.tensor([2]), tracked.module.weight, sparse=True).sum().backward()
    tracked.optimizers[0].step()
    assert tracked.dirty() == [1, 2]


def test_rows_that_another_process_looked_up_are_marked() -> None:
    """As after DDP's sum of sparse gradients."""
    tracked = sparse_table()
    tracked.module(torch.tensor([1])).sum().backward()
    ours = tracked.module.weight.grad
    assert ours is not None
    theirs = torch.sparse_coo_tensor(torch.tensor([[7, 8]]), torch.ones(2, 4), (ROWS, 4))
    tracked.module.weight.grad = ours + theirs
    tracked.optimizers[0].step()
    assert tracked.dirty() == [1, 7, 8]


def test_a_gradient_with_sparse_columns() -> None:
    tracked = sparse_table()
    entries = torch.sparse_coo_tensor(torch.tensor([[3, 9], [2, 0]]), torch.ones(2), (ROWS, 4))
    tracked.module.weight.grad = entries
    tracked.optimizers[0].step()
    dirty = tracked.dirty()
    assert dirty is None or {3, 9} <= set(dirty)


@pytest.mark.parametrize("sparse", [False, True])
def test_a_step_with_a_closure(sparse: bool) -> None:
    tracked = Tracked(nn.Embedding(ROWS, 4, sparse=sparse))

    def closure() -> float:
        tracked.optimizers[0].zero_grad()
        loss = tracked.module(torch.tensor([11])).pow(2).sum()
        loss.backward()
        return float(loss.detach())

    tracked.optimizers[0].step(closure)
    assert tracked.dirty() == [11]


@pytest.mark.parametrize("sparse", [False, True])
def test_an_optimizer_that_steps_inside_the_backward_pass(sparse: bool) -> None:
    tracked = Tracked(nn.Embedding(ROWS, 4, sparse=sparse))

    def step(weight: torch.Tensor) -> None:
        tracked.optimizers[0].step()
        weight.grad = None

    tracked.module.weight.register_post_accumulate_grad_hook(step)
    tracked.module(torch.tensor([4])).sum().backward()
    tracked.module(torch.tensor([2])).sum().backward()
    assert tracked.dirty() == [2, 4]


@pytest.mark.parametrize("set_to_none", [False, True])
@pytest.mark.parametrize("sparse", [False, True])
def test_a_hook_that_resets_gradients_comes_after_the_marking(
    sparse: bool, set_to_none: bool
) -> None:
    module = nn.Embedding(ROWS, 4, sparse=sparse)
    optimizer = SGD(module.parameters(), lr=0.1)
    optimizer.register_step_post_hook(lambda *_: optimizer.zero_grad(set_to_none=set_to_none))
    tracked = Tracked(module.eval(), lambda parameters: optimizer)
    tracked.train(torch.tensor([1]))
    assert tracked.dirty() == [1]


def test_a_dense_gradient_applied_again_after_the_cut_is_marked() -> None:
    tracked = Tracked(nn.Embedding(ROWS, 4))
    tracked.train(torch.tensor([1]))
    assert tracked.dirty() == [1]
    tracked.optimizers[0].step()
    assert tracked.dirty() == [1]
    tracked.module(torch.tensor([2])).sum().backward()
    tracked.optimizers[0].step()
    assert tracked.dirty() == [1, 2], "a batch that did not reset the gradient"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e-45, -1.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_every_value_but_zero_marks_its_row(value: float, dtype: torch.dtype) -> None:
    tracked = Tracked(nn.Embedding(ROWS, 4, dtype=dtype))
    gradient = torch.zeros(ROWS, 4, dtype=dtype)
    gradient[[5, 69], 3] = value
    tracked.module.weight.grad = gradient
    tracked.optimizers[0].step()
    assert tracked.dirty() == ([5, 69] if gradient[5, 3] != 0 else [])


def test_the_module_calls_itself_dense_for_a_while() -> None:
    tracked = sparse_table()
    tracked.module.sparse = False
    tracked.train(torch.tensor([21]))
    tracked.module.sparse = True
    assert tracked.dirty() is None


def test_gradients_of_zeros_change_nothing() -> None:
    tracked = Tracked(nn.Embedding(ROWS, 4), lambda p: Adagrad(p, lr=0.1))
    tracked.train(torch.tensor([1]))
    assert tracked.dirty() == [1]
    tracked.optimizers[0].zero_grad(set_to_none=False)
    before = tracked.module.weight.detach().clone()
    tracked.optimizers[0].step()
    assert torch.equal(before, tracked.module.weight)
    assert tracked.dirty() == []
