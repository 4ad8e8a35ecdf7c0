"""A run that was stored with residuals of each width is restored for ever (format §3.7, §8)."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from recpoint.catalog.restore.restore import MemoryTarget, restore
from recpoint.catalog.run.run import Run
from recpoint.catalog.store.store import open_store
from recpoint.format.manifest import CODE_BITS

RESIDUALS = Path(__file__).parent / "residuals"


def test_a_table_of_each_width_and_a_narrow_dtype() -> None:
    target = MemoryTarget()
    run = Run.open(open_store(str(RESIDUALS / "run")))
    restore(run, target)
    expected_bits = json.loads((RESIDUALS / "expected.json").read_text())
    assert list(target.tables) == [*(f"of_{bits}_bits" for bits in CODE_BITS), "of_bf16"]
    for name, table in target.tables.items():
        word = torch.int16 if name == "of_bf16" else torch.int32
        assert table.values.view(word).tolist() == expected_bits[name]
    increment = run.manifest(200, 1)
    schemes = {(entry.bits, entry.scheme) for entry in increment.chunks if entry.table is not None}
    assert schemes == {(bits, "residual") for bits in CODE_BITS} | {(32, "exact")}
