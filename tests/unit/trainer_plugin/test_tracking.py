"""What marks rows, and what does not."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, Optimizer, SparseAdam

from recpoint.errors import ScriptingRefused
from recpoint.kernels import dirty_bitmap
from recpoint.trainer_plugin.optimizer_rows import FullyDirtyTables
from recpoint.trainer_plugin.optimizer_watch import OptimizerWatch
from recpoint.trainer_plugin.tables import find_tables
from recpoint.trainer_plugin.tracking import Tracker

ROWS = 70


class Tracked:
    """A model of one table, tracked."""

    def __init__(
        self, module: nn.Embedding | nn.EmbeddingBag, make: Any = None, **options: Any
    ) -> None:
        self.model = nn.ModuleDict({"table": module})
        self.module = module
        make = make or (lambda parameters: SGD(parameters, lr=0.1))
        self.optimizers: list[Optimizer] = []
        if module.weight.requires_grad:
            self.optimizers.append(make([module.weight]))
        (table,) = find_tables(self.model, self.optimizers).tables
        self.tracker = Tracker(table)
        self.watch = OptimizerWatch(self.optimizers, {"table": self.tracker}, **options)
        self.tracker.install()
        self.watch.install()

    def train(self, *args: Any, **kwargs: Any) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        self.module(*args, **kwargs).pow(2).sum().backward()
        for optimizer in self.optimizers:
            optimizer.step()

    def dirty(self) -> list[int] | None:
        taken = self.tracker.take()
        rows = None
        if not taken.all_rows and dirty_bitmap.count(taken.bitmap) < ROWS:
            rows = dirty_bitmap.collect(taken.bitmap, rows=ROWS).tolist()
        self.tracker.release(taken)
        return rows


def test_training_lookups_mark_their_rows() -> None:
    tracked = Tracked(nn.Embedding(ROWS, 4))
    tracked.train(torch.tensor([[1, 69], [1, 0]]))
    assert tracked.dirty() == [0, 1, 69]
    assert tracked.dirty() == []
    tracked.train(input=torch.tensor([33], dtype=torch.int32))
    assert tracked.dirty() == [33]


def test_bags_mark_their_rows() -> None:
    tracked = Tracked(nn.EmbeddingBag(ROWS, 4, mode="sum"))
    tracked.train(torch.tensor([5, 6, 5]), torch.tensor([0, 2]))
    tracked.train(torch.tensor([7]), offsets=torch.tensor([0]))
    tracked.train(torch.tensor([8]), torch.tensor([0]), per_sample_weights=torch.ones(1))
    assert tracked.dirty() == [5, 6, 7, 8]


def test_evaluation_marks_nothing() -> None:
    tracked = Tracked(nn.Embedding(ROWS, 4))
    with torch.no_grad():
        tracked.module(torch.tensor([1]))
    with torch.inference_mode():
        tracked.module(torch.tensor([2]))
    tracked.model.eval()
    tracked.module(torch.tensor([3]))
    assert not tracked.tracker.unapplied
    assert tracked.dirty() == []


def test_max_norm_marks_always_since_it_writes_always() -> None:
    for frozen in (False, True):
        module = nn.Embedding(ROWS, 4, max_norm=0.1)
        module.weight.requires_grad_(not frozen)
        tracked = Tracked(module)
        before = module.weight.detach().clone()
        tracked.model.eval()
        with torch.no_grad():
            tracked.module(torch.tensor([3, 4]))
        changed = (module.weight.detach() != before).any(1).nonzero().squeeze(1).tolist()
        assert changed == tracked.dirty() == [3, 4]


@pytest.mark.parametrize("sparse", [False, True])
def test_max_norm_explains_its_lookups_and_no_other_change(sparse: bool) -> None:
    tracked = Tracked(nn.Embedding(ROWS, 4, max_norm=0.1, sparse=sparse))
    tracked.train(torch.tensor([1]))
    assert tracked.dirty() == [1]
    with torch.no_grad():
        tracked.module.weight[33] = 0
    tracked.train(torch.tensor([1]))
    assert tracked.dirty() is None
    tracked.model.eval()
    tracked.module(torch.tensor([2]))
    tracked.module.load_state_dict({"weight": torch.ones(ROWS, 4)})
    assert tracked.dirty() is None
    tracked.tracker.surprise = None
    for row in (3, 4):
        tracked.module(torch.tensor([row]))
    with pytest.raises(IndexError):
        tracked.module(torch.tensor([ROWS]))
    tracked.model.train()
    tracked.train(torch.tensor([5]))
    assert tracked.dirty() == [3, 4, 5]
    assert tracked.dirty() == [] and tracked.tracker.surprise is None


def test_rows_that_max_norm_rewrites_are_not_awaited_where_nothing_trains_them() -> None:
    module = nn.Embedding(ROWS, 4, max_norm=0.1)
    tracked = Tracked(module.requires_grad_(False))
    tracked.module(torch.tensor([3]))
    assert tracked.dirty() == [3]
    assert tracked.dirty() == []


@pytest.mark.parametrize("make", [nn.Embedding, nn.EmbeddingBag])
def test_a_model_that_must_compile_as_one_graph(make: Any) -> None:
    tracked = Tracked(make(ROWS, 4))
    compiled = torch.compile(tracked.module, backend="eager", fullgraph=True)
    for row in (1, 2):
        tracked.optimizers[0].zero_grad()
        compiled(torch.tensor([[row, 9]])).sum().backward()
        assert tracked.dirty() == []
        tracked.optimizers[0].step()
        assert tracked.dirty() == [row, 9]
    assert tracked.tracker.surprise is None


def test_a_model_that_is_scripted_is_refused_by_name_while_its_lookups_are_marked() -> None:
    tracked = Tracked(nn.Embedding(ROWS, 4))
    with pytest.raises(ScriptingRefused, match=f"table {tracked.tracker.table.key!r}") as refused:
        torch.jit.script(tracked.module)
    assert "another instance of the model" in refused.value.next_step
    with pytest.raises(ScriptingRefused, match="a copy of a model"):
        torch.jit.script(copy.deepcopy(tracked.module))
    tracked.tracker.remove()
    ids = torch.tensor([3])
    assert torch.equal(torch.jit.script(tracked.module)(ids), tracked.module(ids))


def test_a_frozen_table_is_never_dirty() -> None:
    module = nn.Embedding(ROWS, 4)
    module.weight.requires_grad_(False)
    tracked = Tracked(module)
    tracked.module(torch.tensor([1]))
    assert tracked.dirty() == []


def test_a_frozen_table_in_an_optimizer_that_changes_all_rows() -> None:
    with pytest.warns(FullyDirtyTables):
        tracked = Tracked(nn.Embedding(ROWS, 4), lambda p: Adam(p, lr=0.1))
        tracked.watch.warn()
    tracked.module.weight.requires_grad_(False)
    tracked.optimizers[0].step()
    assert tracked.dirty() == []


def test_training_in_evaluation_mode_is_marked() -> None:
    tracked = Tracked(nn.Embedding(ROWS, 4))
    tracked.model.eval()
    tracked.train(torch.tensor([1]))
    assert tracked.dirty() == [1]


def test_direct_use_of_the_weight_is_marked() -> None:
    tracked = Tracked(nn.Embedding(ROWS, 4))
    nn.functional.embedding(torch.tensor([1]), tracked.module.weight).sum().backward()
    assert tracked.dirty() == [], "a gradient alone changes nothing"
    tracked.module(torch.tensor([2])).sum().backward()
    tracked.optimizers[0].step()
    assert tracked.dirty() == [1, 2], "also beside a lookup"
    (tracked.module(torch.tensor([2])).sum() + tracked.module.weight.norm()).backward()
    tracked.optimizers[0].step()
    assert tracked.dirty() is None, "each row has a share of the norm"
    sparse = Tracked(nn.Embedding(ROWS, 4, sparse=True))
    loss = sparse.module(torch.tensor([2])).sum() + sparse.module.weight.norm()
    loss.backward()
    sparse.optimizers[0].step()
    assert sparse.tracker.surprise is not None and "dense gradient" in sparse.tracker.surprise
    assert sparse.dirty() is None


def test_an_id_out_of_range_fails_in_the_lookup_and_marks_nothing() -> None:
    tracked = Tracked(nn.Embedding(ROWS, 4))
    for wrong in ([3, ROWS], [3, -1]):
        with pytest.raises(IndexError, match="index out of range"):
            tracked.module(torch.tensor(wrong))
    assert tracked.dirty() == []


def test_ids_that_cannot_be_read_make_everything_dirty() -> None:
    tracked = Tracked(nn.Embedding(ROWS, 4))
    with pytest.raises(RuntimeError):  # the lookup's own refusal of float ids
        tracked.module(torch.tensor([1.5]))
    assert tracked.tracker.all_rows and tracked.tracker.surprise is not None


def test_marks_by_hand() -> None:
    tracked = Tracked(nn.Embedding(ROWS, 4))
    tracked.tracker.mark(torch.tensor([[4], [2]]))
    with pytest.raises(IndexError):
        tracked.tracker.mark(torch.tensor([4, ROWS]))
    assert tracked.dirty() == [2, 4]


def test_rows_looked_up_before_the_cut_and_changed_after_it() -> None:
    """Gradient accumulation: the step that applies them comes after the checkpoint."""
    tracked = Tracked(nn.Embedding(ROWS, 4))
    tracked.module(torch.tensor([5])).sum().backward()
    assert tracked.dirty() == [5]
    tracked.module(torch.tensor([6])).sum().backward()
    tracked.optimizers[0].step()
    assert tracked.dirty() == [5, 6]
    assert tracked.dirty() == []


def test_a_lost_checkpoint_gives_its_rows_back() -> None:
    tracked = Tracked(nn.Embedding(ROWS, 4))
    tracked.train(torch.tensor([1]))
    first = tracked.tracker.take()
    tracked.train(torch.tensor([2]))
    second = tracked.tracker.take()
    tracked.train(torch.tensor([3]))
    tracked.tracker.merge_back(first)
    tracked.tracker.release(second)
    assert tracked.dirty() == [1, 3]
    assert tracked.dirty() == []


def test_a_lost_checkpoint_of_everything_gives_everything_back() -> None:
    tracked = Tracked(nn.Embedding(ROWS, 4))
    tracked.tracker.all_rows = True
    taken = tracked.tracker.take()
    assert taken.all_rows
    assert tracked.dirty() == []
    tracked.tracker.merge_back(taken)
    assert tracked.dirty() is None


def test_weight_decay_switched_on_while_training(caplog: pytest.LogCaptureFixture) -> None:
    tracked = Tracked(nn.Embedding(ROWS, 4))
    group = tracked.optimizers[0].param_groups[0]
    tracked.train(torch.tensor([1]))
    assert tracked.dirty() == [1]
    group["weight_decay"] = 0.1
    tracked.train(torch.tensor([1]))
    group["weight_decay"] = 0
    tracked.train(torch.tensor([2]))
    assert tracked.dirty() is None, "one step with decay changed every row"
    tracked.train(torch.tensor([3]))
    assert tracked.dirty() == [3]
    assert "weight_decay" in caplog.text


def test_no_step_no_change() -> None:
    tracked = Tracked(nn.Embedding(ROWS, 4), lambda p: Adam(p, lr=0.1))
    assert tracked.dirty() == []
    tracked.train(torch.tensor([1]))
    assert tracked.dirty() is None


def test_one_warning_names_tables_optimizer_reason_and_change() -> None:
    model = nn.ModuleDict({"a": nn.Embedding(5, 2), "b": nn.Embedding(5, 2)})
    optimizers = [
        Adam(model["a"].parameters(), lr=0.1),
        SGD(model["b"].parameters(), lr=0.1, momentum=0.5),
    ]
    trackers = {table.name: Tracker(table) for table in find_tables(model, optimizers).tables}
    with pytest.warns(FullyDirtyTables) as caught:
        OptimizerWatch(optimizers, trackers).warn()
    assert len(caught) == 1
    text = str(caught[0].message)
    for word in ("'a'", "Adam", "'b'", "SGD", "momentum", "SparseAdam", "momentum=0"):
        assert word in text


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


def test_removed_hooks_mark_nothing() -> None:
    tracked = Tracked(nn.Embedding(ROWS, 4))
    tracked.tracker.remove()
    tracked.watch.remove()
    before = tracked.tracker.take()
    tracked.train(torch.tensor([1]))
    after = tracked.tracker.take()
    assert dirty_bitmap.count(before.bitmap) == dirty_bitmap.count(after.bitmap) == 0
    assert after.all_rows, "but the change is noticed"


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


def _sparse(make: Any = None) -> Tracked:
    return Tracked(nn.Embedding(ROWS, 4, sparse=True), make)


KNOWN = [
    pytest.param(lambda p: SGD(p, lr=0.1), id="SGD"),
    pytest.param(lambda p: Adagrad(p, lr=0.1), id="Adagrad"),
    pytest.param(lambda p: SparseAdam(p, lr=0.1), id="SparseAdam"),
]


@pytest.mark.parametrize("make", KNOWN)
def test_a_step_marks_the_rows_of_its_sparse_gradient(make: Any) -> None:
    tracked = _sparse(make)
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
    tracked = _sparse()
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
    tracked = _sparse()
    tracked.model.eval()
    tracked.train(torch.tensor([1]))
    tracked.optimizers[0].zero_grad()
    nn.functional.embedding(torch.tensor([2]), tracked.module.weight, sparse=True).sum().backward()
    tracked.optimizers[0].step()
    assert tracked.dirty() == [1, 2]


def test_rows_that_another_process_looked_up_are_marked() -> None:
    """As after DDP's sum of sparse gradients."""
    tracked = _sparse()
    tracked.module(torch.tensor([1])).sum().backward()
    ours = tracked.module.weight.grad
    assert ours is not None
    theirs = torch.sparse_coo_tensor(torch.tensor([[7, 8]]), torch.ones(2, 4), (ROWS, 4))
    tracked.module.weight.grad = ours + theirs
    tracked.optimizers[0].step()
    assert tracked.dirty() == [1, 7, 8]


