"""What changes a table outside lookups and steps: noticed, and all of it dirty."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, SparseAdam

from recpoint.embeddings.tables.marks import Tracker
from recpoint.kernels import dirty_bitmap
from tests.tracked import ROWS, Tracked, sparse_table


def test_a_replaced_weight_is_noticed() -> None:
    tracked = Tracked(nn.Embedding(ROWS, 4))
    tracked.module.weight = nn.Parameter(torch.zeros(ROWS, 4))
    tracked.tracker.follow_weight()
    tracked.watch.follow_groups()
    assert tracked.dirty() is None


def test_a_table_that_moves_to_another_group_is_dirty_as_a_whole() -> None:
    tracked = Tracked(nn.Embedding(ROWS, 4))
    tracked.watch.follow_groups()
    assert tracked.dirty() == []
    optimizer = tracked.optimizers[0]
    weight = optimizer.param_groups[0]["params"].pop()
    optimizer.add_param_group({"params": [weight], "lr": 0.5})
    tracked.watch.follow_groups()
    assert tracked.dirty() is None


@pytest.mark.parametrize("rows", [ROWS - 1, ROWS + 1, 3 * ROWS])
def test_a_weight_of_another_length_starts_over_with_everything_dirty(rows: int) -> None:
    tracked = Tracked(nn.Embedding(ROWS, 4))
    tracked.train(torch.tensor([1, ROWS - 1]))
    stored, lost = tracked.tracker.take(), tracked.tracker.take()
    tracked.module.weight = nn.Parameter(torch.zeros(rows, 4))
    tracked.tracker.follow_weight()
    tracked.tracker.release(stored)
    taken = tracked.tracker.take()
    assert taken.all_rows, "the new weight is in no checkpoint"
    tracked.tracker.release(taken)
    tracked.module(torch.tensor([0, rows - 1]))
    again = tracked.tracker.take()
    assert dirty_bitmap.collect(again.bitmap, rows=rows).tolist() == [0, rows - 1]
    tracked.tracker.merge_back(lost)
    everything = tracked.tracker.take()
    assert everything.all_rows, "which rows those were has no meaning any more"


@pytest.mark.parametrize("sparse", [False, True])
def test_a_change_outside_the_steps_is_noticed(sparse: bool) -> None:
    tracked = Tracked(nn.Embedding(ROWS, 4, sparse=sparse))
    tracked.module.load_state_dict({"weight": torch.ones(ROWS, 4)})
    assert tracked.dirty() is None
    with torch.no_grad():
        tracked.module.weight[3] = 0
    tracked.train(torch.tensor([1]))
    assert tracked.dirty() is None
    assert tracked.dirty() == []
    with torch.no_grad():
        tracked.module.weight[3] = 1
    tracked.tracker.mark(torch.tensor([3]))
    assert tracked.dirty() == [3], "mark() explains it"
    tracked.tracker.surprise = None
    with torch.no_grad():
        tracked.module.weight.zero_()
    tracked.tracker.mark_all()
    assert tracked.dirty() is None and tracked.tracker.surprise is None


@pytest.mark.parametrize("kind", [SGD, Adagrad])
@pytest.mark.parametrize("sparse", [False, True])
def test_a_change_during_a_step_is_noticed(sparse: bool, kind: Any) -> None:
    tracked = Tracked(nn.Embedding(ROWS, 4, sparse=sparse), lambda p: kind(p, lr=0.1))

    def change(*_: Any) -> None:
        with torch.no_grad():
            tracked.module.weight[33] += 1

    hook = tracked.optimizers[0].register_step_pre_hook(change)
    tracked.train(torch.tensor([1]))
    assert tracked.dirty() is None
    hook.remove()
    tracked.train(torch.tensor([1]))
    assert tracked.dirty() == [1]


@pytest.mark.parametrize("how", ["foreach", "fused"])
@pytest.mark.parametrize("kind", [SGD, Adagrad])
def test_a_step_of_any_implementation_is_one_change(kind: Any, how: str) -> None:
    tracked = Tracked(nn.Embedding(ROWS, 4), lambda p: kind(p, lr=0.1, **{how: True}))
    tracked.train(torch.tensor([1]))
    assert tracked.dirty() == [1]
    assert tracked.tracker.surprise is None


@pytest.mark.parametrize("sparse", [False, True])
def test_a_weight_whose_memory_was_replaced_is_noticed(sparse: bool) -> None:
    tracked = Tracked(nn.Embedding(ROWS, 4, sparse=sparse))
    tracked.module.weight.data = torch.zeros(ROWS, 4)
    tracked.tracker.follow_weight()
    assert tracked.dirty() is None
    tracked.tracker.follow_weight()
    assert tracked.dirty() == []


def test_other_memory_at_the_same_address_is_noticed() -> None:
    """As that of `weight.data = weight.data * 0.5`, done twice, often is."""
    memory = bytearray(4 * 4 * ROWS)

    def values() -> torch.Tensor:
        return torch.frombuffer(memory, dtype=torch.float32).view(ROWS, 4)

    tracked = Tracked(nn.Embedding(ROWS, 4, _weight=values()))
    weight = tracked.module.weight
    address = weight.data_ptr()
    weight.data = torch.zeros(ROWS, 4)
    memory[:] = torch.ones(ROWS, 4).numpy().tobytes()
    weight.data = values()
    assert weight.data_ptr() == address
    tracked.tracker.follow_weight()
    assert tracked.dirty() is None
    tracked.tracker.follow_weight()
    assert tracked.dirty() == []


@pytest.mark.parametrize("again", [False, True])
def test_a_step_that_ends_with_an_error_is_noticed(again: bool) -> None:
    tracked = sparse_table()

    def fails() -> float:
        tracked.module(torch.tensor([4])).sum().backward()
        raise RuntimeError("as good as any")

    with pytest.raises(RuntimeError, match="as good"):
        tracked.optimizers[0].step(fails)
    if again:
        tracked.train(torch.tensor([1]))
    tracked.watch.follow_groups()
    assert tracked.dirty() is None
    tracked.train(torch.tensor([1]))
    tracked.watch.follow_groups()
    assert tracked.dirty() == [1]


@pytest.mark.parametrize("sparse", [False, True])
def test_a_gradient_that_is_gone_right_after_the_step_is_noticed(sparse: bool) -> None:
    model = nn.Embedding(ROWS, 4, sparse=sparse).eval()
    optimizer = SGD(model.parameters(), lr=0.1)
    tracked = Tracked(model, lambda parameters: optimizer)
    hooks = optimizer._optimizer_step_post_hooks
    ours = hooks.copy()
    hooks.clear()
    optimizer.register_step_post_hook(lambda *_: optimizer.zero_grad())
    hooks.update(ours)
    tracked.train(torch.tensor([1]))
    assert tracked.dirty() is None
    assert "gradient" in str(tracked.tracker.surprise)


@pytest.mark.parametrize("sparse", [False, True])
def test_a_loaded_optimizer_has_other_row_states_and_groups(sparse: bool) -> None:
    tracked = Tracked(nn.Embedding(ROWS, 4, sparse=sparse), lambda p: Adagrad(p, lr=0.1))
    (optimizer,) = tracked.optimizers
    tracked.train(torch.tensor([1]))
    assert tracked.dirty() == [1]
    optimizer.load_state_dict(optimizer.state_dict())
    assert tracked.dirty() is None
    tracked.train(torch.tensor([2]))
    assert tracked.dirty() == [2]
    if not sparse:
        optimizer.param_groups[0]["weight_decay"] = 0.1
        tracked.train(torch.tensor([3]))
        optimizer.param_groups[0]["weight_decay"] = 0
        assert tracked.dirty() is None
    tracked.watch.remove()
    optimizer.load_state_dict(optimizer.state_dict())
    assert tracked.dirty() == []


STATEFUL = [
    pytest.param(lambda p: Adagrad(p, lr=0.1), True, id="sparse Adagrad"),
    pytest.param(lambda p: SparseAdam(p, lr=0.1), True, id="SparseAdam"),
    pytest.param(lambda p: Adagrad(p, lr=0.1, foreach=False), False, id="Adagrad"),
    pytest.param(lambda p: Adagrad(p, lr=0.1, foreach=True), False, id="foreach Adagrad"),
    pytest.param(lambda p: Adagrad(p, lr=0.1, fused=True), False, id="fused Adagrad"),
]


@pytest.mark.parametrize("max_norm", [None, 0.1])
@pytest.mark.parametrize(("make", "sparse"), STATEFUL)
def test_row_states_that_change_outside_the_steps_are_noticed(
    make: Any, sparse: bool, max_norm: float | None
) -> None:
    tracked = Tracked(nn.Embedding(ROWS, 4, sparse=sparse, max_norm=max_norm), make)

    def dirty() -> list[int] | None:
        tracked.tracker.follow_row_states(states())
        return tracked.dirty()

    def states() -> list[torch.Tensor]:
        found = tracked.optimizers[0].state[tracked.module.weight]
        return [found[name] for name in ("sum", "exp_avg", "exp_avg_sq") if name in found]

    tracked.train(torch.tensor([1]))
    assert dirty() == [1]
    tracked.train(torch.tensor([2]))
    tracked.train(torch.tensor([3]))
    tracked.optimizers[0].zero_grad(set_to_none=False)
    tracked.optimizers[0].step()
    assert dirty() == [2, 3]
    states()[-1].mul_(0.5)
    tracked.train(torch.tensor([4]))
    assert dirty() is None
    assert "row states" in str(tracked.tracker.surprise)
    tracked.train(torch.tensor([5]))
    states()[0][7] = 0
    tracked.tracker.mark(torch.tensor([7]))
    assert dirty() == [5, 7], "mark() explains it"
    tracked.tracker.surprise = None
    states()[0].zero_()
    tracked.tracker.mark_all()
    assert dirty() is None and tracked.tracker.surprise is None
    entry = tracked.optimizers[0].state[tracked.module.weight]
    for name in entry.keys() - {"step"}:
        entry[name] = entry[name] * 0.5
    tracked.tracker.mark(torch.tensor([7]))
    assert dirty() is None, "mark() explains no other tensors"


def test_lookups_in_a_closure_explain_no_change_of_row_states() -> None:
    """With max_norm they change the weight, during the step."""
    tracked = Tracked(nn.Embedding(ROWS, 4, max_norm=0.1), partial(Adagrad, lr=0.1))
    (optimizer,) = tracked.optimizers

    def closure() -> float:
        optimizer.zero_grad()
        loss = tracked.module(torch.tensor([1])).pow(2).sum()
        loss.backward()
        return float(loss.detach())

    def dirty() -> list[int] | None:
        tracked.tracker.follow_row_states([optimizer.state[tracked.module.weight]["sum"]])
        return tracked.dirty()

    optimizer.step(closure)
    assert dirty() == [1]
    optimizer.step(closure)
    optimizer.state[tracked.module.weight]["sum"].mul_(0.5)
    assert dirty() is None
    assert "row states" in str(tracked.tracker.surprise)


def test_momentum_is_no_change_outside_the_steps() -> None:
    """It changes its buffer twice a step, and the weight once."""
    tracked = Tracked(nn.Embedding(ROWS, 4), lambda p: SGD(p, lr=0.1, momentum=0.9))
    for row in range(4):
        tracked.train(torch.tensor([row]))
        buffer = tracked.optimizers[0].state[tracked.module.weight]["momentum_buffer"]
        tracked.tracker.follow_row_states([buffer])
        assert tracked.dirty() is None
        assert tracked.tracker.surprise is None


def test_a_failed_step_of_an_optimizer_that_changes_all_rows() -> None:
    """Adam's moments move before its weights do."""
    tracked = Tracked(nn.Embedding(ROWS, 4), lambda p: Adam(p, lr=0.1))
    tracked.train(torch.tensor([1]))
    tracked.dirty()

    def fails() -> float:
        tracked.module(torch.tensor([4])).sum().backward()
        raise RuntimeError("as good as any")

    with pytest.raises(RuntimeError, match="as good"):
        tracked.optimizers[0].step(fails)
    tracked.watch.follow_groups()
    assert tracked.dirty() is None


