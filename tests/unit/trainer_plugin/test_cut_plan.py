"""A plan follows from sizes alone: no two arrays share a byte of the slot."""

from __future__ import annotations

import torch
from torch import Tensor

from recpoint.catalog.staging.slot import ALIGNMENT_BYTES, Placed
from recpoint.format.dtypes import array_bytes
from recpoint.format.manifest import RowStateSpec, TableSpec
from recpoint.trainer_plugin.snapshot.plan import CutTable, place_state, place_tables

ROWS = 50


def _part(row_count: int, *, whole: bool = False) -> CutTable:
    """A table on no device: only its sizes are there."""
    state = RowStateSpec(name="sum", dtype="F32", shape=(3,), optimizer=0)
    spec = TableSpec(name="t", rows=ROWS, dim=3, dtype="F32", row_states=(state,), columns=None)
    values = torch.empty(ROWS, 3, device="meta")
    return CutTable(
        spec=spec,
        held=range(ROWS),
        values=values,
        row_states=(values,),
        bitmap=None if whole else torch.empty(2, dtype=torch.int32, device="meta"),
        row_count=row_count,
        bits=32,
        quantizer="auto",
        state_bits=None,
    )


def _follow_each_other(placed: tuple[Placed, ...], start: int, end: int) -> None:
    for spot in placed:
        assert spot.offset % ALIGNMENT_BYTES == 0
        assert start <= spot.offset < start + ALIGNMENT_BYTES, "bytes are left unused"
        assert spot.size_bytes == array_bytes(spot.dtype, spot.shape)
        start = spot.end
    assert start == end


def test_tables_and_the_state_behind_them_follow_each_other() -> None:
    placed, end = place_tables([_part(7), _part(0), _part(ROWS, whole=True)])
    _follow_each_other(placed, 0, end)
    shapes = {spot.name: spot.shape for spot in placed}
    assert shapes == {
        "t0.ids": (7,),
        "t0.values": (7, 3),
        "t0.state.0": (7, 3),
        "t2.values": (ROWS, 3),
        "t2.state.0": (ROWS, 3),
    }
    tensors: list[Tensor] = [torch.empty(5, dtype=torch.int64), torch.empty(0), torch.empty(())]
    behind, last = place_state(b"tree", tensors, end)
    _follow_each_other(behind, end, last)
    assert [spot.shape for spot in behind] == [(4,), (5,), (0,), ()]
