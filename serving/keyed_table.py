"""Serves a keyed table: finds the rows of keys as the trainer's table does in evaluation.

Rows belong to slots, and a slot may get another key with each version. A copy of a table has its
rows and the keys of its slots, and both are brought to a version together before requests see it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from recpoint.catalog.restore.keyed_rows import KEY, LAST_USE, has_keys, naming_table, used_rows
from recpoint.catalog.restore.rows import LogicalTable
from recpoint.kernels import row_gather
from recpoint.kernels.key_map import KeyMap
from recpoint.serving.tables import CodedTable, FloatTable, RowTable

__all__ = ["RowsByKey", "ServedTable"]


class RowsByKey:
    """Holds a keyed table: its rows by slot, and the slots of its keys.

    Args:
        table: the table of a checkpoint.
        by_slot: holds the rows; row 0 belongs to the keys that have none.

    Attributes:
        by_slot: as given.
        row_states: `keyed.key` and `keyed.last_use` of each slot, int64 [rows], for whoever reads a
            checkpoint. Lookups go by them only after `follow_keys`.
    """

    def __init__(self, table: LogicalTable, by_slot: RowTable) -> None:
        self._spec = table
        self.by_slot = by_slot
        self.row_states = {
            KEY: torch.zeros(table.rows, dtype=torch.int64, device="cpu"),
            LAST_USE: torch.full((table.rows,), -1, dtype=torch.int64, device="cpu"),
        }
        self._map = KeyMap(torch.zeros(table.rows, dtype=torch.int64, device="cpu"))

    @property
    def rows(self) -> int:
        """Number of rows: a slot each, and row 0."""
        return self._spec.rows

    @property
    def form(self) -> tuple[object, ...]:
        """Equal for two tables if `copy_rows` can copy rows between them."""
        return "keyed", self.by_slot.form

    @property
    def nbytes(self) -> int:
        """Memory of the rows, their keys and the map of keys, in bytes."""
        states = sum(state.nbytes for state in self.row_states.values())
        return self.by_slot.nbytes + states + self._map.nbytes

    def empty_like(self) -> RowsByKey:
        """Return a table for as many rows, in memory of its own, without values and keys."""
        return RowsByKey(self._spec, self.by_slot.empty_like())

    def fits(self, table: LogicalTable) -> bool:
        """Whether this can hold the rows and keys of a checkpoint's table."""
        return has_keys([state.name for state in table.row_states]) and self.by_slot.fits(table)

    def finish(self) -> None:
        """Complete the rows, once every row of a chain has been taken; see `follow_keys`."""
        self.by_slot.finish()

    def copy_rows(self, source: RowsByKey, ids: Tensor | None) -> None:
        """Copy slots `ids`, int64 [n], and their keys from another copy; None: all slots."""
        if isinstance(self.by_slot, FloatTable) and isinstance(source.by_slot, FloatTable):
            self.by_slot.copy_rows(source.by_slot, ids)
        elif isinstance(self.by_slot, CodedTable) and isinstance(source.by_slot, CodedTable):
            self.by_slot.copy_rows(source.by_slot, ids)
        for name, state in self.row_states.items():
            if ids is None:
                state.copy_(source.row_states[name])
            else:
                row_gather.move(source.row_states[name], ids, state, ids)
        self.follow_keys(ids)

    def follow_keys(self, ids: Tensor | None) -> None:
        """Have lookups find the keys that `row_states` says, after it was written.

        Args:
            ids: the slots that were written, int64 [n], all different; None: any slot.

        Raises:
            MalformedObject: two slots have one key, or row 0 has one. The slots that were written
                are found by no key then.
        """
        key, last_use = self.row_states[KEY], self.row_states[LAST_USE]
        if ids is None:
            self._map = KeyMap(torch.zeros_like(key))
            used = used_rows(last_use)
        else:
            mapped_keys = self._map.slot_keys[ids]
            # A free slot has key 0 in the map, which may be the key of another slot.
            is_mapped = (self._map.find(mapped_keys) == ids) & (ids > 0)
            self._map.remove(mapped_keys[is_mapped])
            used = ids[last_use[ids] >= 0]
        with naming_table(self._spec.name):
            self._map.insert(key[used], used)

    def slots_of(self, keys: Tensor) -> Tensor:
        """Return the slot of each key, or 0: int64, of the shape and on the device of `keys`.

        Args:
            keys: int32 or int64, any shape.

        Raises:
            TypeError: keys have another dtype; converting them could round them.
        """
        if keys.dtype not in (torch.int32, torch.int64):
            raise TypeError(
                f"table {self._spec.name!r}: found keys of {keys.dtype}, expected int32 or int64"
            )
        flat = keys.reshape(-1).to(device="cpu", dtype=torch.int64).contiguous()
        return self._map.find(flat).view(keys.shape).to(keys.device)

    def has_row(self, keys: Tensor) -> Tensor:
        """Return whether each key has a row: bool, of the shape and on the device of `keys`.

        Args:
            keys: int32 or int64, any shape.

        Raises:
            TypeError: keys have another dtype.
        """
        return self.slots_of(keys) > 0

    def lookup(self, ids: Tensor) -> Tensor:
        """Return the rows of keys; of a key that has none, row 0, as in the trainer's evaluation.

        Args:
            ids: the keys, int32 or int64, any shape [...].

        Returns:
            [..., dim] of the table's dtype.

        Raises:
            TypeError: keys have another dtype.
        """
        return self.rows_at(self.slots_of(ids))

    def rows_at(self, slots: Tensor) -> Tensor:
        """Return the rows of slots, int64 [...]: [..., dim] of the table's dtype."""
        if isinstance(self.by_slot, FloatTable):
            slots = slots.to(self.by_slot.values.device)
        return self.by_slot.lookup(slots)


ServedTable = RowTable | RowsByKey
