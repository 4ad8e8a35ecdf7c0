"""Gives keyed tables the rows of tables whose raw ids TorchRec's managed collisions mapped.

The raw id that has a row becomes the key that has it. What TorchRec's eviction knows of an id, its
last access and its count, becomes what the rule of eviction here goes by:

    the module's policy   its tensors                   a keyed table may evict by
    LRU                   last_access_iter              last use (`LeastRecent`)
    LFU                   counts                        uses (`LeastUsed`)
    DistanceLFU           counts, last_access_iter      either

Raw ids are row states of a table that was sharded by rows, and otherwise dense tensors of the
checkpoint. Ids that waited for a row, and the row that ids without a row shared, have no place in a
keyed table and stay behind.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import Final, NamedTuple

import torch
from torch import Tensor

from recpoint.catalog.restore.keyed_rows import (
    KEY,
    LAST_USE,
    USES,
    naming_table,
    require_own_keys,
)
from recpoint.catalog.restore.placement import TablePart
from recpoint.catalog.restore.rows import LogicalTable
from recpoint.embeddings.tables.managed_collisions import NO_ID, RAW_ID, has_raw_ids
from recpoint.format.dtypes import torch_dtype
from recpoint.trainer_plugin import mismatches
from recpoint.trainer_plugin.integrations.keyed import KeyedTable
from recpoint.trainer_plugin.mismatches import Mismatch
from recpoint.trainer_plugin.restore.kept_keys import begun_state, kept_slots

__all__ = ["KeysOfCollisions"]

_log = logging.getLogger("recpoint")

#: Row states of a sharded table, and how its module's tensors are called: by what they become here.
_STATES: Final = {LAST_USE: "collisions.last_access_iter", USES: "collisions.counts"}
_TENSORS: Final = {LAST_USE: "_mch_last_access_iter", USES: "_mch_counts"}
_RAW_IDS: Final = "_mch_sorted_raw_ids"
_ROWS: Final = "_mch_remapped_ids_mapping"
_RULES: Final = {LAST_USE: "last use (LeastRecent)", USES: "uses (LeastUsed)"}


class _StoredIds(NamedTuple):
    """The ids of a stored table, in any order.

    Attributes:
        raw_ids: int64 [n]; `NO_ID` stands for none.
        rows: the row of each, int64 [n].
        use_states: `LAST_USE`, `USES` or both -> int64 [n].
    """

    raw_ids: Tensor
    rows: Tensor
    use_states: Mapping[str, Tensor]


class _ChosenKeys(NamedTuple):
    """Keys in the order of their slots here.

    Attributes:
        rows: the row of each in the checkpoint, int64 [n].
        own_states: row states of keys, int64 [n] each.
    """

    rows: Tensor
    own_states: Mapping[str, Tensor]


class KeysOfCollisions:
    """One keyed table that gets the rows of a table whose raw ids TorchRec mapped.

    Args:
        table: the keyed table here.
        stored: the table of the checkpoint.
    """

    def __init__(self, table: KeyedTable, stored: LogicalTable) -> None:
        self._table, self._stored = table, stored
        self._values = torch.empty(
            (stored.rows, stored.dim), dtype=torch_dtype(stored.dtype), device="cpu"
        )
        names = {RAW_ID, *_STATES.values()} if has_raw_ids(stored) else set()
        self._states = {
            state.name: torch.empty(stored.rows, dtype=torch.int64, device="cpu")
            for state in stored.row_states
            if state.name in names
        }

    @property
    def part(self) -> TablePart:
        """Where all rows of the stored table go until `place` gives them to keys."""
        return TablePart(
            table=self._stored.name,
            values=self._values,
            row_states=self._states,
            first_row=0,
            first_column=0,
        )

    def differences(self, tensors: Mapping[str, Tensor]) -> list[Mismatch]:
        """Return why keys cannot have the rows; looks at the form of what is stored only.

        Args:
            tensors: dense tensors of the checkpoint, by name.
        """
        if not self._states:
            differences = self._form_differences(tensors)
            if differences:
                return differences
        rule_state = USES if USES in self._table.own_states else LAST_USE
        stored_names = self._stored_names(tensors)
        if rule_state in stored_names:
            return []
        stored_rules = [_RULES[name].partition(" (")[0] for name in stored_names]
        text = (
            f"table {self._table.name!r} evicts by {_RULES[rule_state]}, and of the ids of "
            f"{self._stored.name!r} the checkpoint has {' and '.join(stored_rules) or 'neither'}"
        )
        return [Mismatch(text, mismatches.KEYED_SETTINGS)]

    def _stored_names(self, tensors: Mapping[str, Tensor]) -> list[str]:
        """Return which of `LAST_USE` and `USES` the checkpoint has of the ids."""
        if self._states:
            return [own_name for own_name, name in _STATES.items() if name in self._states]
        prefix = _prefix(self._stored.name, tensors) or ""
        return [own_name for own_name, name in _TENSORS.items() if prefix + name in tensors]

    def _form_differences(self, tensors: Mapping[str, Tensor]) -> list[Mismatch]:
        """Return what is wrong with the tensors of a module that was not sharded."""
        prefix = _prefix(self._stored.name, tensors)
        if prefix is None:
            text = (
                f"table {self._table.name!r} has keys, and the checkpoint has no raw ids (managed "
                f"collisions) of the rows of {self._stored.name!r}"
            )
            return [Mismatch(text, mismatches.MAPPED_TABLE)]
        forms = {
            name: (tensors[prefix + name].dtype, tuple(tensors[prefix + name].shape))
            for name in (_RAW_IDS, _ROWS, *_TENSORS.values())
            if prefix + name in tensors
        }
        if _ROWS in forms and set(forms.values()) == {(torch.int64, (self._stored.rows,))}:
            return []
        text = (
            f"the managed collisions of {self._stored.name!r} have {forms!r:.300} in the "
            f"checkpoint, and not int64 [{self._stored.rows}] each"
        )
        return [Mismatch(text, mismatches.MAPPED_TABLE)]

    def choose(self, tensors: Mapping[str, Tensor], state: Mapping[int, object]) -> None:
        """Choose the keys that get a row here, after all rows were read; change nothing yet.

        Args:
            tensors: dense tensors of the checkpoint, by name.
            state: the state trees of all ranks.

        Raises:
            MalformedObject: an id has two rows, a row two ids, or there is no such row; or a number
                is below 0.
        """
        ids = self._ids(tensors, state)
        is_used = ids.raw_ids != NO_ID
        keys, rows = ids.raw_ids[is_used], ids.rows[is_used]
        use_states = {name: values[is_used] for name, values in ids.use_states.items()}
        self._require(keys, rows, use_states)
        none = torch.zeros(len(keys), dtype=torch.int64, device="cpu")
        own_states = {
            KEY: _behind_row_0(keys, 0),
            LAST_USE: _behind_row_0(use_states.get(LAST_USE, none), -1),
        }
        if USES in self._table.own_states:
            own_states[USES] = _behind_row_0(use_states[USES], 0)
        slots = kept_slots(self._table, own_states)
        self._chosen = _ChosenKeys(
            rows[slots - 1], {name: entries[slots] for name, entries in own_states.items()}
        )

    def place(self) -> None:
        """Give the chosen keys their rows."""
        rows, own_states = self._chosen
        places = torch.arange(1, len(rows) + 1, device="cpu")
        table = self._table
        with torch.no_grad():
            table.weight.detach().zero_()[places] = self._values[rows]
        for name, entries in table.own_states.items():
            entries.fill_(-1 if name == LAST_USE else 0)
            entries[places] = own_states[name]
        # Each row may leave before the first step here.
        steps = int(own_states[LAST_USE].max()) + 1 if len(rows) else 0
        table.slots.load_state_dict(begun_state(table.slots, steps=steps))
        _log.info(
            "keyed table %r: %d raw ids of %r have become keys; ids that waited for a row, and the "
            "row that ids without a row shared, were left behind",
            table.name,
            len(rows),
            self._stored.name,
        )

    def _ids(self, tensors: Mapping[str, Tensor], state: Mapping[int, object]) -> _StoredIds:
        if self._states:
            use_states = {
                state: self._states[name] for state, name in _STATES.items() if name in self._states
            }
            rows = torch.arange(self._stored.rows, device="cpu")
            return _StoredIds(self._states[RAW_ID], rows, use_states)
        prefix = _prefix(self._stored.name, tensors)
        assert prefix is not None  # `differences` has found it
        replaced = _replaced(state, prefix.removesuffix("."))
        use_states = {
            own_name: replaced.get(_STATES[own_name], tensors[prefix + name])
            for own_name, name in _TENSORS.items()
            if prefix + name in tensors
        }
        return _StoredIds(tensors[prefix + _RAW_IDS], tensors[prefix + _ROWS], use_states)

    def _require(self, keys: Tensor, rows: Tensor, use_states: Mapping[str, Tensor]) -> None:
        """Check numbers that only a damaged or forged checkpoint has.

        Raises:
            MalformedObject: see `place`.
        """
        with naming_table(self._table.name):
            if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < self._stored.rows:
                raise ValueError(f"raw ids in rows that are not in 0 … {self._stored.rows - 1}")
            if len(rows.unique()) < len(rows):
                raise ValueError("two raw ids in one row")
            for name, values in use_states.items():
                if values.shape != keys.shape or (len(values) and int(values.min()) < 0):
                    raise ValueError(f"{_RULES[name].partition(' (')[0]} below 0 of a raw id")
        require_own_keys(self._table.name, rows + 1, keys)


def _prefix(table: str, names: Collection[str]) -> str | None:
    """Return how the names of a table's module of managed collisions begin; None: it has none.

    TorchRec gives a table and the module that maps its ids one name, below one collection.
    """
    ending = f"{table.removesuffix('.weight').rsplit('.', 1)[-1]}.{_RAW_IDS}"
    module_tensors = [name for name in names if name == ending or name.endswith(f".{ending}")]
    if len(module_tensors) > 1:
        outer = table.rpartition("_embedding_module.")[0]
        module_tensors = [
            name
            for name in module_tensors
            if name.startswith(f"{outer}_managed_collision_collection.")
        ]
    return module_tensors[0].removesuffix(_RAW_IDS) if len(module_tensors) == 1 else None


def _replaced(state: Mapping[int, object], module_name: str) -> Mapping[str, Tensor]:
    """Return the tensors that evictions of a module went on with, where no buffers are these.

    Args:
        state: the state trees of all ranks.
        module_name: name of the module.
    """
    for tree in state.values():
        subtree: object = tree
        for name in ("sources", "managed_collisions", module_name, "replaced"):
            subtree = subtree.get(name) if isinstance(subtree, Mapping) else None
        if isinstance(subtree, Mapping):
            return subtree
    return {}


def _behind_row_0(entries: Tensor, entry_of_row_0: int) -> Tensor:
    return torch.cat([entries.new_full((1,), entry_of_row_0), entries])
