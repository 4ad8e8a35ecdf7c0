"""Gives slots of a table to keys that training looks up, and takes them from keys that leave."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import Parameter
from torch.optim import Optimizer

from recpoint.catalog.restore.keyed_rows import KEY, LAST_USE, USES, used_rows
from recpoint.embeddings.home.initial import Initial
from recpoint.embeddings.keyed.admission import Admission
from recpoint.embeddings.keyed.eviction import Eviction, sorted_slots
from recpoint.embeddings.keyed.expiry import Expiry
from recpoint.embeddings.keyed.open_lookups import OpenLookups
from recpoint.embeddings.keyed.slot_values import SlotValues
from recpoint.embeddings.tables.keyed import KeyCounts
from recpoint.embeddings.tables.tables import Marker
from recpoint.errors import SettingsError
from recpoint.kernels.key_map import KeyMap
from recpoint.kernels.key_order import KeyOrder

__all__ = ["KeySlots"]


class KeySlots:
    """The slots of one table, their keys, and what decides which keys have slots.

    All of it follows from the row states, the gate and the number of steps; the map of keys is
    built from these. Slots are 1 to `capacity_rows`; 0 stands for a key without one.

    One thread trains. Others may look keys up meanwhile, and wait while it gives slots to keys.

    Args:
        weight: [capacity_rows + 1, dim].
        initial: computes the first values of a key's row.
        admission: says which keys get slots.
        eviction: says which rows leave first.
        sparse: whether lookups give sparse gradients.
        name: the name that `initial` gets.

    Attributes:
        rows: values and optimizer state of the slots.
        open_lookups: those of training whose backward pass may still come.
        row_states: name -> int64 [capacity_rows + 1], on the CPU; see `keyed_rows.py`. The same
            tensors until `grow`. A restore writes into them and then calls `load_state_dict`.
        marker: told of slots before anything of them changes; None: nobody asks for it.
        steps: steps of the table's optimizer so far: the clock by which rows leave.
        looked_up_step: `steps` at the last lookup in training; -1: none since the start.
        inserted: keys that have got a slot so far, each time that they did.
        evicted: keys that have lost their slot so far, because it was needed or too old.
        refused: keys that were looked up and not admitted so far, once for each lookup.
    """

    def __init__(
        self,
        weight: Parameter,
        *,
        initial: Initial,
        admission: Admission,
        eviction: Eviction,
        sparse: bool,
        name: str,
    ) -> None:
        self.rows = SlotValues(weight, initial, name=name, sparse=sparse)
        self.open_lookups = OpenLookups()
        self.marker: Marker | None = None
        self.steps = self.inserted = self.evicted = self.refused = 0
        self.looked_up_step = -1
        self._eviction = eviction
        self._settings = {"admit": admission.settings(), "evict": eviction.settings()}
        ttl_batches = eviction.ttl_batches
        self._expiry = None if ttl_batches is None else Expiry(ttl_batches)
        capacity_rows = weight.shape[0] - 1
        self._gate = admission.gate(capacity_rows)
        entries = {KEY: 0, LAST_USE: -1, **({USES: 0} if USES in eviction.states else {})}
        self.row_states = {
            state: torch.full((capacity_rows + 1,), entry, dtype=torch.int64, device="cpu")
            for state, entry in entries.items()
        }
        self._map = KeyMap(self.row_states[KEY])
        self._order = self._new_order()
        #: A call changes keys, row states or what follows from them, or was interrupted then.
        self._is_changing = False
        #: Held while keys change, or are found. A handler of the same thread may take it again.
        self._lock = threading.RLock()

    def __getstate__(self) -> dict[str, Any]:
        # The marker belongs to the tables of the model that this is a copy of.
        state = {**self.__dict__, "marker": None, "_is_changing": True}
        del state["_map"], state["_order"]  # `_settle` makes them
        del state["_lock"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.RLock()

    @property
    def capacity_rows(self) -> int:
        """Number of slots."""
        return len(self.row_states[KEY]) - 1

    @property
    def rows_used(self) -> int:
        """Number of keys that have a slot."""
        with self._lock:
            self._settle()
            return len(self._map)

    def counts_now(self) -> KeyCounts:
        """Return what the keys did so far, in any thread; a change may be half counted."""
        # Of a copy of the model, the map is made at its first use.
        keys = getattr(self, "_map", ())
        return KeyCounts(len(keys), self.inserted, self.evicted, self.refused)

    def keys(self) -> Tensor:
        """Return the keys that have slots, ascending: int64 [rows_used]."""
        with self._lock:
            slots = used_rows(self.row_states[LAST_USE])
            return self.row_states[KEY][slots].sort().values

    def find(self, keys: Tensor) -> Tensor:
        """Return the slot of each key, int64 [n], or 0: int64 [n]. Changes nothing."""
        with self._lock:
            self._settle()
            return self._map.find(keys.contiguous())

    def coming(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Return what a lookup of training would find now. Changes nothing.

        Args:
            keys: int64 [n]; keys may come several times.

        Returns:
            The slot of each key, or 0: int64 [n]; and the keys that would get one: int64 [m], all
            different.
        """
        with self._lock:
            self._settle()
            slots, missing_keys = self._map.find_or_list(keys.contiguous())
            return slots, self._gate.admitted(missing_keys, self.steps)

    def take(self, keys: Tensor) -> Tensor:
        """Return the slot of each key that training looks up, or 0 for keys without a slot.

        Keys without one get one if they are admitted. If too few slots are free, rows leave that no
        lookup has used since the last optimizer step.

        Args:
            keys: int64 [n]; keys may come several times.

        Returns:
            int64 [n].

        Raises:
            SettingsError: the table has too few rows for the keys between two optimizer steps.
                Nothing has changed, but rows whose time to live is over are gone.
        """
        with self._lock:
            return self._take(keys.contiguous())

    def _take(self, keys: Tensor) -> Tensor:
        self._settle()
        self.looked_up_step = self.steps
        if self._expiry is not None:
            self._is_changing = True
            self._evict(self._expiry.expired(self.row_states[LAST_USE], self.steps))
            self._is_changing = False
        slots, missing_keys = self._map.find_or_list(keys)
        if missing_keys.numel():
            self._give_slots(keys, slots, missing_keys)
        else:
            self._mark(slots)
            self._order.use(slots, self.steps)
        return slots

    def delete(self, keys: Tensor) -> None:
        """Take the slots from keys, int64 [n], as if they had never had one; others are ignored."""
        with self._lock:
            slots = self.find(keys)
            slots = torch.unique(slots[slots > 0])
            self.open_lookups.leave(slots)
            self._empty(slots)

    def begin_states(self, optimizers: Sequence[Optimizer]) -> None:
        """Begin the entries of slots that changed hands in the states of optimizers.

        A step does so itself; before a cut it makes the states right that are stored.

        Args:
            optimizers: those of the model; some may not train the table.
        """
        self.rows.begin_states(optimizers)

    def refuse_optimizer(self, optimizer: Optimizer, group: Mapping[str, Any]) -> None:
        """Refuse an optimizer that cannot train the table; see `SlotValues.refuse`."""
        self.rows.refuse(optimizer, group)

    def leaving_order(self, row_states: Mapping[str, Tensor]) -> Tensor:
        """Return the slots that have keys in the order in which they would leave.

        Args:
            row_states: as the attribute; of this table, or of another with the same eviction.
        """
        slots = used_rows(row_states[LAST_USE])
        return sorted_slots(slots, row_states, self._eviction)

    def larger_states(self, capacity_rows: int) -> dict[str, Tensor]:
        """Return the row states with room for more keys, for `grow`.

        Args:
            capacity_rows: at least as many as the table has.
        """
        self._settle()
        states = {}
        for name, state in self.row_states.items():
            free_entry = -1 if name == LAST_USE else 0
            states[name] = state.new_full((capacity_rows + 1,), free_entry)
            states[name][: state.numel()] = state
        return states

    def grow(self, row_states: dict[str, Tensor]) -> None:
        """Take over row states of `larger_states`, for a weight with as many rows more.

        An error leaves the table as it was.
        """
        with self._lock:
            self._map.grow(row_states[KEY])
            self.row_states = row_states
            self._order = self._new_order()

    def state_dict(self) -> dict[str, Any]:
        """Return the live state beside the row states; "settings" must be equal after a restore."""
        self._settle()
        return {
            "settings": self._settings,
            "steps": self.steps,
            "inserted": self.inserted,
            "evicted": self.evicted,
            "refused": self.refused,
            "admission": self._gate.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned, after values and row states were written.

        Raises:
            SettingsError: see `refuse_settings`.
        """
        self.refuse_settings(state)
        self.steps, self.inserted = int(state["steps"]), int(state["inserted"])
        self.evicted, self.refused = int(state["evicted"]), int(state["refused"])
        self.looked_up_step = -1
        self._gate.load_state_dict(state["admission"])
        self.rows.drop_pending()
        self.rows.follow_weight()
        self.open_lookups.leave(torch.arange(1, self.capacity_rows + 1))
        with self._lock:
            self._rebuild()

    def refuse_settings(self, state: Mapping[str, Any]) -> None:
        """Refuse what `state_dict` returned of a table with other rules.

        Raises:
            SettingsError: the rules differ.
        """
        if state["settings"] != self._settings:
            raise SettingsError(
                self.rows.subject,
                found=f"stored rules {state['settings']!r:.300}",
                expected=f"the rules that the table has: {self._settings!r:.300}",
                next_step="build the table with the stored rules",
            )

    def _give_slots(self, keys: Tensor, slots: Tensor, missing_keys: Tensor) -> None:
        """Give slots to the admitted keys that have none, and use the slots of all.

        Args:
            keys: int64 [n].
            slots: int64 [n], the slots of the keys, or 0; those of new keys are written into it.
            missing_keys: int64 [m], the keys without a slot, ascending, each once.
        """
        new_keys = self._gate.admitted(missing_keys, self.steps)
        count = new_keys.numel()
        values = self.rows.first_values(new_keys) if count else None
        self._mark(slots)
        leaving = self._use(slots, count)
        self._gate.count(missing_keys)
        self.refused += missing_keys.numel() - count
        if values is not None:
            self._replace(leaving, new_keys, values)
            self._map.find_missing(keys, slots)

    def _use(self, slots: Tensor, new_count: int) -> Tensor:
        """Use the slots of a lookup, and return those whose rows leave for its new keys.

        Rows that were used since the last optimizer step stay, so an open backward pass finds them.

        Args:
            slots: int64 [n], of the keys that have slots; 0 for others.
            new_count: how many keys need a slot.

        Raises:
            SettingsError: too few rows may leave. Nothing has changed.
        """
        count = new_count - (self.capacity_rows - len(self._map))
        if count <= 0:
            self._order.use(slots, self.steps)
            return slots[:0]
        self._is_changing = True
        self._order.use(slots, self.steps)
        leaving = self._order.least(count, before=self.steps)
        if leaving.numel() < count:
            self._order.undo_use()
        self._is_changing = False
        if leaving.numel() < count:
            raise self._too_many(new_count, new_count - count + leaving.numel())
        return leaving

    def _replace(self, leaving: Tensor, new_keys: Tensor, values: Tensor) -> None:
        """Give new keys the slots that leave, and the lowest free ones, in the order of slots."""
        slots = self._map.choose_slots(new_keys.numel(), leaving)
        if leaving.numel():
            self.open_lookups.leave(leaving, since=self.steps)
        self._begin_change(slots)
        if leaving.numel():
            self._map.remove(self.row_states[KEY].index_select(0, leaving))
            self.rows.drop_gradients(leaving)
        self.rows.put(slots, values)
        self._map.insert(new_keys, slots)
        self._order.use(slots, self.steps)
        self._order.join(slots)
        self.inserted += new_keys.numel()
        self.evicted += leaving.numel()
        self._end_change()

    def _evict(self, slots: Tensor) -> None:
        self.open_lookups.leave(slots, since=self.steps)
        self._empty(slots)
        self.evicted += slots.numel()

    def _empty(self, slots: Tensor) -> None:
        """Take the keys from slots, int64 [n], all different, each with a key."""
        if not slots.numel():
            return
        self._begin_change(slots)
        self._map.remove(self.row_states[KEY][slots])
        self.rows.drop_gradients(slots)
        self.rows.empty(slots)
        self._end_change()

    def _begin_change(self, slots: Tensor) -> None:
        """Make slots free in the row states, as the first of several writes.

        A handler may raise between two writes. The slots are free then, and `_settle` does what is
        left to do.
        """
        self._mark(slots)
        self._is_changing = True
        self.rows.will_begin(slots)
        self.row_states[LAST_USE].index_fill_(0, slots, -1)
        if USES in self.row_states:
            self.row_states[USES].index_fill_(0, slots, 0)

    def _end_change(self) -> None:
        self._is_changing = False
        self.rows.begin_states()

    def _settle(self) -> None:
        """Undo what a call has left half done when it was interrupted."""
        if self._is_changing:
            with self._lock:  # of a thread that is about to have done it
                if self._is_changing:
                    self._rebuild()

    def _rebuild(self) -> None:
        """Build from the row states what follows from them."""
        slot_keys, last_use = self.row_states[KEY], self.row_states[LAST_USE]
        used_slots = used_rows(last_use)
        keys = slot_keys[used_slots]
        slot_keys.masked_fill_(last_use < 0, 0)  # not those of others: this may be interrupted
        self._map = KeyMap(slot_keys)
        self._map.insert(keys, used_slots)
        self._order = self._new_order()
        pending_slots = self.rows.pending_slots
        self.rows.empty(pending_slots[last_use[pending_slots] < 0])
        if self._expiry is not None:
            self._expiry.forget()
        self._is_changing = False

    def _new_order(self) -> KeyOrder:
        states = self.row_states
        return KeyOrder(states[KEY], states[LAST_USE], states.get(USES))

    def _mark(self, slots: Tensor) -> None:
        if self.marker is not None:
            self.marker.looked_up(slots)

    def _too_many(self, needed: int, available: int) -> SettingsError:
        return SettingsError(
            self.rows.subject,
            found=f"{needed} new keys in one lookup, and {available} rows that they can get: "
            f"lookups since the last optimizer step use the others of {self.capacity_rows}",
            expected="room for all keys between two optimizer steps",
            next_step="build the table with more capacity_rows, make batches smaller, or call the "
            "optimizer's step more often",
        )
