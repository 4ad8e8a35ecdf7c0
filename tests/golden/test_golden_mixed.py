"""A run that was stored with a table of rows of all widths is restored for ever (format §8)."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from recpoint.catalog.restore.restore import MemoryTarget, restore
from recpoint.catalog.run.run import Run
from recpoint.catalog.store.store import open_store
from recpoint.format.manifest import CODE_BITS

MIXED = Path(__file__).parent / "mixed"


def test_a_table_of_rows_of_all_widths() -> None:
    target = MemoryTarget()
    run = Run.open(open_store(str(MIXED / "run")))
    restore(run, target)
    expected_bits = json.loads((MIXED / "expected.json").read_text())
    items = target.tables["items"]
    assert items.values.view(torch.int32).tolist() == expected_bits["values"]
    for state, expected in zip(items.row_states, expected_bits["states"], strict=True):
        assert state is not None and state.view(torch.int32).tolist() == expected
    for step in (100, 200):
        entries = [entry for entry in run.manifest(step, 1).chunks if entry.table is not None]
        widths = {entry.bits for entry in entries}
        assert widths == {*CODE_BITS, 32} and len(entries) > 6
