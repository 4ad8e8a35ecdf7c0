"""What happens to the rows of keys when torch loads a module's state, or replaces its weight."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from recpoint.embeddings import Uniform
from recpoint.embeddings.keyed.embedding import KeyedEmbedding
from recpoint.errors import SettingsError


def _table(*keys: int) -> KeyedEmbedding:
    table = KeyedEmbedding(2, 3, initial=Uniform(seed=1), name="users")
    if keys:
        table(torch.tensor(keys))
    return table


@pytest.mark.parametrize(
    ("missing_name", "text"),
    [("_extra_state", "weight and no keys"), ("weight", "keys and no weight")],
)
def test_rows_and_keys_are_loaded_together(missing_name: str, text: str) -> None:
    stored, table = _table(1, 2).state_dict(), _table(5, 6)
    rows_before = copy.deepcopy(table.eval()(torch.tensor([5, 6, 1])))
    del stored[missing_name]
    with pytest.raises(SettingsError, match=text):
        table.load_state_dict(stored, strict=False)
    assert torch.equal(table(torch.tensor([5, 6, 1])), rows_before)
    table.load_state_dict({}, strict=False)
    assert torch.equal(table(torch.tensor([5, 6, 1])), rows_before)


def test_a_state_whose_tensors_become_the_parameters() -> None:
    stored, keys = copy.deepcopy(_table(1, 2).state_dict()), torch.tensor([1, 2, 5])
    expected_rows = _table(1, 2).eval()(keys)
    for table in (_table(7), KeyedEmbedding(2, 3, initial=Uniform(seed=1), device="meta")):
        table.load_state_dict(copy.deepcopy(stored), assign=True)
        assert torch.equal(table.to_table(keys).weight, expected_rows)
        assert torch.equal(table.eval()(keys), expected_rows)
        SGD(table.parameters(), lr=1.0).step()
        assert table.slots.steps == 1
        table.slots.delete(keys[:1])
        assert not table.weight[1].any()


def test_a_model_that_is_built_without_memory_gets_empty_memory() -> None:
    table = KeyedEmbedding(2, 3, initial=Uniform(seed=1), name="users", device="meta")

    def stale_memory(tensor: Tensor, *, device: str) -> Tensor:
        return torch.full(tensor.shape, 7.0, device=device)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty_like", stale_memory)
        table.to_empty(device="cpu")
    keys = torch.tensor([1, 9])
    assert not table.eval()(keys).any() and not table.weight.any()
    assert torch.equal(table.train()(keys), _table()(keys))


def test_a_conversion_that_replaces_parameters() -> None:
    table, keys = _table(1, 2), torch.tensor([1, 2])
    rows = table.eval()(keys)
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        table.double()
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)
    assert torch.equal(table(keys), rows.double())
    assert table.to_table(keys).weight.dtype == torch.float64
    table.slots.delete(keys[:1])
    assert not table.weight[1].any()


def test_a_weight_of_another_table() -> None:
    first, second = _table(1), _table(2)
    second.weight = first.weight
    with pytest.raises(SettingsError, match="the weight of another keyed table"):
        second(torch.tensor([2]))
    assert first.keys().tolist() == [1]
    second.weight = nn.Parameter(torch.zeros(4, 2))
    second(torch.tensor([2]))


def test_a_weight_whose_row_0_was_written() -> None:
    table = _table(1, 2)
    table.weight = nn.Parameter(torch.ones(4, 2))
    with pytest.raises(SettingsError, match="a row 0 that was written"):
        table(torch.tensor([1]))
