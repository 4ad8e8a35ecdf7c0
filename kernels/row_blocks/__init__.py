"""Records of rows in blocks of files: written to blocks, read at a queue depth, replaced in place.

The only kernel that does I/O: it reads and writes files that the caller has opened. On CPUs only.
"""

from __future__ import annotations

from torch import Tensor

from recpoint.kernels.row_blocks import cpu
from recpoint.kernels.row_blocks.layout import (
    HEADER_BYTES,
    MOST_RECORD_BYTES,
    BlockForm,
    State,
)

__all__ = ["HEADER_BYTES", "MOST_RECORD_BYTES", "BlockForm", "Channel", "State", "fill", "take"]

Channel = cpu.Channel


def fill(
    records: Tensor, ids: Tensor, *, table: int, form: BlockForm, memory: Tensor, first: int
) -> None:
    """Write records to slots of blocks in memory, with their headers.

    Args:
        records: uint8 [n, record_bytes].
        ids: int64 [n].
        table: number of the table, 1 … 2^32 - 1.
        form: the layout.
        memory: uint8, whole blocks.
        first: the slot of the first record; the others follow.

    Raises:
        ValueError: a tensor has another form, or the memory ends before the last slot.
    """
    cpu.fill(records, ids, table=table, form=form, memory=memory, first=first)


def take(
    memory: Tensor, slots: Tensor, out: Tensor, positions: Tensor, *, form: BlockForm, whole: bool
) -> None:
    """Copy the records of slots in memory to out[positions]; their checksums are not compared.

    Args:
        memory: uint8, whole blocks.
        slots: int64 [n], slots in this memory.
        out: uint8 [rows, record_bytes]; [rows, slot_bytes] if `whole`.
        positions: int64 [n], rows of `out`.
        form: the layout.
        whole: copy the slots with their headers.

    Raises:
        ValueError: a tensor has another form.
        IndexError: a slot or a position is outside.
    """
    cpu.take(memory, slots, out, positions, form=form, whole=whole)