def test_a_gradient_with_sparse_columns() -> None:
    tracked = _sparse()
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
    tracked = _sparse()

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


def test_lookups_of_a_subclass_with_ids_of_its_own() -> None:
    class Shifted(nn.Embedding):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return super().forward(ids + 30)

    tracked = Tracked(Shifted(ROWS, 4))
    tracked.train(torch.tensor([1, 2]))
    dirty = tracked.dirty()
    assert dirty is not None and {31, 32} <= set(dirty)


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
    tracked = _sparse()
    tracked.module.sparse = False
    tracked.train(torch.tensor([21]))
    tracked.module.sparse = True
    assert tracked.dirty() is None


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


@pytest.mark.parametrize(("make", "sparse"), STATEFUL)
def test_row_states_that_change_outside_the_steps_are_noticed(make: Any, sparse: bool) -> None:
    tracked = Tracked(nn.Embedding(ROWS, 4, sparse=sparse), make)

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


def test_gradients_of_zeros_change_nothing() -> None:
    tracked = Tracked(nn.Embedding(ROWS, 4), lambda p: Adagrad(p, lr=0.1))
    tracked.train(torch.tensor([1]))
    assert tracked.dirty() == [1]
    tracked.optimizers[0].zero_grad(set_to_none=False)
    before = tracked.module.weight.detach().clone()
    tracked.optimizers[0].step()
    assert torch.equal(before, tracked.module.weight)
    assert tracked.dirty() == []