def test_restored_parameter_groups_are_watched() -> None:
    tracked = sparse_table()
    tracked.watch.remove()
    optimizer = tracked.optimizers[0]
    optimizer.load_state_dict(optimizer.state_dict())
    tracked.watch.install()
    optimizer.param_groups[0]["momentum"] = 0.5
    tracked.train(torch.tensor([1]))
    assert tracked.dirty() is None


class _Shifted(nn.Embedding):
    """Looks up other rows than those it is called with."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids + 30)


def _with_other_weights(module: nn.Module) -> None:
    """As with averaged weights."""
    torch.func.functional_call(module, {"weight": torch.ones(ROWS, 4)}, (torch.tensor([1]),))


def _that_raises(module: nn.Module) -> None:
    with pytest.raises(ValueError, match="offsets"):
        module(torch.tensor([1]))


def _that_a_hook_ends(module: nn.Module) -> None:
    def refuse(*_: Any) -> None:
        raise RuntimeError("as good as any")

    hook = module.register_forward_pre_hook(refuse)
    with pytest.raises(RuntimeError, match="as good"):
        module(torch.tensor([1]))
    hook.remove()


def _in_a_thread_with_other_weights(module: nn.Module) -> None:
    thread = threading.Thread(target=_with_other_weights, args=(module,))
    thread.start()
    thread.join()


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize(
    ("make", "look_up"),
    [
        pytest.param(nn.Embedding, _with_other_weights, id="averaged weights"),
        pytest.param(nn.EmbeddingBag, _that_raises, id="a bag without offsets"),
        pytest.param(nn.Embedding, _that_a_hook_ends, id="a hook that raises"),
        pytest.param(nn.Embedding, _in_a_thread_with_other_weights, id="another thread"),
    ],
)
def test_a_lookup_that_rewrites_nothing_explains_no_change(
    make: Any, look_up: Any, trained: bool
) -> None:
    module = make(ROWS, 4, max_norm=0.1)
    tracked = Tracked(module.requires_grad_(trained))
    module.eval()  # no step is to come for what is looked up
    module(torch.tensor([[2]]))
    tracked.dirty()
    look_up(module)
    with torch.no_grad():
        module.weight[33] = 1
    assert tracked.dirty() is None
    tracked.tracker.surprise = None
    for row in (3, 4):
        module(torch.tensor([[row]]))
    assert tracked.dirty() == [3, 4] and tracked.tracker.surprise is None, "and the next one does"


@pytest.mark.parametrize("make", [nn.Embedding, nn.EmbeddingBag])
def test_rows_that_a_failed_lookup_has_rewritten_are_stored(make: Any) -> None:
    """torch counts no change then."""
    tracked = Tracked(make(ROWS, 4, max_norm=0.1))
    before, version = tracked.module.weight.detach().clone(), tracked.module.weight._version
    with pytest.raises(IndexError):
        tracked.module(torch.tensor([[1, ROWS]]))
    assert not torch.equal(before[1], tracked.module.weight.detach()[1])
    assert tracked.module.weight._version == version
    assert tracked.dirty() is None
    assert "ended with an error" in str(tracked.tracker.surprise)


def test_a_lookup_explains_the_rows_of_its_own_ids_alone() -> None:
    """Of a `forward` that is not torch's, and of ids that a hook has put in their place."""
    shifted = Tracked(_Shifted(ROWS, 4, max_norm=0.1)).tracker
    replaced = Tracked(nn.Embedding(ROWS, 4, max_norm=0.1)).tracker
    replaced.table.module.register_forward_pre_hook(lambda _, args: (args[0] + 30,))  # type: ignore[attr-defined]
    in_place = Tracked(nn.Embedding(ROWS, 4, max_norm=0.1)).tracker
    in_place.table.module.register_forward_pre_hook(lambda _, args: (args[0].add_(30),))  # type: ignore[attr-defined]
    patched = Tracked(nn.Embedding(ROWS, 4, max_norm=0.1)).tracker
    module = patched.table.module  # type: ignore[attr-defined]
    module.forward = lambda ids: nn.Embedding.forward(module, ids + 30)
    for tracker in (shifted, replaced, in_place, patched):
        before = tracker.weight.detach().clone()
        tracker.table.module.eval()(torch.tensor([1]))  # type: ignore[attr-defined]
        assert not torch.equal(before[31], tracker.weight.detach()[31])
        assert _holds(tracker, 31)


