"""Says which server has a row of a table, and in which of its slots.

Rows go to servers in turn: row r of a table is row r + offset of a sequence that is dealt out to
all servers. So each server has the same part of any range, and slots ascend with rows. The offset
follows from the table's name, so that tables of a few rows do not all begin at the same server.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Placement", "placement_of"]


@dataclass(frozen=True)
class Placement:
    """Where the rows of one table are: each row has a slot of its own on one server.

    Attributes:
        rows: rows of the table, 1 or more.
        servers: number of servers, 1 or more.
        offset: server of row 0.
    """

    rows: int
    servers: int
    offset: int

    def slots(self, server: int) -> int:
        """Return how many slots a server needs, 1 or more. Slots begin at 0."""
        return max(1, self._slots_before(server, self.rows))

    def slots_of(self, server: int, rows: range) -> range:
        """Return the slots that rows of a range have on a server; an empty range if none has."""
        slots_before = [self._slots_before(server, row) for row in (rows.start, rows.stop)]
        return range(slots_before[0], max(slots_before))

    def _slots_before(self, server: int, row: int) -> int:
        """Return how many slots of a server come before a row."""
        return max(0, -((server - self.offset - row) // self.servers))

    def split(self, ids: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return for each server which ids are there, and their slots.

        Args:
            ids: int64 [n], ascending, on the CPU.

        Returns:
            For each server positions in `ids`, int64 [m], and slots, int64 [m]. Both ascend.
        """
        dealt = ids + self.offset
        if self.servers == 1:
            return [(torch.arange(len(ids), dtype=torch.int64, device="cpu"), dealt)]
        slots = torch.div(dealt, self.servers, rounding_mode="floor")
        server = dealt - slots * self.servers
        pieces = []
        for number in range(self.servers):
            positions = torch.nonzero(server == number).view(-1)
            pieces.append((positions, slots[positions]))
        return pieces

    def slots_by_server(self, ids: Tensor | range) -> list[Tensor | range]:
        """Return for each server the slots that rows have there, ascending.

        Args:
            ids: int64 [n], ascending, on the CPU; or all rows of a range.
        """
        if isinstance(ids, range):
            return [self.slots_of(server, ids) for server in range(self.servers)]
        return [slots for _, slots in self.split(ids)]

    def ids(self, server: int, slots: Tensor) -> Tensor:
        """Return the rows of slots that `split` returned for a server: int64 [m]."""
        return slots * self.servers + server - self.offset


def placement_of(table: str, *, rows: int, servers: int) -> Placement:
    """Return the placement of a table. It is the same in each process and each release."""
    return Placement(rows, servers, zlib.crc32(table.encode()) % servers)
