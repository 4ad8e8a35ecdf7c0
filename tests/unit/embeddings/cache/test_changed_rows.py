"""Rows that differ from their home's are taken as they were, whatever steps do meanwhile."""

from __future__ import annotations

from threading import Lock

import pytest
import torch
from torch import Tensor

from recpoint.embeddings.cache.changed_rows import ChangedRows
from recpoint.embeddings.cache.residents import CachedRows
from recpoint.embeddings.cache.slots import TableSlots

CAPACITY = 40_000  # more than are copied at a time


def table() -> CachedRows:
    """Row 2s of each even slot s, with the values s; every third of these differs from home."""
    slots = TableSlots(
        "t",
        rows=1_000_000,
        capacity=CAPACITY,
        dim=1,
        dtype=torch.float32,
        device=torch.device("cpu"),
        trained=True,
    )
    used = torch.arange(0, CAPACITY, 2)
    slots.ids[used] = 2 * used
    slots.weight.data[used, 0] = used.float()
    slots.changed[used[::3]] = True
    return CachedRows(slots, lambda ids: torch.zeros(len(ids), 1), None)


def step(changed_rows: ChangedRows, rows: CachedRows, slots: Tensor) -> None:
    changed_rows.save("t", slots)
    rows.slots.changed[slots] = True
    rows.slots.weight.data[slots] += 0.5


def values(records: Tensor) -> list[float]:
    return records.view(torch.float32)[:, 0].tolist()


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_rows_are_taken_as_they_were(steps: int) -> None:
    rows = table()
    expected = rows.slots.changed.nonzero().view(-1)
    changed_rows = ChangedRows({"t": rows}, Lock())
    changing = torch.arange(0, CAPACITY, 4)  # some differ from home's, some do not
    for number in range(steps):
        step(changed_rows, rows, changing[number::2])
    taken = changed_rows.take("t")
    assert taken is not None and taken.table == "t"
    assert taken.ids.tolist() == (2 * expected).tolist()
    assert values(taken.records) == expected.float().tolist()
    still = rows.slots.changed.nonzero().view(-1).tolist()
    stepped = torch.cat([changing[number::2] for number in range(steps)] or [changing[:0]])
    assert still == stepped.unique().tolist()


def test_what_a_step_changes_after_its_table_was_taken_differs_again() -> None:
    rows = table()
    changed_rows = ChangedRows({"t": rows}, Lock())
    changed_rows.take("t")
    step(changed_rows, rows, torch.tensor([0, 2]))
    assert rows.slots.changed.nonzero().view(-1).tolist() == [0, 2]


def test_of_a_table_without_changes_nothing_is_taken_or_laid_out() -> None:
    rows = table()
    rows.slots.changed.zero_()
    changed_rows = ChangedRows({"t": rows}, Lock())
    step(changed_rows, rows, torch.tensor([0, 2]))
    assert changed_rows.take("t") is None
    assert rows.slots.layout is None  # the optimizer may have no states yet
    assert rows.slots.changed.nonzero().view(-1).tolist() == [0, 2]
