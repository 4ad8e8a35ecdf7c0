"""A run that was stored with a table of each width is restored for ever (format §8)."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from recpoint.catalog.restore.restore import MemoryTarget, restore
from recpoint.catalog.run.run import Run
from recpoint.catalog.store.store import open_store
from recpoint.format.manifest import CODE_BITS

WIDTHS = Path(__file__).parent / "widths"


def test_a_table_of_each_width() -> None:
    target = MemoryTarget()
    restore(Run.open(open_store(str(WIDTHS / "run"))), target)
    expected_bits = json.loads((WIDTHS / "expected.json").read_text())
    assert list(target.tables) == [f"of_{bits}_bits" for bits in CODE_BITS]
    for name, table in target.tables.items():
        assert table.values.view(torch.int32).tolist() == expected_bits[name]
