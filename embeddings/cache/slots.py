"""The slots of one cached table: rows and their optimizer state, in plain tensors.

A slot holds one row of the table. Row states are the tensors that the optimizer keeps for the
weight, which has a row for each slot. Rows enter and leave as *records*: the bytes of the weight's
row, then those of each row state.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.parameter import Parameter

from recpoint.errors import SettingsError

__all__ = ["Field", "RecordLayout", "TableSlots", "as_bytes"]


class Field(NamedTuple):
    """One array of a record.

    Attributes:
        name: name of the row state; "" for the weight.
        dtype: dtype of the array.
        shape: shape of a row's entry.
        first: its first byte in the record.
        size_bytes: its number of bytes.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    first: int
    size_bytes: int


class RecordLayout(NamedTuple):
    """Where the arrays of a row lie in its record.

    Attributes:
        fields: the weight's row first, then the row states in the optimizer's order.
        size_bytes: bytes of a record.
    """

    fields: tuple[Field, ...]
    size_bytes: int

    @classmethod
    def of(cls, arrays: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> RecordLayout:
        """Lay out arrays: name -> dtype and shape of a row's entry; "" is the weight."""
        fields, end = [], 0
        for name, (dtype, shape) in arrays.items():
            size = dtype.itemsize * int(torch.Size(shape).numel())
            fields.append(Field(name, dtype, shape, end, size))
            end += size
        return cls(tuple(fields), end)

    def array(self, records: Tensor, field: Field) -> Tensor:
        """Return an array of records, copied: [n, *shape] from uint8 [n, size_bytes]."""
        # One record's part is contiguous as it is: `contiguous` would not copy it.
        part = records[:, field.first : field.first + field.size_bytes].clone(
            memory_format=torch.contiguous_format
        )
        return part.view(field.dtype).reshape(len(records), *field.shape)

    def put(self, records: Tensor, field: Field, values: Tensor) -> None:
        """Write an array [n, *shape] into records, uint8 [n, size_bytes]."""
        records[:, field.first : field.first + field.size_bytes] = as_bytes(values)


def as_bytes(array: Tensor) -> Tensor:
    """Return a contiguous array [n, …] as uint8 [n, bytes of an entry], in the same memory."""
    # Not -1: of no entries, torch would not know how many values each has.
    return array.reshape(len(array), math.prod(array.shape[1:])).view(torch.uint8)


class TableSlots:
    """The slots of one table.

    Two threads use them. The training thread trains rows and looks them up; the home thread brings
    rows and takes them away. They never touch the same slot at the same time: the oracle gives a
    slot to another row only after the batches that train its row.

    Args:
        name: name of the table.
        rows: rows of the table.
        capacity: number of slots.
        dim: values in a row.
        dtype: dtype of the weight.
        device: device of the slots.
        trained: whether the weight requires gradients.
        padding_row: the row that lookups skip; None: there is none.

    Attributes:
        weight: the module's parameter, [capacity + 2, dim]. Its last two rows belong to no slot:
            `blank` is never looked up, so its row states stay as the optimizer makes them for a
            new row; `padding` is the padding row.
        states: name -> the row states of the weight, [capacity + 2, …], as the optimizer has them.
        ids: int64 [capacity + 2], on the CPU: row of each slot, as of the home thread; -1: none.
        ready: bool [capacity + 2], on the CPU: the row of the slot has arrived.
        changed: bool [capacity + 2], on the CPU: the row differs from its home's.
        borrowed: int64 [capacity + 2], on the CPU: row of another trainer that the slot has; -1:
            none. None: there are no other trainers.
        layout: layout of records; None: the row states are not known yet.
    """

    def __init__(
        self,
        name: str,
        *,
        rows: int,
        capacity: int,
        dim: int,
        dtype: torch.dtype,
        device: torch.device,
        trained: bool,
        padding_row: int | None = None,
    ) -> None:
        self.name = name
        self.rows = rows
        self.capacity = capacity
        self.padding_row = padding_row
        # Zeroed: an optimizer with dense gradients reads every slot, so that NaN must not be there.
        self.weight = Parameter(
            torch.zeros(capacity + 2, dim, dtype=dtype, device=device), requires_grad=trained
        )
        self._memory = self.weight.detach()
        self.states: dict[str, Tensor] = {}
        self.ids = torch.full((capacity + 2,), -1, dtype=torch.int64, device="cpu")
        self.ready = torch.zeros(capacity + 2, dtype=torch.bool, device="cpu")
        self.changed = torch.zeros(capacity + 2, dtype=torch.bool, device="cpu")
        self.borrowed: Tensor | None = None
        self.layout: RecordLayout | None = None

    @property
    def blank(self) -> int:
        """The slot that is never looked up."""
        return self.capacity

    @property
    def padding(self) -> int:
        """The slot of the padding row."""
        return self.capacity + 1

    @property
    def dim(self) -> int:
        """Values in a row."""
        return self.weight.shape[1]

    @property
    def size_bytes(self) -> int:
        """Bytes of rows, row states and the lists beside them."""
        arrays = (self.weight, *self.states.values(), self.ids, self.ready, self.changed)
        return sum(array.nbytes for array in arrays)

    def follow_states(self, states: Mapping[str, Tensor]) -> None:
        """Take the row states that the optimizer has now.

        Raises:
            SettingsError: the table's records have been laid out, and the states are others.
        """
        self.states = dict(states)
        if self.layout is not None:
            present_layout = self._present_layout()
            if present_layout != self.layout:
                raise SettingsError(
                    f"cached table {self.name!r}",
                    found=f"an optimizer with the row states {_brief(present_layout)}",
                    expected=f"{_brief(self.layout)}, as the rows at home have them",
                    next_step="train the table with one optimizer; to change it, take a "
                    "checkpoint, and restore it into a model that is cached anew",
                )

    def fix_layout(self) -> RecordLayout:
        """Lay out records by the row states of now; they cannot become others afterwards."""
        if self.layout is None:
            self.layout = self._present_layout()
        return self.layout

    def _present_layout(self) -> RecordLayout:
        arrays = {"": self.weight, **self.states}
        return RecordLayout.of({n: (a.dtype, tuple(a.shape[1:])) for n, a in arrays.items()})

    def begin_anew(self) -> None:
        """Take all rows out of the slots; row states may become others."""
        self.ids.fill_(-1)
        self.ready.zero_()
        self.changed.zero_()
        self.layout = None

    def refuse_other(self, weight: Tensor) -> None:
        """Refuse a weight that is not the one of these slots, or has other memory by now.

        Raises:
            SettingsError: the model was converted or moved, or has another weight.
        """
        memory = self._memory
        if (
            weight is self.weight
            and weight.dtype is memory.dtype
            and weight.device == memory.device
            and weight.is_set_to(memory)
        ):
            return
        raise SettingsError(
            f"cached table {self.name!r}",
            found=f"a weight of {weight.dtype} on {weight.device} that was converted, moved or "
            "replaced after cached()",
            expected=f"the slots that cached() has made, {memory.dtype} on {memory.device}",
            next_step="call model.to(...), model.half() and their like before cached(); "
            "cached(device=...) says where the slots of tables on the meta device are",
        )

    def arrays(self) -> tuple[tuple[str, Tensor], ...]:
        """Return name and values of the weight (named "") and of each row state.

        Writing to them is no change that torch counts: autograd has to find the weight unchanged
        while other rows arrive between forward and backward.

        Raises:
            SettingsError: the weight has other memory; see `refuse_other`.
        """
        self.refuse_other(self.weight)
        return ("", self.weight.data), *((n, state.data) for n, state in self.states.items())

    def in_range(self, ids: Tensor | None) -> Tensor:
        """Return the ids that name rows of the table, without the padding row.

        Args:
            ids: int32 or int64 [n], on the CPU; None: none.
        """
        if ids is None or not ids.numel():
            return torch.empty(0, dtype=torch.int64, device="cpu")
        low, high = torch.aminmax(ids)
        if int(low) < 0 or int(high) >= self.rows:
            ids = ids[(ids >= 0) & (ids < self.rows)]
        if self.padding_row is not None:
            ids = ids[ids != self.padding_row]
        return ids

    def by_ids(self, gradient: Tensor) -> Tensor:
        """Return a sparse gradient of the slots as one of the table: entries by the rows' ids."""
        slots = gradient._indices()[0]
        ids = self.ids.to(slots.device)[slots]
        if self.borrowed is not None:
            borrowed = self.borrowed.to(slots.device)[slots]
            ids = torch.where(borrowed >= 0, borrowed, ids)
        if self.padding_row is not None:
            ids[slots == self.padding] = self.padding_row
        return torch.sparse_coo_tensor(
            ids[None],
            gradient._values(),
            (self.rows, *gradient.shape[1:]),
            check_invariants=False,
        )

    def records(self, slots: Tensor) -> Tensor:
        """Return the records of slots: uint8 [n, layout.size_bytes], on the CPU.

        Args:
            slots: int64 [n], on the CPU.
        """
        layout = self.fix_layout()
        out = torch.empty(len(slots), layout.size_bytes, dtype=torch.uint8, device="cpu")
        chosen_slots = slots.to(self.weight.device)
        for field, (_, array) in zip(layout.fields, self.arrays(), strict=True):
            layout.put(out, field, array.index_select(0, chosen_slots).cpu())
        return out

    def put(self, slots: Tensor, records: Tensor) -> None:
        """Write records (as `records` returns them) into slots."""
        layout = self.fix_layout()
        chosen_slots = slots.to(self.weight.device)
        for field, (_, array) in zip(layout.fields, self.arrays(), strict=True):
            array.index_copy_(0, chosen_slots, layout.array(records, field).to(array.device))

    def enter(self, ids: Tensor, slots: Tensor) -> None:
        """Take note that rows, int64 [n], are in slots, int64 [n], from now on."""
        self.ids[slots] = ids
        self.changed[slots] = False
        self.ready[slots] = True

    def put_new(self, slots: Tensor, values: Tensor) -> None:
        """Write rows that were never trained: their values [n, dim], and new row states."""
        chosen_slots = slots.to(self.weight.device)
        (_, weight), *states = self.arrays()
        weight.index_copy_(0, chosen_slots, values.to(weight.device))
        for _, state in states:
            state.index_copy_(
                0, chosen_slots, state[self.blank].clone().expand(len(slots), *state.shape[1:])
            )

    def new_records(self, values: Tensor) -> Tensor:
        """Return the records of rows that were never trained, from their values [n, dim]."""
        layout = self.fix_layout()
        blank = torch.tensor([self.blank], dtype=torch.int64, device="cpu")
        out = self.records(blank).expand(len(values), layout.size_bytes).contiguous()
        layout.put(out, layout.fields[0], values.to(self.weight.dtype))
        return out


def _brief(layout: RecordLayout) -> str:
    named = {field.name: (str(field.dtype), field.shape) for field in layout.fields if field.name}
    return f"{named!r:.300}"
