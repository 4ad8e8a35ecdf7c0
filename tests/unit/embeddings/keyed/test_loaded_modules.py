"""What happens to the rows of keys when torch loads a module's state, or replaces its weight."""

from __future__ import annotations

import copy

import pytest
import torch

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
