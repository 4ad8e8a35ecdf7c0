"""Presents keyed tables, whose rows belong to keys, as tables.

The rows are stored by slot. Which key has a slot is an exact row state of the table's own, beside
those of its optimizer. The clock, the counts and what admission remembers are in the state tree.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel
from torch.optim import Optimizer

from recpoint.catalog.restore.keyed_rows import KEY, naming_table
from recpoint.catalog.restore.state import canonical_name
from recpoint.embeddings.cache.cached_keys import CachedKeys, keyed_lookups_of
from recpoint.embeddings.keyed.stored_state import state_faults
from recpoint.embeddings.tables.keyed import KeyCounts, KeyedSlots, slots_of
from recpoint.embeddings.tables.tables import Marker, Table
from recpoint.errors import SettingsError
from recpoint.trainer_plugin import mismatches

__all__ = ["KeyedSource", "KeyedTable", "counts_by_table", "find"]

_WHY_ALONE: Final = "keyed tables are trained in one process, on the CPU"


def find(model: nn.Module) -> KeyedSource | None:
    """Return the source of a model's keyed tables; None if it has none.

    Raises:
        SettingsError: a table is not on the CPU, in a wrapper for several devices or ranks, or has
            its weight in another module, too.
    """
    tables: dict[str, KeyedTable] = {}
    wrappers: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if isinstance(module, DataParallel):
            wrappers[f"{name}." if name else ""] = module
        slots = slots_of(module)
        if slots is None:
            continue
        canonical = canonical_name(model, name)
        table = KeyedTable(
            name=canonical or "weight",
            parameter_name=f"{canonical}.weight" if canonical else "weight",
            module=module,
            slots=slots,
            in_cache=keyed_lookups_of(module),
        )
        for prefix, wrapper in wrappers.items():
            if name.startswith(prefix):
                raise _refused(table, f"a {type(wrapper).__name__} around it", _WHY_ALONE)
        _refuse_elsewhere(model, name, table)
        tables[name] = table
    return KeyedSource(tables) if tables else None


_log = logging.getLogger("recpoint")


@dataclass(frozen=True, kw_only=True, eq=False)
class KeyedTable(Table):
    """The slots of a keyed table. Their rows are in the weight, or in a cache and at home.

    Attributes:
        module: the module, which has the weight.
        slots: knows which key has which slot.
        in_cache: finds the rows in a cache; None: the weight has all of them.
    """

    module: nn.Module
    slots: KeyedSlots
    in_cache: CachedKeys | None = None

    @property
    def name_in_cache(self) -> str | None:
        """Name of the table in the cache that has its rows; None: no cache has them."""
        return None if self.in_cache is None else self.in_cache.name

    @property
    def table_rows(self) -> int:
        """Number of slots, and row 0."""
        return len(self.slots.row_states[KEY])

    @property
    def _part(self) -> range:
        """The slots that this trainer stores; of several that share a cache, each has a part."""
        return range(self.table_rows) if self.in_cache is None else self.in_cache.part

    @property
    def rows(self) -> int:
        """Number of these."""
        return len(self._part)

    @property
    def first_row(self) -> int:
        """First of them."""
        return self._part.start

    @property
    def counts_changes(self) -> bool:
        """Whether torch counts changes of rows; in a cache, rows come and go in the weight."""
        return self.in_cache is None

    @property
    def weight(self) -> Tensor:
        """The rows of all slots, and row 0; in a cache, its slots."""
        weight = self.module.weight
        assert isinstance(weight, Tensor)
        return weight

    @property
    def changes(self) -> bool:
        """True: lookups in training give rows to other keys."""
        return True

    @property
    def changed_by_lookup(self) -> bool:
        """True: a lookup in training changes the last use of its keys, and inserts new ones."""
        return True

    @property
    def sparse(self) -> bool:
        """Whether the module asks for sparse gradients now."""
        return bool(getattr(self.module, "sparse", False))

    @property
    def id_map(self) -> str:
        """Keys have the rows."""
        return "keys"

    @property
    def own_states(self) -> Mapping[str, Tensor]:
        """Keys, and what eviction knows of them, of the slots that this trainer stores."""
        states = self.slots.row_states
        return states if self.in_cache is None else self.in_cache.part_of(states)

    def follow(self, marker: Marker | None) -> None:
        """Have a marker told of slots that lookups change; None: nobody is."""
        if marker is not None and self.rows < self.table_rows:
            marker = _PartMarker(marker, self._part)
        self.slots.marker = marker

    def refuse_optimizer(self, optimizer: Optimizer, group: Mapping[str, Any]) -> None:
        """Refuse an optimizer whose entries of new keys are not known.

        In a cache, also one that changes rows that were not looked up.
        """
        self.slots.refuse_optimizer(optimizer, group)
        if self.in_cache is not None:
            self.in_cache.cache.refuse_optimizer(self.in_cache.name, optimizer, group)

    @property
    def key_counts(self) -> Mapping[str, int]:
        """What the keys did; see `Table.key_counts`."""
        slots = self.slots
        return {
            "used": slots.rows_used,
            "inserted": slots.inserted,
            "evicted": slots.evicted,
            "refused": slots.refused,
        }

    def begin_entries(self, optimizers: Sequence[Optimizer]) -> None:
        """Give slots of new keys their first entries in row states."""
        self.slots.begin_states(optimizers)

    def rows_of(self, ids: Tensor) -> Tensor:
        """Return the slots of keys; those that have none are left out. See `Table.rows_of`."""
        if not isinstance(ids, Tensor):
            raise TypeError(f"ids: found {type(ids).__name__}, expected a tensor of int64 keys")
        if ids.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"ids: found {ids.dtype}, expected int32 or int64 keys")
        slots = self.slots.find(ids.reshape(-1).to(device="cpu", dtype=torch.int64))
        return slots[slots > 0]

    def zero_rows(self, ids: Tensor, row_states: Iterable[Tensor]) -> None:
        """Free slots. Their rows become zeros, and their entries those of a row never trained.

        Raises:
            SettingsError: several trainers share a cache of them.
        """
        if self.in_cache is not None:
            self.in_cache.refuse_reset()
        self.slots.delete(self.own_states[KEY][ids])


class _PartMarker:
    """Passes reports of a part of a table on; a `Marker`.

    Args:
        marker: is told of rows that count from the first of the part.
        part: the rows.
    """

    def __init__(self, marker: Marker, part: range) -> None:
        self._marker, self._part = marker, part
        self.applied, self.mark_all = marker.applied, marker.mark_all

    def _own(self, ids: Tensor) -> Tensor:
        return ids[(ids >= self._part.start) & (ids < self._part.stop)] - self._part.start

    def looked_up(self, ids: Tensor) -> None:
        """Report rows of the whole table; see `Marker`."""
        self._marker.looked_up(self._own(ids))

    def mark(self, ids: Tensor) -> None:
        """Report rows of the whole table; see `Marker`."""
        self._marker.mark(self._own(ids))


class KeyedSource:
    """Supplies the keyed tables of one model; see `tables.TableSource`.

    Args:
        tables: full name of each module -> its table.
    """

    name = "keyed"
    settings_step = mismatches.KEYED_SETTINGS

    def __init__(self, tables: Mapping[str, KeyedTable]) -> None:
        self.modules: Collection[str] = tuple(tables)
        self._tables = tuple(tables.values())
        self.tables: Sequence[Table] = self._tables
        self._has_warned = False

    def stores_buffer(self, module: nn.Module, name: str) -> bool:
        """Whether it stores a buffer of another module; never."""
        return False

    def optimizers(self, given: Sequence[Optimizer]) -> Sequence[Optimizer]:
        """Return the optimizers, all of which are torch's."""
        return given

    def track(self, markers: Mapping[str, Marker]) -> None:
        """Have each table report slots before it changes them; see `tables.TableSource.track`."""
        for table in self._tables:
            # Of several ranks with a copy each, the first stores the table.
            table.follow(markers.get(table.key))

    def untrack(self) -> None:
        """End that."""
        for table in self._tables:
            table.slots.marker = None

    def state_dict(self) -> dict[str, Any]:
        """Return clocks, counts and what admission remembers, by table name."""
        if not self._has_warned:
            self._warn_of_lookups_without_step()
        return {table.name: table.slots.state_dict() for table in self._tables}

    def _warn_of_lookups_without_step(self) -> None:
        """Warn once if a table was looked up since its last step: it may have been for later."""
        names = [t.name for t in self._tables if t.slots.looked_up_step == t.slots.steps]
        if names:
            self._has_warned = True
            _log.warning(
                "keyed tables %s were looked up in training after the last step of their optimizer "
                "and before this checkpoint. If a scaler skipped that step, all is well. If the "
                "lookups were for a batch that is trained later, a restart looks them up again, so "
                "their keys count twice: look keys up when their batch is trained",
                ", ".join(map(repr, names)),
            )

    def lacks_states(self, states: Sequence[Any]) -> bool:
        """Whether other ranks may have more; no, there are none."""
        return False

    def differences(self, states: Sequence[Mapping[str, Any]]) -> list[str]:
        """Return why training would not go on as it was: other rules of admission or eviction."""
        stored = states[0] if states and isinstance(states[0], Mapping) else {}
        texts = []
        for table in self._tables:
            if table.name not in stored:
                texts.append(f"the checkpoint has no keys of table {table.name!r}")
                continue
            faults = [*state_faults(stored[table.name])]
            texts += [f"of the keyed table {table.name!r}, {fault}" for fault in faults]
            if faults:
                continue
            settings, stored_settings = table.slots.state_dict()["settings"], stored[table.name]
            stored_settings = stored_settings["settings"]
            texts += [
                f"the keyed table {table.name!r} has {name} {settings.get(name)} here and "
                f"{stored_settings.get(name)} in the checkpoint"
                for name in sorted(settings.keys() | stored_settings.keys())
                if settings.get(name) != stored_settings.get(name)
            ]
        return texts

    def load_state_dicts(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Load what `state_dict` returned, and find the slot of each key anew."""
        for table in self._tables:
            with naming_table(table.name):
                if table.in_cache is not None:
                    table.in_cache.share_restored(table.slots.row_states)
                table.slots.load_state_dict(states[0][table.name])


def counts_by_table(tables: Iterable[Table]) -> dict[str, KeyCounts]:
    """Return what the keys of each keyed table did so far, by its name, in any thread."""
    return {
        table.name: table.slots.counts_now() for table in tables if isinstance(table, KeyedTable)
    }


def _refuse_elsewhere(model: nn.Module, name: str, table: KeyedTable) -> None:
    """Refuse a weight on another device, or in a second module.

    Raises:
        SettingsError: it is.
    """
    if not table.weight.is_cpu:
        raise _refused(table, f"a weight on {table.weight.device}", _WHY_ALONE)
    for other_name, other in model.named_modules():
        if other_name != name and any(
            parameter is table.weight for parameter in other._parameters.values()
        ):
            raise _refused(
                table,
                f"its weight in the module {other_name!r}, too",
                "a weight that only lookups of its module train",
            )


def _refused(table: KeyedTable, found: str, expected: str) -> SettingsError:
    return SettingsError(
        f"keyed table {table.name!r}",
        found=found,
        expected=expected,
        next_step="train it in one process, on the CPU, or use an nn.Embedding with ids of its own",
    )
