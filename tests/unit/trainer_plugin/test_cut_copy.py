"""Rows go to where the job says that they are, or nowhere."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch

from recpoint.format.manifest import TableSpec
from recpoint.kernels import dirty_bitmap
from recpoint.trainer_plugin.snapshot.codes import DeviceDrain
from recpoint.trainer_plugin.snapshot.copy import copy_tables
from recpoint.trainer_plugin.snapshot.plan import CutTable, MarkedRows, place_tables

ROWS = 100


def _part(values: torch.Tensor, marked: list[int]) -> CutTable:
    bitmap = dirty_bitmap.new(ROWS)
    dirty_bitmap.mark(bitmap, torch.tensor(marked), rows=ROWS)
    return CutTable(
        spec=TableSpec(name="t", rows=ROWS, dim=3, dtype="F32", row_states=(), columns=None),
        held=range(ROWS),
        values=values,
        row_states=(),
        bitmap=bitmap,
        row_count=len(marked),
        bits=32,
        quantizer="auto",
        state_bits=None,
    )


def _copied(part: CutTable, spare_bytes: int) -> torch.Tensor:
    placed, end = place_tables([part])
    data = torch.full((end + spare_bytes,), 7, dtype=torch.uint8)
    marked = MarkedRows([part.bitmap], [ROWS])
    copy_tables(placed, data, [part], marked, DeviceDrain(), lambda: None)
    ids, values = (spot.view(data) for spot in placed)
    assert ids.tolist() == [3, 70]
    assert (data[end:] == 7).all()
    return values


def test_rows_are_copied_to_their_places() -> None:
    values = torch.rand(ROWS, 3)
    assert torch.equal(_copied(_part(values, [3, 70]), 64), values[[3, 70]])


def test_rows_are_those_that_a_state_dict_leaves_behind() -> None:
    """It may lend a table other values; other threads copy rows while it is asked."""
    rows = 200_000
    bitmap = dirty_bitmap.new(rows)
    dirty_bitmap.mark(bitmap, torch.arange(1, rows), rows=rows)
    spec = TableSpec(name="t", rows=rows, dim=64, dtype="F32", row_states=(), columns=None)
    many = replace(
        _part(torch.rand(ROWS, 3), [3]),
        spec=spec,
        held=range(rows),
        values=torch.rand(rows, 64),
        bitmap=bitmap,
        row_count=rows - 1,
    )
    few = _part(torch.rand(ROWS, 3), [3, 70])
    parts = [many, few]  # in this order they are copied
    placed, end = place_tables(parts)
    data = torch.empty(end, dtype=torch.uint8)

    def lend() -> None:
        few.values.mul_(2.0)
        time.sleep(0.2)
        few.values.mul_(0.5)

    marked = MarkedRows([part.bitmap for part in parts], [rows, ROWS])
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        copy_tables(placed, data, parts, marked, DeviceDrain(), lend)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(placed[-1].view(data), few.values[[3, 70]])
    assert torch.equal(placed[1].view(data), many.values[1:])


def test_a_slot_that_is_too_short_is_not_written_to() -> None:
    with pytest.raises(ValueError, match=r"t0\.values: found a slot of \d+ bytes, expected \d+"):
        _copied(_part(torch.rand(ROWS, 3), [3, 70]), -1)


def test_rows_of_another_dtype_than_the_job_names_are_not_copied() -> None:
    """Of as many bytes: nothing but their names would tell."""
    with pytest.raises(ValueError, match=r"t0\.values: found dtype torch\.int32, expected F32"):
        _copied(_part(torch.ones(ROWS, 3, dtype=torch.int32), [3, 70]), 0)
