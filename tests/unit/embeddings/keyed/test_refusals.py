"""What a keyed table refuses by name, and what it leaves as it was when it does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils import parametrize
from torch.optim import ASGD, LBFGS, SGD, Adafactor, Adagrad, Adam, Optimizer, Rprop
from torch.optim.swa_utils import AveragedModel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

from recpoint.embeddings import cached, local
from recpoint.embeddings.keyed.admission import Probability
from recpoint.embeddings.keyed.embedding import KeyedEmbedding, KeyedEmbeddingBag
from recpoint.embeddings.keyed.eviction import LeastRecent, LeastUsed
from recpoint.errors import ScriptingRefused, SettingsError


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (lambda: KeyedEmbedding(0, 5), "dim: found 0"),
        (lambda: KeyedEmbedding(4, True), "capacity_rows: found True"),
        (lambda: KeyedEmbedding(4, 5, dtype=torch.complex64), "complex64"),
        (lambda: KeyedEmbedding(4, 5, device="meta")(torch.tensor([1])), "the meta device"),
        (lambda: KeyedEmbeddingBag(4, 5, mode="max", sparse=True), "'max' with sparse=True"),
        (lambda: LeastRecent(ttl_batches=0), "ttl_batches=...): found 0"),
        (lambda: Probability(share=0), "share=...): found 0"),
    ],
)
def test_settings_that_cannot_work(build: Callable[[], Any], text: str) -> None:
    with pytest.raises(SettingsError) as refused:
        build()
    assert text in str(refused.value)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda weights: LBFGS(weights), "LBFGS"),
        (lambda weights: Adafactor(weights), "Adafactor"),
        (lambda weights: Rprop(weights), "Rprop"),
        (lambda weights: ASGD(weights), "ASGD"),
        (lambda weights: type("Own", (SGD,), {})(weights, lr=0.1), "Own"),
        (lambda weights: Adam(weights, eps=0), "eps=0"),
    ],
)
def test_optimizers_that_cannot_begin_a_row_anew(
    make: Callable[[list[Tensor]], Optimizer], text: str
) -> None:
    keyed = KeyedEmbedding(2, 5)
    optimizer = make([keyed.weight])
    keyed(torch.tensor([1])).sum().backward()
    before = keyed.weight.detach().clone()
    with pytest.raises(SettingsError, match=text):
        optimizer.step(lambda: 1.0)
    assert torch.equal(keyed.weight, before)


def test_momentum_of_sparse_gradients() -> None:
    keyed = KeyedEmbedding(2, 5, sparse=True)
    optimizer = SGD([keyed.weight], lr=0.1)
    optimizer.step()
    optimizer.param_groups[0]["momentum"] = 0.9  # noticed when it changes
    keyed(torch.tensor([1])).sum().backward()
    with pytest.raises(SettingsError, match="momentum and sparse gradients"):
        optimizer.step()


def test_a_second_optimizer_of_the_weight() -> None:
    keyed = KeyedEmbedding(2, 5)
    first = SGD([keyed.weight], lr=0.1)
    first.step()
    second = SGD([keyed.weight], lr=0.1)
    with pytest.raises(SettingsError, match="a SGD that has trained the table"):
        second.step()
    first.param_groups.clear()
    second.step()
    del second
    Adagrad([keyed.weight]).step()
    assert keyed.slots.steps == 3


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_activation_checkpointing(use_reentrant: bool) -> None:
    keyed = KeyedEmbedding(2, 5)
    factor = torch.ones(2, requires_grad=True)
    out: Any = checkpoint(
        lambda ids, factor: (keyed(ids) * factor).sin(),
        torch.tensor([1]),
        factor,
        use_reentrant=use_reentrant,
    )
    with pytest.raises(SettingsError, match="within a backward pass"):
        out.sum().backward()


def _exported(model: nn.Module) -> object:
    return torch.export.export(model, (torch.tensor([1]),))


def _faked(model: nn.Module) -> object:
    with FakeTensorMode(allow_non_fake_inputs=True):
        return model(torch.tensor([1]))


def _faked_before(model: nn.Module) -> object:
    with FakeTensorMode():
        keys = torch.tensor([1])
    return model(keys)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize(
    ("record", "text"),
    [
        (lambda model: torch.jit.trace(model, torch.tensor([1])), r"torch\.jit\.trace"),
        (lambda model: make_fx(model)(torch.tensor([1])), "make_fx"),
        (lambda model: torch.vmap(model)(torch.tensor([1])), "vmap"),
        (_exported, r"torch\.export"),
        (_faked, "FakeTensorMode"),
        (_faked_before, "FakeTensorMode"),
    ],
    ids=["trace", "make_fx", "vmap", "export", "fake", "fake-keys"],
)
def test_lookups_that_are_recorded(
    record: Callable[[nn.Module], object], text: str, is_training: bool
) -> None:
    keyed = KeyedEmbedding(2, 5)
    keyed(torch.tensor([2]))
    with pytest.raises(SettingsError, match=text):
        record(nn.Sequential(keyed).train(is_training))
    assert keyed.keys().tolist() == [2]


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_scripts() -> None:
    with pytest.raises(ScriptingRefused, match=r"torch\.jit\.script"):
        torch.jit.script(nn.Sequential(KeyedEmbedding(2, 5)))


def test_memory_that_processes_share() -> None:
    keyed = KeyedEmbedding(2, 5)
    keyed.share_memory()
    with pytest.raises(SettingsError, match="memory processes share"):
        keyed(torch.tensor([1]))


def test_a_replica() -> None:
    keyed = copy.deepcopy(KeyedEmbedding(2, 5))
    replicate: Callable[[], Any] = keyed._replicate_for_data_parallel
    keyed = replicate()
    keyed.weight = nn.Parameter(torch.zeros(6, 2))
    with pytest.raises(SettingsError, match="DataParallel"):
        keyed(torch.tensor([1]))


@pytest.mark.parametrize("keys", [[1], torch.tensor([1.0]), torch.tensor([True])])
def test_keys_that_are_no_whole_numbers(keys: Any) -> None:
    with pytest.raises(SettingsError, match="a tensor of int64 or int32"):
        KeyedEmbedding(2, 5)(keys)


@pytest.mark.parametrize("evict", [LeastRecent(), LeastUsed()])
def test_a_lookup_of_too_many_keys_changes_nothing(evict: Any) -> None:
    keyed = KeyedEmbedding(2, 5, evict=evict)
    optimizer = SGD([keyed.weight], lr=0.1)
    keyed(torch.tensor([1, 2, 3]))
    optimizer.step()
    keyed(torch.tensor([1]))
    before = copy.deepcopy(keyed.state_dict())
    with pytest.raises(SettingsError) as refused:
        keyed(torch.tensor([2, 8, 9, 10, 11]))
    assert "4 new keys in one lookup, and 3 rows that they can get" in str(refused.value)
    after = keyed.state_dict()
    assert torch.equal(before["weight"], after["weight"])
    for name, values in before["_extra_state"].pop("row_states").items():
        assert torch.equal(values, after["_extra_state"]["row_states"][name])
    del after["_extra_state"]["row_states"]
    assert before["_extra_state"] == after["_extra_state"]
    keyed(torch.tensor([2, 8, 9, 10]))
    assert keyed.keys().tolist() == [1, 2, 8, 9, 10]


def test_a_rule_of_first_values_that_fails_changes_nothing() -> None:
    def initial(table: str, ids: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
        if 13 in ids:
            raise ValueError("unlucky")
        return torch.ones(len(ids), dim)

    keyed = KeyedEmbedding(2, 1, initial=initial)
    optimizer = SGD([keyed.weight], lr=0.1)
    keyed(torch.tensor([1]))
    optimizer.step()
    with pytest.raises(ValueError, match="unlucky"):
        keyed(torch.tensor([13]))
    assert keyed.keys().tolist() == [1]
    assert keyed.counts == (1, 1, 0, 0)


def test_stored_state_of_another_table() -> None:
    state = KeyedEmbedding(2, 5).state_dict()
    with pytest.raises(SettingsError, match="stored row states"):
        KeyedEmbedding(2, 6).set_extra_state(state["_extra_state"])
    with pytest.raises(SettingsError, match="stored rules"):
        KeyedEmbedding(2, 5, evict=LeastRecent(ttl_batches=3)).load_state_dict(state)


def test_training_in_a_cache_on_several_ranks() -> None:
    keyed = KeyedEmbedding(2, 5)
    cached(nn.ModuleDict({"users": keyed}), local(), 4)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        with pytest.raises(SettingsError, match="2 ranks, and rows in a cache of one trainer"):
            keyed(torch.tensor([1]))
        keyed.eval()
        assert not keyed(torch.tensor([1])).any()
    finally:
        dist.destroy_process_group()


def test_a_weight_that_ranks_have_cut() -> None:
    keyed = KeyedEmbedding(2, 5)
    keyed(torch.tensor([1]))
    keyed.weight = nn.Parameter(keyed.weight.detach().clone())  # as fully_shard does
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        with pytest.raises(SettingsError, match="put in place of the table's own"):
            keyed(torch.tensor([1]))
    finally:
        dist.destroy_process_group()
    keyed(torch.tensor([1]))


def test_a_copy_of_the_model_reports_to_no_checkpointer() -> None:
    class Marks:
        def __init__(self) -> None:
            self.slots: list[int] = []

        def looked_up(self, ids: Tensor) -> None:
            self.slots += ids.tolist()

    keyed = KeyedEmbedding(2, 5)
    marker: Any = Marks()
    keyed.slots.marker = marker
    keyed(torch.tensor([7, 5]))
    assert set(marker.slots) == {0, 1, 2}
    marked = list(marker.slots)
    copied = copy.deepcopy(keyed)
    copied(torch.tensor([8]))
    assert marker.slots == marked
    assert copied.keys().tolist() == [5, 7, 8] and keyed.keys().tolist() == [5, 7]
    keyed.slots.delete(torch.tensor([7, 99]))
    assert marker.slots == [*marked, 2]
    assert keyed.keys().tolist() == [5] and keyed.counts == (1, 2, 0, 0)


def test_an_average_of_weights() -> None:
    model = nn.Sequential(KeyedEmbedding(2, 5))
    averaged: Any = AveragedModel(model)
    optimizer = SGD(model.parameters(), lr=0.1)
    keys = torch.tensor([7])
    model(keys).sum().backward()
    optimizer.step()
    averaged.eval()
    assert not averaged(keys).any()
    averaged.update_parameters(model)
    with pytest.raises(SettingsError, match="AveragedModel"):
        averaged(keys)
    averaged.module.load_state_dict(model.state_dict())
    assert torch.equal(averaged(keys), model.eval()(keys))


def test_a_copy_that_is_trained_goes_on() -> None:
    copied: Any = copy.deepcopy(nn.Sequential(KeyedEmbedding(2, 5)))
    optimizer = SGD(copied.parameters(), lr=0.1)
    for _ in range(3):
        copied(torch.tensor([7])).sum().backward()
        optimizer.step()
    copied.double()
    copied(torch.tensor([7, 8]))
    state = copied.state_dict()
    copied.load_state_dict(state, assign=True)
    copied(torch.tensor([7, 8, 9]))
    with torch.no_grad():
        copied[0].weight.clamp_(max=0.0)
    with pytest.raises(SettingsError, match="written in place"):
        copied(torch.tensor([7]))


def test_rows_that_init_has_written() -> None:
    keyed = KeyedEmbedding(2, 5)
    with torch.no_grad():
        keyed.weight.clamp_(min=0.0)
    keyed(torch.tensor([7]))
    nn.init.normal_(keyed.weight)
    with pytest.raises(SettingsError, match=r"nn\.init"):
        keyed(torch.tensor([7]))


def test_a_functional_call_with_another_weight() -> None:
    keyed = KeyedEmbedding(2, 5)
    weight = keyed.weight.detach().clone().requires_grad_()
    with pytest.raises(SettingsError, match="functional_call"):
        torch.func.functional_call(keyed, {"weight": weight}, (torch.tensor([1]),))


@pytest.mark.parametrize("sparse", [True, False])
def test_a_backward_pass_after_rows_of_its_lookup_have_left(sparse: bool) -> None:
    keyed = KeyedEmbedding(2, 4, evict=LeastUsed(), sparse=sparse)
    optimizer = SGD(keyed.parameters(), lr=1.0)
    for _ in range(2):
        keyed(torch.tensor([1, 2])).sum().backward()
        optimizer.step()
    early = keyed(torch.tensor([10, 11]))
    optimizer.step()
    keyed(torch.tensor([1, 20])).sum().backward()
    optimizer.zero_grad()
    assert keyed.keys().tolist() == [1, 2, 11, 20]
    with pytest.raises(SettingsError, match="lookup at step 2, after some of its rows have left"):
        early.sum().backward()
    assert keyed.weight.grad is None
    kept = keyed(torch.tensor([1, 20]))
    optimizer.step()
    keyed(torch.tensor([30]))  # 11 leaves
    kept.sum().backward()
    assert keyed.weight.grad is not None
    deleted = keyed(torch.tensor([30]))
    keyed.slots.delete(torch.tensor([30]))
    with pytest.raises(SettingsError, match="have left"):
        deleted.sum().backward()


def test_a_backward_pass_after_rows_of_its_lookup_have_expired() -> None:
    keyed = KeyedEmbedding(2, 4, evict=LeastRecent(ttl_batches=1))
    optimizer = SGD(keyed.parameters(), lr=1.0)
    early = keyed(torch.tensor([1]))
    for _ in range(2):
        optimizer.step()
    keyed(torch.tensor([2]))
    with pytest.raises(SettingsError, match="have left"):
        early.sum().backward()


def test_a_second_backward_pass_after_rows_of_its_lookup_have_left() -> None:
    keyed = KeyedEmbedding(2, 2)
    optimizer = SGD(keyed.parameters(), lr=1.0)
    loss = keyed(torch.tensor([1, 2])).sum()
    for _ in range(2):
        loss.backward(retain_graph=True)
    optimizer.step()
    optimizer.zero_grad()
    keyed(torch.tensor([3, 4]))
    with pytest.raises(SettingsError, match="have left"):
        loss.backward()
    assert keyed.weight.grad is None


def test_a_backward_pass_after_a_restore() -> None:
    keyed = KeyedEmbedding(2, 4)
    stored = copy.deepcopy(keyed.state_dict())
    early = keyed(torch.tensor([1]))
    copied = copy.deepcopy(keyed)
    keyed.load_state_dict(stored)
    copied(torch.tensor([1])).sum().backward()
    with pytest.raises(SettingsError, match="have left"):
        early.sum().backward()


def test_lookups_that_have_ended_are_forgotten() -> None:
    keyed = KeyedEmbedding(2, 9)
    open_rows = [keyed(torch.tensor([key])) for key in range(9)]
    for _ in range(40):
        keyed(torch.tensor([1])).sum().backward()
    assert 9 <= len(keyed.slots.open_lookups._lookups) <= 2 * 9
    torch.cat(open_rows).sum().backward()
    for _ in range(20):
        keyed(torch.tensor([1])).sum().backward()
    assert len(keyed.slots.open_lookups._lookups) <= 8


def test_a_weight_that_is_no_parameter() -> None:
    keyed = KeyedEmbedding(2, 4)
    ids = torch.tensor([1])
    with pytest.raises(SettingsError, match="functional_call"):
        torch.func.functional_call(keyed, {"weight": keyed.weight * 2}, (ids,))
    torch.func.functional_call(keyed, dict(keyed.named_parameters()), (ids,)).sum().backward()
    assert keyed.weight.grad is not None
    parametrize.register_parametrization(keyed, "weight", nn.Identity())
    keyed(ids)  # the parameter itself
    parametrize.register_parametrization(keyed, "weight", nn.Tanh())
    with pytest.raises(SettingsError, match="parametrizations"):
        keyed(ids)
    assert keyed.keys().tolist() == [1]


@pytest.mark.parametrize("kind", [torch.optim.Adagrad, torch.optim.SGD])
def test_a_step_with_the_optimizer_state_of_other_keys(kind: Any) -> None:
    keyed = KeyedEmbedding(2, 2)
    optimizer: Any = kind(keyed.parameters(), lr=0.1)

    def train(key: int) -> None:
        keyed(torch.tensor([key])).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    train(1)
    train(2)
    stored, stored_optimizer = copy.deepcopy((keyed.state_dict(), optimizer.state_dict()))
    keyed.load_state_dict(stored)  # the same keys
    train(3)
    keyed.load_state_dict(stored)
    if kind is torch.optim.SGD:  # it has no state of rows
        train(1)
        return
    with pytest.raises(SettingsError, match=r"load_state_dict\(\), too, or build a new optimizer"):
        train(1)
    optimizer.load_state_dict(stored_optimizer)
    train(1)
    train(3)
    optimizer.load_state_dict(stored_optimizer)  # in the other order
    keyed.load_state_dict(stored)
    train(1)
    train(3)
    keyed.load_state_dict(stored)
    with pytest.raises(SettingsError, match="the optimizer's state of the same moment"):
        train(1)
    optimizer = None  # a second one would be refused
    optimizer = kind(keyed.parameters(), lr=0.1)
    train(1)
    KeyedEmbedding(2, 2).load_state_dict(stored)