def test_max_norm_set_while_training() -> None:
    tracked = _sparse()
    tracked.train(torch.tensor([1]))
    tracked.module.max_norm = 0.1
    tracked.model.eval()
    tracked.module(torch.tensor([2]))
    tracked.watch.follow_groups()
    assert tracked.dirty() is None
    tracked.train(torch.tensor([3]))
    tracked.watch.follow_groups()
    tracked.dirty()
    tracked.module(torch.tensor([4]))
    assert tracked.dirty() == [4]
    tracked.module.max_norm = None
    tracked.watch.follow_groups()
    assert tracked.dirty() is None
    tracked.train(torch.tensor([5]))
    assert tracked.dirty() == [5]


def test_restored_parameter_groups_are_watched() -> None:
    tracked = _sparse()
    tracked.watch.remove()
    optimizer = tracked.optimizers[0]
    optimizer.load_state_dict(optimizer.state_dict())
    tracked.watch.install()
    optimizer.param_groups[0]["momentum"] = 0.5
    tracked.train(torch.tensor([1]))
    assert tracked.dirty() is None


@pytest.mark.parametrize("sparse", [False, True])
def test_copies_of_a_tracked_model_track_nothing(sparse: bool) -> None:
    tracked = Tracked(nn.Embedding(ROWS, 4, sparse=sparse))
    for other in (copy.deepcopy(tracked.model), pickle.loads(pickle.dumps(tracked.model))):
        table = other["table"]
        assert isinstance(table, nn.Embedding)
        assert torch.equal(table.weight, tracked.module.weight)
        table(torch.tensor([1])).sum().backward()
    assert tracked.dirty() == []
    assert list(tracked.model.state_dict()) == ["table.weight"]
