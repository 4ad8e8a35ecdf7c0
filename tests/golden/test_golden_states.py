"""A run that was stored with coded second moments is restored for ever (format §3.5, §8)."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from recpoint.catalog.restore.restore import MemoryTarget, restore
from recpoint.catalog.run.run import Run
from recpoint.catalog.store.store import open_store

STATES = Path(__file__).parent / "states"


def test_codes_bf16_and_states_as_they_are() -> None:
    target = MemoryTarget()
    run = Run.open(open_store(str(STATES / "run")))
    restore(run, target)
    expected_bits = json.loads((STATES / "expected.json").read_text())
    assert list(target.tables) == ["narrow", "trained", "wide"]
    for name, table in target.tables.items():
        restored_bits = [
            None if s is None else s.view(torch.int32).tolist() for s in table.row_states
        ]
        assert restored_bits == expected_bits[name]
    assert [run.manifest(step, 1).state_bits for step in (100, 200)] == [8, 8]
    chunks = run.manifest(200, 1).chunks
    # The increment of one table has a negative value, so it has no codes.
    stored = {
        entry.table: b"state.0.grid" in run.store.get(entry.key, max_bytes=entry.bytes)
        for entry in chunks
        if entry.table is not None
    }
    assert stored == {0: True, 1: False, 2: True}
