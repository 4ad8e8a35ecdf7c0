"""The values of a table's slots, their gradients, and their entries in an optimizer's state."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import Parameter
from torch.optim import SGD, Adafactor, Optimizer

from recpoint.embeddings.home.initial import Initial, first_values
from recpoint.embeddings.keyed.loaded_states import LoadedStates
from recpoint.embeddings.keyed.slot_memory import PlainMemory, SlotMemory
from recpoint.embeddings.tables.lookups import changes_of
from recpoint.embeddings.tables.new_rows import first_entry
from recpoint.embeddings.tables.optimizers import Watched, is_positive, row_states
from recpoint.errors import SettingsError

__all__ = ["SlotValues"]


class SlotValues:
    """Begins rows of keys that get slots, and empties those of keys that leave.

    Args:
        weight: [slots + 1, dim].
        initial: computes the first values of a key's row.
        name: the name that `initial` gets.
        sparse: whether lookups give sparse gradients.

    Attributes:
        memory: has the rows of the slots.
        initial, name, sparse: as given.
    """

    def __init__(self, weight: Parameter, initial: Initial, *, name: str, sparse: bool) -> None:
        self.memory: SlotMemory = PlainMemory(weight)
        self.sparse = sparse
        self.initial = initial
        self.name = name
        self._trained_by: weakref.ref[Optimizer] | None = None
        self._watched: Watched | None = None
        #: Slots whose entries in the optimizer's state are still those of another key, or of none.
        self._pending: list[Tensor] = []
        self._is_copy = False
        self.loaded = LoadedStates()
        self.follow_weight()

    def __getstate__(self) -> dict[str, Any]:
        # A copy of the model has no optimizer yet.
        return {**self.__dict__, "_trained_by": None, "_watched": None, "_is_copy": True}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.follow_weight()

    @property
    def weight(self) -> Parameter:
        """The module's parameter; the module sets it if torch has put another in its place."""
        return self.memory.weight

    @weight.setter
    def weight(self, weight: Parameter) -> None:
        self.memory.weight = weight

    def follow_weight(self) -> None:
        """Take note that the weight is right as it is, after a step or a restore."""
        self._changes = changes_of(self.weight)

    def refuse_written(self) -> None:
        """Refuse rows that something other than lookups, steps and restores has written.

        Raises:
            SettingsError: the weight of a copy of the model was written, as averages of weights
                are: its slots may have other keys. Or row 0 was, as rules of `nn.init` do.
        """
        if changes_of(self.weight) == self._changes:
            return
        if self._is_copy:
            raise SettingsError(
                self.subject,
                found="a weight in a copy of the model that was written in place, as "
                "torch.optim.swa_utils.AveragedModel does, while its slots keep their keys",
                expected="rows that belong to the keys of the copy",
                next_step="average the dense layers alone, and load this table with "
                "load_state_dict()",
            )
        self.refuse_row_0()
        self.follow_weight()

    def refuse_row_0(self) -> None:
        """Refuse a weight whose row 0 is not that of keys without a row.

        Raises:
            SettingsError: it has other values than zero.
        """
        if not self.weight.is_meta and bool(self.weight.detach()[self.memory.zero_row].any()):
            raise SettingsError(
                self.subject,
                found="a row 0 that was written, as nn.init does",
                expected="zeros there, which keys without a row look up",
                next_step="give the table initial=, and leave its weight out of nn.init",
            )

    @property
    def subject(self) -> str:
        """The table, as messages name it."""
        return f"keyed table {self.name!r}" if self.name else "a keyed table"

    @property
    def is_trained(self) -> bool:
        """Whether an optimizer that still exists has trained the table."""
        return self._trained_by is not None and self._trained_by() is not None

    @property
    def pending_slots(self) -> Tensor:
        """Slots with pending entries, int64 [n]; they may come several times."""
        return torch.cat([torch.empty(0, dtype=torch.int64, device="cpu"), *self._pending])

    def first_values(self, keys: Tensor) -> Tensor:
        """Return the first values of the rows of keys, int64 [n]: [n, dim], of the weight's dtype.

        Raises:
            SettingsError: `initial` returns no tensor, or another shape.
        """
        return first_values(
            self.initial,
            self.name,
            keys,
            dim=self.weight.shape[1],
            dtype=self.weight.dtype,
            padding_row=None,
        )

    def will_begin(self, slots: Tensor) -> None:
        """Take note that slots are about to be emptied, or to get a key: int64 [n]."""
        self._pending.append(slots)

    def put(self, slots: Tensor, values: Tensor) -> None:
        """Write the values of rows: [n, dim] for slots, int64 [n]."""
        self.memory.put(slots, values)

    def empty(self, slots: Tensor) -> None:
        """Write zeros into slots, int64 [n]; a slot may come several times."""
        self.memory.empty(slots)

    def drop_gradients(self, slots: Tensor) -> None:
        """Take the rows of slots, int64 [n], out of a gradient; see `SlotMemory`."""
        self.memory.drop_gradients(slots)

    def train_with(self, optimizer: Optimizer, group: Mapping[str, Any]) -> None:
        """Take note of the optimizer that is about to train the table, and begin pending entries.

        Raises:
            SettingsError: another optimizer trains the table, too; or see `refuse`.
        """
        if self._trained_by is None or self._trained_by() is not optimizer:
            self._refuse_second(optimizer)
            self._trained_by, self._watched = weakref.ref(optimizer), None
            self.loaded.follow(optimizer)
        if self._watched is None or self._watched.differ(group):
            self.refuse(optimizer, group)
            self._watched = Watched(group)
        if self.loaded.has_other_keys and self._entries(optimizer, group):
            raise self.loaded.refusal(self.subject)
        self.begin_states([optimizer])

    def begin_states(self, optimizers: Sequence[Optimizer] | None = None) -> None:
        """Give slots with pending entries the entries that an optimizer begins with.

        Args:
            optimizers: those that may train the table. None: the one that did last.

        Raises:
            SettingsError: how a row state begins is not known.
        """
        if not self._pending:
            return
        if optimizers is None:
            optimizer = None if self._trained_by is None else self._trained_by()
            optimizers = [] if optimizer is None else [optimizer]
        pending = self._pending
        slots = pending[0] if len(pending) == 1 else torch.cat(pending)
        holders = list(self._holders(optimizers))
        for optimizer, group in holders:
            for state, value in self._entries(optimizer, group):
                self.memory.begin_entry(slots, state, value)
        if holders:
            pending.clear()

    def _entries(
        self, optimizer: Optimizer, group: Mapping[str, Any]
    ) -> list[tuple[Tensor, float]]:
        """Return the memory of each row state of the weight, and its entry of a new row.

        Raises:
            SettingsError: how a row state begins is not known.
        """
        entries = []
        weight = self.weight
        states = row_states(optimizer.state.get(weight, {}), weight.shape[0])
        for name, state in states.items():
            value = first_entry(optimizer, group, name)
            if value is None:
                raise self._refused(
                    f"the row state {name!r} of {type(optimizer).__name__}, and how it begins "
                    "for a new row is not known"
                )
            entries.append((state.data, value))
        return entries

    def drop_pending(self) -> None:
        """Take note that the optimizer's state was replaced by that of the keys in the table."""
        self._pending.clear()

    def refuse(self, optimizer: Optimizer, group: Mapping[str, Any]) -> None:
        """Refuse an optimizer that cannot train rows which belong to other keys later.

        Args:
            optimizer: the optimizer.
            group: its parameter group that has the weight.

        Raises:
            SettingsError: it keeps state of rows that cannot be begun anew for another key; it
                computes a row from others; or its step would make rows without a gradient NaN.
        """
        kind = type(optimizer)
        if kind is Adafactor or first_entry(optimizer, group, "sum") is None:
            raise self._refused(f"{kind.__name__}, of which this is not known")
        if kind is SGD and self.sparse and group.get("momentum", 0) != 0:
            raise self._refused(
                "SGD with momentum and sparse gradients, whose momentum keeps each row it ever had"
            )
        # A row whose gradient and states are zero gets 0 / (sqrt(0) + eps).
        if not self.sparse and "eps" in group and not is_positive(group["eps"], self.weight.dtype):
            raise SettingsError(
                self.subject,
                found=f"{kind.__name__} with eps={group['eps']}, which is zero in "
                f"{self.weight.dtype}, so that rows without a gradient become NaN",
                expected="an eps above zero in the dtype of the table",
                next_step="use a larger eps, or sparse=True",
            )

    def _refuse_second(self, optimizer: Optimizer) -> None:
        other = self._other_holder(optimizer)
        if other is None:
            return
        del other
        gc.collect()  # an optimizer that a script has dropped may be in a cycle
        other = self._other_holder(optimizer)
        if other is not None:
            raise SettingsError(
                self.subject,
                found=f"a step of {type(optimizer).__name__}, and a {type(other).__name__} that "
                "has trained the table and still has its weight",
                expected="one optimizer that trains the table, because its steps are the clock by "
                "which rows leave",
                next_step="give the weight to one optimizer, or delete the other",
            )

    def _other_holder(self, optimizer: Optimizer) -> Optimizer | None:
        other = None if self._trained_by is None else self._trained_by()
        is_holder = other is not None and other is not optimizer and any(self._holders([other]))
        return other if is_holder else None

    def _holders(
        self, optimizers: Sequence[Optimizer]
    ) -> Iterator[tuple[Optimizer, Mapping[str, Any]]]:
        """Yield each optimizer that has the weight, with its group."""
        weight = self.weight
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                if any(parameter is weight for parameter in group["params"]):
                    yield optimizer, group

    def _refused(self, found: str) -> SettingsError:
        return SettingsError(
            self.subject,
            found=found,
            expected="an optimizer of torch that keeps its state by row, and is known to begin the "
            "state of a row with a number",
            next_step="train the table with SGD, Adagrad, SparseAdam, Adam, AdamW, Adamax, NAdam, "
            "RAdam, RMSprop or Adadelta of torch, or TorchRec's RowWiseAdagrad",
        )
