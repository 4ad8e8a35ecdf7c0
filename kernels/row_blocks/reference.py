"""Records in blocks of files, row by row: what the fast version must equal."""

from __future__ import annotations

import os
import struct

import crc32c
import torch
from torch import Tensor

from recpoint.kernels.row_blocks.layout import HEADER_BYTES, BlockForm, State

__all__ = ["Channel", "fill", "take"]


def _slot(record: bytes, row: int, table: int, form: BlockForm) -> bytes:
    summed = struct.pack("<Iq", table, row) + record
    return (struct.pack("<I", crc32c.crc32c(summed)) + summed).ljust(form.slot_bytes, b"\0")


def _bytes(tensor: Tensor) -> bytes:
    return tensor.numpy().tobytes()


def _tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def fill(
    records: Tensor, ids: Tensor, *, table: int, form: BlockForm, memory: Tensor, first: int
) -> None:
    """Write records to slots of blocks in memory, with their headers."""
    for i, row in enumerate(ids.tolist()):
        start = form.place(first + i)
        memory[start : start + form.slot_bytes] = _tensor(
            _slot(_bytes(records[i]), row, table, form)
        )


def take(
    memory: Tensor, slots: Tensor, out: Tensor, positions: Tensor, *, form: BlockForm, whole: bool
) -> None:
    """Copy the records of slots in memory to out[positions]."""
    for slot, position in zip(slots.tolist(), positions.tolist(), strict=True):
        start = form.place(slot)
        out[position] = _tensor(_cut(_bytes(memory[start : start + form.slot_bytes]), form, whole))


def _cut(slot: bytes, form: BlockForm, whole: bool) -> bytes:
    return slot if whole else slot[HEADER_BYTES : HEADER_BYTES + form.record_bytes]


def _state(slot: bytes, row: int, table: int, form: BlockForm) -> State:
    if len(slot) < form.slot_bytes:
        return State.CUT_OFF
    if not any(slot):
        return State.ABSENT
    total, *header = struct.unpack("<IIq", slot[:HEADER_BYTES])
    if crc32c.crc32c(slot[4 : HEADER_BYTES + form.record_bytes]) != total:
        return State.DAMAGED
    return State.FOUND if header == [table, row] else State.MISPLACED


class Channel:
    """Reads and replaces rows in files, one after the other."""

    def read(
        self,
        files: Tensor,
        slots: Tensor,
        ids: Tensor,
        out: Tensor,
        positions: Tensor,
        *,
        table: int,
        form: BlockForm,
        whole: bool = False,
    ) -> Tensor:
        """Read rows. Row i goes to out[positions[i]] if it is found."""
        states = []
        rows = zip(*(tensor.tolist() for tensor in (files, slots, ids, positions)), strict=True)
        for file, slot, row, position in rows:
            data = os.pread(file, form.slot_bytes, form.place(slot))
            states.append(_state(data, row, table, form))
            if states[-1] == State.FOUND:
                out[position] = _tensor(_cut(data, form, whole))
        return torch.tensor(states, dtype=torch.int64, device="cpu")

    def patch(self, files: Tensor, slots: Tensor, rows: Tensor, *, form: BlockForm) -> Tensor:
        """Replace slots."""
        for file, slot, row in zip(files.tolist(), slots.tolist(), rows, strict=True):
            os.pwrite(file, _bytes(row), form.place(slot))
        return torch.zeros(len(slots), dtype=torch.int64, device="cpu")
