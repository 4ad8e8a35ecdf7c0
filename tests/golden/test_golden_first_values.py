"""A run whose full leaves out rows that a rule gives is restored for ever (format §3.9, §8)."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from recpoint.catalog.restore.restore import MemoryTarget, restore
from recpoint.catalog.run.run import Run
from recpoint.catalog.store.store import open_store

FIRST_VALUES = Path(__file__).parent / "first_values"
#: Integers with the bits of a value, by its bytes.
_WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def test_tables_of_each_dtype_and_pieces() -> None:
    target = MemoryTarget()
    run = Run.open(open_store(str(FIRST_VALUES / "run")))
    restore(run, target)
    expected_bits = json.loads((FIRST_VALUES / "expected.json").read_text())
    assert list(target.tables) == list(expected_bits)
    for name, table in target.tables.items():
        word = _WORDS[table.values.element_size()]
        assert table.values.contiguous().view(word).tolist() == expected_bits[name]
        sums, steps = table.row_states
        assert sums is not None and steps is not None
        assert bool((sums[2::4][:1] == 0.5).all()) and not bool(steps[2])
    full, increment = run.manifest(100, 1), run.manifest(200, 1)
    left_out = [entry for entry in full.chunks if entry.scheme == "first"]
    assert [entry.row_count for entry in left_out] == [30] * len(full.tables)
    assert not any(entry.scheme == "first" for entry in increment.chunks)
