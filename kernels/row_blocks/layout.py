"""How records lie in blocks of a file, and what a read says about a row."""

from __future__ import annotations

from array import array
from enum import IntEnum
from typing import Final, NamedTuple

import torch
from torch import Tensor

from recpoint.kernels.arguments import require

__all__ = ["HEADER_BYTES", "MOST_RECORD_BYTES", "BlockForm", "State", "require_rows"]

#: CRC32C of all that follows, number of the table, id: uint32, uint32, int64, little-endian.
HEADER_BYTES: Final = 16
_PAGE_BYTES: Final = 4096
#: Larger records would not fit the memory of a channel.
MOST_RECORD_BYTES: Final = (1 << 20) - HEADER_BYTES


class State(IntEnum):
    """What a read found of a row; a negative number is an error of the system (-errno)."""

    #: The record is right, or was written.
    FOUND = 0
    #: The slot has only zeros: it was never written.
    ABSENT = 1
    #: The file ends before the end of the block.
    CUT_OFF = 2
    #: The checksum is another one.
    DAMAGED = 3
    #: The slot is whole, but belongs to another table or row.
    MISPLACED = 4
    #: Not read, because an earlier read failed.
    NOT_READ = 5


class BlockForm(NamedTuple):
    """How records of one length lie in blocks.

    Attributes:
        record_bytes: bytes of a record.
        slot_bytes: bytes of a record with its header, a multiple of 8.
        slots: slots of a block. A slot never straddles two blocks, so one read has the whole row.
        block_bytes: bytes of a block, a multiple of 4,096.
    """

    record_bytes: int
    slot_bytes: int
    slots: int
    block_bytes: int

    @classmethod
    def of(cls, record_bytes: int) -> BlockForm:
        """Return the layout for a length, 1 … MOST_RECORD_BYTES.

        Raises:
            ValueError: a length outside this range.
        """
        if not 1 <= record_bytes <= MOST_RECORD_BYTES:
            raise ValueError(f"record_bytes: {record_bytes}, expected 1 … {MOST_RECORD_BYTES}")
        slot_bytes = -(-(HEADER_BYTES + record_bytes) // 8) * 8
        block_bytes = -(-slot_bytes // _PAGE_BYTES) * _PAGE_BYTES
        return cls(record_bytes, slot_bytes, block_bytes // slot_bytes, block_bytes)

    def place(self, slot: int) -> int:
        """Return the offset of a slot in the file, in bytes."""
        return slot // self.slots * self.block_bytes + slot % self.slots * self.slot_bytes

    def file_bytes(self, slots: int) -> int:
        """Return the bytes of the blocks that have so many slots."""
        return -(-slots // self.slots) * self.block_bytes

    def packed(self) -> array[int]:
        """Return the fields as native code takes them."""
        return array("q", self)


def require_rows(name: str, rows: Tensor, n: int | None, row_bytes: int) -> None:
    """Refuse anything but uint8 [n, row_bytes] on the CPU; n None: any number of rows.

    Raises:
        ValueError: names the argument and what is expected.
    """
    require(name, rows, torch.uint8, 2)
    if not rows.is_cpu or rows.shape[1] != row_bytes or n not in (None, len(rows)):
        raise ValueError(
            f"{name}: shape {tuple(rows.shape)} on {rows.device}, expected "
            f"{('n' if n is None else n, row_bytes)} on the cpu"
        )
