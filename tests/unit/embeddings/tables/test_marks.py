"""What marks rows, and what does not."""

from __future__ import annotations

import copy
import gc
import pickle
import re
import weakref
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.exc import Unsupported
from torch.optim import SGD, Adam

from recpoint.embeddings.tables.lookups import SAYS_WHY
from recpoint.embeddings.tables.marks import Tracker
from recpoint.embeddings.tables.optimizers import FullyDirtyTables, OptimizerWatch
from recpoint.errors import ScriptingRefused
from recpoint.kernels import dirty_bitmap
from recpoint.trainer_plugin.tables import find_tables
from tests.tracked import ROWS, Tracked, sparse_table


class OwnSGD(SGD):
    """Known to nobody."""


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


@pytest.mark.parametrize("kind", [Adam, OwnSGD])
def test_one_graph_with_an_optimizer_that_changes_all_rows(kind: Any) -> None:
    tracked = Tracked(nn.Embedding(ROWS, 4), partial(kind, lr=0.1))
    compiled = torch.compile(tracked.module, backend="eager", fullgraph=True)
    for row in (1, 2):
        tracked.optimizers[0].zero_grad()
        compiled(torch.tensor([row, 9])).sum().backward()
        assert tracked.dirty() == []
        tracked.optimizers[0].step()
        assert tracked.dirty() is None
    assert tracked.tracker.surprise is None


def test_a_lookup_that_no_graph_can_hold_says_so_and_what_to_do() -> None:
    tracked = Tracked(nn.Embedding(ROWS, 4, max_norm=0.1))
    local = Tracked(nn.Embedding(ROWS, 4), partial(OwnSGD, lr=0.1), row_local=(OwnSGD,))
    for one, remedy in ((tracked, "without max_norm"), (local, "SGD, Adagrad or SparseAdam")):
        torch._dynamo.reset()  # it remembers that it has refused one
        module = one.module
        compiled = torch.compile(module, backend="eager", fullgraph=True)
        with pytest.raises(Unsupported) as refused:
            compiled(torch.tensor([1]))
        if SAYS_WHY:  # before torch 2.7, only the name of our function is in the message
            assert re.search(f"table {one.tracker.table.key!r}.*{remedy}", str(refused.value))
            assert "compile without fullgraph=True" in str(refused.value)
        else:
            assert "MarkedLookups.before_lookup" in str(refused.value)
        torch._dynamo.reset()
        in_parts = torch.compile(module, backend="eager")
        for row in (1, 2):
            in_parts(torch.tensor([row])).sum().backward()
            one.optimizers[0].step()
            one.optimizers[0].zero_grad()
            assert one.dirty() == [row] and one.tracker.surprise is None


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
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


def test_removed_hooks_mark_nothing() -> None:
    tracked = Tracked(nn.Embedding(ROWS, 4))
    tracked.tracker.remove()
    tracked.watch.remove()
    before = tracked.tracker.take()
    tracked.train(torch.tensor([1]))
    after = tracked.tracker.take()
    assert dirty_bitmap.count(before.bitmap) == dirty_bitmap.count(after.bitmap) == 0
    assert after.all_rows, "but the change is noticed"


def test_lookups_of_a_subclass_with_ids_of_its_own() -> None:
    class Shifted(nn.Embedding):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return super().forward(ids + 30)

    tracked = Tracked(Shifted(ROWS, 4))
    tracked.train(torch.tensor([1, 2]))
    dirty = tracked.dirty()
    assert dirty is not None and {31, 32} <= set(dirty)


def test_max_norm_set_while_training() -> None:
    tracked = sparse_table()
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


def test_a_tracker_that_was_removed_is_freed_with_its_last_reference() -> None:
    tracked = Tracked(nn.Embedding(ROWS, 4), lambda p: Adam(p, lr=0.1))
    bitmap = weakref.ref(tracked.tracker.bitmap)
    tracked.watch.remove()
    tracked.tracker.remove()
    gc.disable()
    try:
        del tracked
        assert bitmap() is None
    finally:
        gc.enable()
