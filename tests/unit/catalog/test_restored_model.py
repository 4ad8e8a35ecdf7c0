"""A restored checkpoint by the names that the model's parameters have."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from recpoint.catalog.restore.restore import MemoryTarget, model_tensors, restore
from tests.catalog_builder import Table, build, new_run, publish


@pytest.mark.parametrize(("table", "parameter"), [("goods", "goods.weight"), ("weight", "weight")])
def test_a_table_has_the_name_of_its_parameter(tmp_path: Path, table: str, parameter: str) -> None:
    """A model that is an embedding itself has a table and a parameter `weight`."""
    run = new_run(tmp_path)
    run.claim(None)
    values = torch.randn(5, 2)
    publish(run, build(run, [Table(table, values)], step=1, generation=1))
    target = MemoryTarget()
    restore(run, target)
    tensors = model_tensors(target)
    assert list(tensors) == [parameter] and torch.equal(tensors[parameter], values)