def _holds(tracker: Tracker, row: int) -> bool:
    """Whether the next checkpoint does."""
    taken = tracker.take()
    return taken.all_rows or row in dirty_bitmap.collect(taken.bitmap, rows=ROWS).tolist()


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_change_during_a_lookup_is_not_explained_by_it(when: str) -> None:
    tracked = Tracked(nn.Embedding(ROWS, 4, max_norm=0.1))

    def change(*_: Any) -> None:
        with torch.no_grad():
            tracked.module.weight[33] = 1

    if when == "before":
        tracked.module.register_forward_pre_hook(change)
    else:
        tracked.module.register_forward_hook(change, prepend=True)
    tracked.module(torch.tensor([1]))
    assert tracked.dirty() is None


@pytest.mark.parametrize("max_norm", [None, 0.1])
def test_a_step_without_a_gradient_explains_no_change(max_norm: float | None) -> None:
    """Also where rows were looked up before it, and a gradient of them is still to come."""
    tracked = Tracked(nn.Embedding(ROWS, 4, max_norm=max_norm))
    (optimizer,) = tracked.optimizers
    tracked.train(torch.tensor([1]))
    optimizer.zero_grad()
    tracked.dirty()

    def closure() -> float:
        loss = tracked.module(torch.tensor([2])).sum()
        with torch.no_grad():
            tracked.module.weight[33] = 1
        return float(loss.detach())

    optimizer.step(closure)
    assert tracked.dirty() is None


def test_a_step_without_a_gradient_explains_no_change_of_row_states() -> None:
    tracked = Tracked(nn.Embedding(ROWS, 4, max_norm=0.1), partial(Adagrad, lr=0.1))
    (optimizer,) = tracked.optimizers
    tracked.train(torch.tensor([1]))
    optimizer.zero_grad()
    sums = optimizer.state[tracked.module.weight]["sum"]
    tracked.tracker.follow_row_states([sums])
    tracked.dirty()
    optimizer.step(lambda: float(tracked.module(torch.tensor([2])).sum().detach()))
    sums.mul_(0.5)
    tracked.tracker.follow_row_states([sums])
    assert tracked.dirty() is None
