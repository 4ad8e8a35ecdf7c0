"""What modules that are looked up by keys have in common: a weight of slots, and their keys."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Final, Never, Self, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import Parameter

from recpoint.catalog.restore.keyed_rows import KEY
from recpoint.embeddings.home.initial import Initial, Uniform
from recpoint.embeddings.keyed.admission import Admission, EachKey
from recpoint.embeddings.keyed.all_ranks import keys_of_all_ranks
from recpoint.embeddings.keyed.callers import (
    refuse_caller,
    refuse_no_memory,
    refuse_recording,
)
from recpoint.embeddings.keyed.eviction import Eviction, LeastRecent
from recpoint.embeddings.keyed.key_slots import KeySlots
from recpoint.embeddings.keyed.loaded_states import refuse_half_state
from recpoint.embeddings.keyed.slot_memory import LookupRows
from recpoint.embeddings.keyed.steps import follow_optimizers, has_other_slots
from recpoint.embeddings.tables.keyed import KeyCounts
from recpoint.embeddings.tables.lookups import refuse_capture
from recpoint.embeddings.tables.tables import TABLE_DTYPES
from recpoint.errors import ScriptingRefused, SettingsError

__all__ = ["KeyedModule"]

_FIRST_VALUES: Final = Uniform()

#: `KeyedModule._rows_outside_graphs`, which a compiled model calls between two graphs.
_outside_graphs: list[Callable[[Any, Tensor], LookupRows]] = []


class KeyedModule(nn.Module):
    """A module with a weight of slots, and the keys that have them.

    `KeyedEmbedding` describes the settings.
    """

    weight: Parameter

    def __init__(
        self,
        dim: int,
        capacity_rows: int,
        *,
        initial: Initial = _FIRST_VALUES,
        admit: Admission | None = None,
        evict: Eviction | None = None,
        sparse: bool = False,
        name: str = "",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        subject = f"{type(self).__name__}({name!r})" if name else type(self).__name__
        for setting, value in (("dim", dim), ("capacity_rows", capacity_rows)):
            if type(value) is not int or value < 1:
                raise SettingsError(
                    f"{subject}: {setting}",
                    found=f"{value!r:.200}",
                    expected="a whole number of at least 1",
                    next_step="give another number",
                )
        weight = torch.zeros(capacity_rows + 1, dim, device=device, dtype=dtype)
        if weight.dtype not in TABLE_DTYPES:
            raise SettingsError(
                subject,
                found=f"a weight of {weight.dtype}",
                expected=f"one of {', '.join(map(str, TABLE_DTYPES))}",
                next_step="pass dtype=",
            )
        self.weight = Parameter(weight)
        self.slots = KeySlots(
            self.weight,
            initial=initial,
            admission=EachKey() if admit is None else admit,
            eviction=LeastRecent() if evict is None else evict,
            sparse=sparse,
            name=name,
        )
        self._begin()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]  # torch's
        self._begin()

    def _begin(self) -> None:
        follow_optimizers(self.slots)
        if not _outside_graphs:
            _outside_graphs.append(torch.compiler.disable(KeyedModule._rows_outside_graphs))

    def __prepare_scriptable__(self) -> Never:  # torch.jit.script calls it
        raise ScriptingRefused(
            self.slots.rows.subject,
            found="torch.jit.script, which cannot compile the lookup of keys",
            expected="a module that Python calls",
            next_step="script a model that has to_table(vocabulary) in its place",
        )

    @property
    def dim(self) -> int:
        """Number of values in a row."""
        return self.weight.shape[1]

    @property
    def capacity_rows(self) -> int:
        """Number of keys that can have rows at the same time."""
        return self.slots.capacity_rows

    @property
    def sparse(self) -> bool:
        """Whether lookups give sparse gradients."""
        return self.slots.rows.sparse

    @property
    def rows_used(self) -> int:
        """Number of keys that have a row."""
        return self.slots.rows_used

    @property
    def counts(self) -> KeyCounts:
        """What has become of the keys that training looked up, since the table was first built."""
        slots = self.slots
        return KeyCounts(slots.rows_used, slots.inserted, slots.evicted, slots.refused)

    def keys(self) -> Tensor:
        """Return the keys that have rows, ascending: int64 [rows_used], on the CPU."""
        return self.slots.keys()

    def has_row(self, keys: Tensor) -> Tensor:
        """Return whether each key has a row: bool, of the shape of `keys`, on the CPU.

        Args:
            keys: int32 or int64 of any shape.
        """
        keys = self._as_keys(keys)
        return (self.slots.find(keys.reshape(-1)) > 0).view(keys.shape)

    @abstractmethod
    def to_table(self, vocabulary: Tensor) -> nn.Embedding | nn.EmbeddingBag:
        """Return a plain module whose row i is that of key `vocabulary[i]`."""

    def _rows_of(self, vocabulary: Tensor) -> Tensor:
        """Return a copy of the rows of keys: [n, dim]; zeros for keys that have none."""
        vocabulary = self._as_keys(vocabulary)
        if vocabulary.dim() != 1 or not len(vocabulary):
            raise SettingsError(
                f"{self.slots.rows.subject}: to_table(vocabulary)",
                found=f"shape {tuple(vocabulary.shape)}",
                expected="one or more keys in a row, [n]",
                next_step="pass keys(), or the keys that a service knows",
            )
        return self.slots.rows.memory.rows(self.slots.find(vocabulary))

    def _lookup_rows(self, ids: Tensor) -> LookupRows:
        """Return where the rows of keys are; see `_rows_outside_graphs`."""
        if torch.compiler.is_compiling():
            return _outside_graphs[0](self, ids)
        return self._rows_outside_graphs(ids)

    def _rows_outside_graphs(self, ids: Tensor) -> LookupRows:
        """Return where the rows of keys are; places have the shape and the device of `ids`.

        A lookup of training gives the parameter a gradient, unless rows of it leave before. Any
        other gets a detached weight: no step waits for it, so its rows may leave at any time.
        """
        weight, slots = self.weight, self.slots
        keys = self._as_keys(ids)
        refuse_recording(keys, slots.rows.subject)
        refuse_no_memory(slots.rows.weight, slots.rows.subject)
        if weight.is_cuda:
            refuse_capture(f"a lookup of {slots.rows.subject}")
        is_training = self.training and weight.requires_grad and torch.is_grad_enabled()
        if is_training:
            refuse_caller(self, weight, slots.rows)
            self._take_over_weight()
        if weight is slots.rows.weight:
            slots.rows.refuse_written()
        key_slots = self._take(keys.reshape(-1)) if is_training else slots.find(keys.reshape(-1))
        rows = slots.rows.memory.lookup_rows(weight, key_slots.view(keys.shape), trains=is_training)
        read_weight: Tensor = rows.weight
        if is_training:
            read_weight = slots.open_lookups.follow(
                read_weight, key_slots, slots.steps, subject=slots.rows.subject
            )
        return LookupRows(rows.places.to(ids.device), read_weight, rows.padding)

    def _take(self, keys: Tensor) -> Tensor:
        """Return the slots of keys in training, int64 [n]. Collective, if there are several ranks.

        All ranks give slots to the keys of all.
        """
        slots = self.slots
        all_keys = keys_of_all_ranks(keys, slots=slots)
        key_slots = slots.take(all_keys)
        return key_slots if all_keys is keys else slots.find(keys)

    def _as_keys(self, ids: Tensor) -> Tensor:
        if not isinstance(ids, Tensor) or ids.dtype not in (torch.int64, torch.int32):
            raise SettingsError(
                f"{self.slots.rows.subject}: keys",
                found=str(ids.dtype) if isinstance(ids, Tensor) else type(ids).__name__,
                expected="a tensor of int64 or int32",
                next_step="hash other keys to 64 bits, and convert them with .long()",
            )
        # The common case, in a tenth of the time.
        is_as_asked = ids.is_cpu and ids.dtype is torch.int64
        return ids if is_as_asked else ids.to(device="cpu", dtype=torch.int64)

    def _apply(self, *settings: Any, **named_settings: Any) -> Self:
        """Move or convert the weight, as `to`, `double` and `to_empty` of `nn.Module` ask for.

        Rows without keys are zeros afterwards, also in the new memory of `to_empty`.
        """
        place_before, apply = _place(self.weight), cast(Callable[..., Any], super()._apply)
        apply(*settings, **named_settings)
        if self.slots.rows.memory.is_whole and _place(self.weight) != place_before:
            if not self.slots.rows_used:
                self.weight.data.zero_()
            self._take_over_weight()
        return self

    def _take_over_weight(self) -> None:
        """Have rows of keys written into the parameter that was put in place of another.

        Raises:
            SettingsError: its row 0 has values, or another table has it.
        """
        weight, rows = self.weight, self.slots.rows
        if weight is not rows.weight and isinstance(weight, Parameter):
            if has_other_slots(weight, self.slots):
                raise SettingsError(
                    rows.subject,
                    found="the weight of another keyed table, which gives its rows to other keys",
                    expected="a weight for each table",
                    next_step="use one module in both places, which may have several names",
                )
            rows.weight = weight
            rows.refuse_row_0()
            rows.follow_weight()

    def get_extra_state(self) -> dict[str, Any]:
        """Return keys and counts for `state_dict()`; the weight is a parameter as others are."""
        return {
            "row_states": {name: state.clone() for name, state in self.slots.row_states.items()},
            **self.slots.state_dict(),
        }

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, *settings: Any
    ) -> None:
        """Load the module's part of a state dict, as `nn.Module.load_state_dict` asks for.

        Raises:
            SettingsError: it has rows without keys, or keys without rows. Nothing of the table has
                changed.
        """
        refuse_half_state(state_dict, prefix, self.slots.rows.subject)
        super()._load_from_state_dict(state_dict, prefix, *settings)

    def set_extra_state(self, state: Mapping[str, Any]) -> None:
        """Take over what `get_extra_state` returned.

        Raises:
            SettingsError: the table has another capacity or other rules.
        """
        slots, stored = self.slots, state["row_states"]
        forms = {name: values.shape for name, values in slots.row_states.items()}
        stored_forms = {name: values.shape for name, values in stored.items()}
        if stored_forms != forms:
            raise SettingsError(
                slots.rows.subject,
                found=f"stored row states {stored_forms!r:.300}",
                expected=f"{forms!r:.300}",
                next_step="build the table with the stored capacity_rows and rules",
            )
        slots.refuse_settings(state)
        self._take_over_weight()  # load_state_dict(assign=True) has replaced it
        if slots.rows.is_trained and not torch.equal(stored[KEY], slots.row_states[KEY]):
            slots.rows.loaded.load_keys()
        for name, values in slots.row_states.items():
            values.copy_(stored[name])
        slots.load_state_dict(state)

    def extra_repr(self) -> str:
        """Return what `repr` shows of the settings."""
        return f"{self.dim}, capacity_rows={self.capacity_rows}, sparse={self.sparse}"


def _place(weight: Tensor) -> tuple[int, torch.device, int]:
    """Return what differs if a weight is another object, or lies in other memory."""
    has_memory = type(weight) is Parameter and not weight.is_meta  # not one that ranks have cut
    return id(weight), weight.device, weight.data_ptr() if has_memory else 0
