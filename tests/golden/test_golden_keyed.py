"""A run with a keyed table is restored for ever (format §3.8, §8)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from recpoint.catalog.restore.keyed_rows import KEY, LAST_USE, USES, used_rows
from recpoint.catalog.restore.restore import MemoryTarget, restore
from recpoint.catalog.run.run import Run
from recpoint.catalog.store.store import open_store

KEYED = Path(__file__).parent / "keyed"


def test_keys_rows_and_what_eviction_goes_by() -> None:
    target = MemoryTarget()
    run = Run.open(open_store(str(KEYED / "run")))
    restore(run, target)
    expected = json.loads((KEYED / "expected.json").read_text())
    table, spec = target.tables["users"], target.specs["users"]
    stored_states = zip(spec.row_states, table.row_states, strict=True)
    states = {state.name: tensor for state, tensor in stored_states if tensor is not None}
    assert list(states) == ["sum", KEY, LAST_USE, USES]
    assert table.values.view(torch.int32).tolist() == expected["values"]
    assert states["sum"].view(torch.int32).tolist() == expected["sum"]
    for name in (KEY, LAST_USE, USES):
        assert states[name].tolist() == expected[name]
    tree: Any = target.state[0]
    state = tree["sources"]["keyed"]["users"]
    counts = {name: expected[name] for name in ("inserted", "evicted", "refused")}
    assert {name: state[name] for name in counts} == counts
    assert state["steps"] == expected["steps"] == 14
    assert state["settings"] == {
        "admit": {"rule": "Seen", "times": 2},
        "evict": {"rule": "LeastUsed"},
    }
    assert state["admission"]["counts"].dtype == torch.uint8
    newest = run.manifest(14, 1)
    assert newest.kind == "increment" and newest.keyed is not None
    (use,) = newest.keyed
    used = len(used_rows(states[LAST_USE]))
    assert newest.tables[use.table].name == "users"
    assert use.model_dump(exclude={"table"}) == {"used": used, **counts}
