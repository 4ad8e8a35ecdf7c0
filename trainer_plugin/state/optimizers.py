"""Captures and restores the state of optimizers, apart from the row states of tables."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from recpoint.catalog.restore.in_place import fits, write
from recpoint.embeddings.tables.counted_lookups import LOOKUPS, LookupCounts
from recpoint.embeddings.tables.optimizers import row_states
from recpoint.embeddings.tables.tables import Table
from recpoint.trainer_plugin import mismatches
from recpoint.trainer_plugin.mismatches import Mismatch
from recpoint.trainer_plugin.tables import (
    are_pieces,
    group_names,
    is_piece,
    lacks_some,
    parameter_names,
    piece_of,
    restored_like,
)

__all__ = ["OptimizerState", "RowState"]


class RowState:
    """The row states of one table.

    Attributes:
        optimizer: index of the optimizer that has them; None: the table itself or its source, or
            none. The counts of lookups (`LOOKUPS`) are no optimizer's.
        tensors: name -> [rows, ...].
    """

    def __init__(self, optimizer: int | None, tensors: Mapping[str, Tensor]) -> None:
        self.optimizer = optimizer
        self.tensors = dict(tensors)


class OptimizerState:
    """Captures and restores the optimizers of one model.

    Args:
        model: the model.
        optimizers: its optimizers.
        tables: its tables, whose row states are left out.
        counts: `Table.key` -> counts of its lookups, which are a row state of the table.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        tables: Sequence[Table],
        *,
        counts: Mapping[str, LookupCounts] | None = None,
    ) -> None:
        self._model = model
        self.optimizers = tuple(optimizers)
        self._tables = tuple(tables)
        self._counts = dict(counts or {})
        # Keys of each optimizer's groups before training; groups may be added later.
        self._settings = [
            [frozenset(group) for group in optimizer.param_groups] for optimizer in self.optimizers
        ]

    def parameters(self) -> list[Tensor]:
        """Return the parameters in the groups of all optimizers, as they are now."""
        groups = (group for optimizer in self.optimizers for group in optimizer.param_groups)
        return [parameter for group in groups for parameter in group["params"]]

    def row_states(self, table: Table) -> RowState:
        """Return the state with one entry for each row of `table`, as it is now."""
        source_states = table.row_states
        if source_states is not None:
            return RowState(None, source_states)
        counts = self._counts.get(table.key)
        lookups = {} if counts is None else {LOOKUPS: counts.codes}
        weight, own_states = table.weight, {**table.own_states, **lookups}
        for number, optimizer in enumerate(self.optimizers):
            state = optimizer.state.get(weight)
            if state:
                return RowState(number, row_states(state, weight.shape[0]) | own_states)
        return RowState(None, own_states)

    def begin_entries(self) -> None:
        """Give rows that have new ids their first entries in row states; see `Table`."""
        for table in self._tables:
            table.begin_entries(self.optimizers)

    def written_in_place(self) -> dict[str, Tensor]:
        """Return the tensors that a restore writes: tables, row states, tensors in groups.

        Returns:
            A name for messages -> the tensor.
        """
        tensors: dict[str, Tensor] = {}
        for table in self._tables:
            tensors[f"table {table.name!r}"] = table.weight
            for name, state in self.row_states(table).tensors.items():
                tensors[f"the row state {name!r} of table {table.name!r}"] = state
        for number, optimizer in enumerate(self.optimizers):
            for position, group in enumerate(optimizer.param_groups):
                for name, value in group.items():
                    if isinstance(value, Tensor):
                        tensors[f"optimizers[{number}], group {position}, {name!r}"] = value
        return tensors

    def table_names(self) -> set[str]:
        """Return the names of the tables that this process holds."""
        return {table.name for table in self._tables}

    def classes(self) -> str:
        """Return the class names of the optimizers, separated by commas."""
        return ", ".join(map(_class_name, self.optimizers))

    def capture(self) -> list[dict[str, Any]]:
        """Return hyperparameters and all state that is not row state, with live tensors.

        Raises:
            SettingsError: an optimizer trains a parameter that is not in the model, or no longer.
        """
        names = parameter_names(self._model)
        rows = {id(table.weight): table.weight.shape[0] for table in self._tables}
        return [
            {
                "class": _class_name(optimizer),
                "groups": [
                    {**group, "params": group_names(names, group, number, position)}
                    for position, group in enumerate(optimizer.param_groups)
                ],
                "state": {
                    names[id(parameter)]: _entry(parameter, state, rows.get(id(parameter)))
                    for parameter, state in optimizer.state.items()
                    if isinstance(parameter, Tensor) and id(parameter) in names
                },
                "other": {
                    key: value
                    for key, value in optimizer.state.items()
                    if not isinstance(key, Tensor)
                },
            }
            for number, optimizer in enumerate(self.optimizers)
        ]

    def lacks(self, saved: Sequence[Mapping[str, Any]]) -> bool:
        """Whether `saved` lacks pieces of state of parameters here, which other ranks may have."""
        names = parameter_names(self._model)
        by_name = {names[id(p)]: p for p in self._model.parameters()}
        return any(
            name in by_name and are_pieces(value) and lacks_some(by_name[name], value, name=name)
            for optimizer in saved
            for name, entry in optimizer["state"].items()
            for value in entry["values"].values()
        )

    def differences(self, saved: Sequence[Mapping[str, Any]]) -> list[Mismatch]:
        """Return what does not fit these optimizers."""
        if len(saved) != len(self.optimizers):
            text = f"{len(self.optimizers)} optimizers here, {len(saved)} in the checkpoint"
            return [Mismatch(text, mismatches.OPTIMIZER_COUNT)]
        names = parameter_names(self._model)
        differences = []
        for number, (optimizer, saved_optimizer) in enumerate(
            zip(self.optimizers, saved, strict=True)
        ):
            here_name, there_name = _class_name(optimizer), saved_optimizer["class"]
            if here_name != there_name:
                text = f"optimizer {number} is {here_name} here and {there_name} in the checkpoint"
                differences.append(Mismatch(text, mismatches.OPTIMIZER_CLASS))
            groups_here = [
                group_names(names, group, number, position)
                for position, group in enumerate(optimizer.param_groups)
            ]
            stored = [group["params"] for group in saved_optimizer["groups"]]
            if groups_here != stored:
                text = (
                    f"optimizer {number} has other parameter groups: {_brief(groups_here)} here, "
                    f"{_brief(stored)} in the checkpoint"
                )
                differences.append(Mismatch(text, mismatches.PARAMETER_GROUPS))
        return differences

    def restore(
        self, saved: Sequence[Mapping[str, Any]], rows: Mapping[str, Mapping[str, Tensor]]
    ) -> None:
        """Restore every optimizer.

        A setting that the checkpoint lacks keeps its value, because a later version of the
        optimizer may have added it. A setting that the optimizer lacks is kept in its group.

        Args:
            saved: as `capture` returned it.
            rows: parameter name -> its row states, which have been restored already.
        """
        names = parameter_names(self._model)
        by_name = {names[id(p)]: p for p in self._model.parameters()}
        groups = self._torch_groups()
        for optimizer, settings, saved_optimizer in zip(
            self.optimizers, self._settings, saved, strict=True
        ):
            pairs = zip(optimizer.param_groups, saved_optimizer["groups"], strict=True)
            for position, (group, stored) in enumerate(pairs):
                # A group that was added since has all of its keys as settings.
                first_settings = (
                    settings[position] if position < len(settings) else frozenset(group)
                )
                _restore_group(group, stored, first_settings | optimizer.defaults.keys())
            optimizer.state.clear()
            for name, entry in saved_optimizer["state"].items():
                parameter = by_name[name]
                own_entry = _for_device(entry, groups.get(id(parameter)))
                optimizer.state[parameter] = _restored(parameter, own_entry, rows.get(name, {}))
            optimizer.state.update(saved_optimizer["other"])

    def carry_differences(
        self, saved: Sequence[Mapping[str, Any]], parameters: Mapping[str, str]
    ) -> list[Mismatch]:
        """Return why the state of parameters cannot be carried over.

        Args:
            saved: as `capture` returned it.
            parameters: name here -> name in the checkpoint.
        """
        classes_here = {
            name: _class_name(optimizer) for name, (optimizer, _) in self.trained_by().items()
        }
        classes_stored = {
            name: str(optimizer["class"]) for name, optimizer in _trained_by(saved).items()
        }
        return [
            Mismatch(
                f"{old!r} was trained by {classes_stored[old]}, and here {new!r} is trained by "
                f"{classes_here.get(new, 'no optimizer')}, so that its state cannot be carried",
                mismatches.CARRIED_STATE,
            )
            for new, old in parameters.items()
            if old in classes_stored and classes_here.get(new) != classes_stored[old]
        ]

    def carry(
        self,
        saved: Sequence[Mapping[str, Any]],
        parameters: Mapping[str, str],
        rows: Mapping[str, Mapping[str, Tensor]],
    ) -> None:
        """Give parameters the state of parameters in the checkpoint; hyperparameters do not change.

        Args:
            saved: as `capture` returned it.
            parameters: name here -> name in the checkpoint.
            rows: parameter name here -> its row states, which have been restored already.
        """
        optimizers_here, optimizers_stored = self.trained_by(), _trained_by(saved)
        groups = self._torch_groups()
        names = parameter_names(self._model)
        by_name = {names[id(p)]: p for p in self._model.parameters()}
        for new, old in parameters.items():
            entry = optimizers_stored[old]["state"].get(old) if old in optimizers_stored else None
            if entry is not None:
                # Copied: two parameters may come from the same one, but must not share state.
                values = {key: _copied(value) for key, value in entry["values"].items()}
                parameter = by_name[new]
                own_entry = _for_device({**entry, "values": values}, groups.get(id(parameter)))
                optimizers_here[new][0].state[parameter] = _restored(
                    parameter, own_entry, rows.get(new, {})
                )
        for table in self._tables:
            lookups = rows.get(table.parameter_name, {}).get(LOOKUPS)
            if table.key in self._counts and lookups is not None:
                self._counts[table.key].codes.copy_(lookups)

    def _torch_groups(self) -> dict[int, dict[str, Any]]:
        """Return the group of each parameter that a torch optimizer trains, by `id()`."""
        return {
            id(parameter): group
            for optimizer in self.optimizers
            if type(optimizer).__module__.startswith("torch.optim")
            for group in optimizer.param_groups
            for parameter in group["params"]
        }

    def trained_by(self) -> dict[str, tuple[Optimizer, Mapping[str, Any]]]:
        """Return the optimizer and the group of each parameter, by name, in their order."""
        names = parameter_names(self._model)
        return {
            name: (optimizer, group)
            for number, optimizer in enumerate(self.optimizers)
            for position, group in enumerate(optimizer.param_groups)
            for name in group_names(names, group, number, position)
        }


def _trained_by(saved: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    # Also by the states: the groups are one rank's, and other ranks may hold a table.
    in_groups = {
        name: optimizer
        for optimizer in saved
        for group in optimizer["groups"]
        for name in group["params"]
    }
    return {name: optimizer for optimizer in saved for name in optimizer["state"]} | in_groups


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _class_name(optimizer: Optimizer) -> str:
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"


def _restore_group(
    group: dict[str, Any], stored: Mapping[str, Any], settings: Collection[str]
) -> None:
    """Restore the settings of one group.

    Args:
        group: the group.
        stored: the group as the checkpoint holds it.
        settings: keys that keep their values if `stored` lacks them. Steps have added all others,
            so a rewind to a checkpoint before these steps removes them.
    """
    for key in [key for key in group if key not in settings and key not in stored]:
        del group[key]
    for key, value in stored.items():
        if key == "params":
            continue
        current = group.get(key)
        if isinstance(current, Tensor) and _can_take(current, value):
            # In place: a CUDA graph or a scheduler may read the learning rate from this tensor.
            write(current, value)
        else:
            group[key] = value


def _can_take(current: Tensor, value: object) -> bool:
    """Whether `value` can be written into `current`."""
    return (
        isinstance(value, Tensor)
        and current.shape == value.shape
        and current.layout is value.layout is torch.strided
        and fits(current, value.to(current.dtype))
    )


def _entry(parameter: Tensor, state: Mapping[Any, Any], rows: int | None) -> dict[str, Any]:
    """Return the state of one parameter without its row states, and the order of its keys."""
    by_row = {} if rows is None else row_states(state, rows)
    whole_state = {key: value for key, value in state.items() if key not in by_row}
    return {
        "keys": list(state),
        "values": {
            key: value
            for key, whole in whole_state.items()
            if (value := piece_of(whole) if is_piece(whole) else whole) is not None
        },
        # Step counts are on the host unless the optimizer is capturable; moments are not.
        "on_host": [
            key
            for key, value in whole_state.items()
            if isinstance(value, Tensor) and value.is_cpu and not parameter.is_cpu
        ],
    }


def _for_device(entry: Mapping[str, Any], group: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Return `entry` with the step count on the host or not, as torch keeps it.

    A state captured on a CPU does not say where the count belongs, because all of it is on the
    host. If the count were put on a GPU, each step would wait for the GPU, for each parameter.

    Args:
        entry: as `_entry` made it.
        group: group of the parameter; None: no torch optimizer trains it.
    """
    if group is None:
        return entry
    host_keys = [key for key in entry["on_host"] if key != "step"]
    on_device = group.get("capturable") or group.get("fused")
    return {**entry, "on_host": host_keys if on_device else [*host_keys, "step"]}


def _restored(
    parameter: Tensor, entry: Mapping[str, Any], rows: Mapping[str, Tensor]
) -> dict[Any, Any]:
    state: dict[Any, Any] = {}
    for key in entry["keys"]:
        if key in entry["values"]:
            value = entry["values"][key]
            if are_pieces(value) or (isinstance(value, Tensor) and is_piece(parameter)):
                value = restored_like(parameter, value, name=str(key))
            if isinstance(value, Tensor) and key not in entry["on_host"]:
                value = value.to(parameter.device)
            state[key] = _laid_out_like(parameter, value)
        else:
            state[key] = rows[key]
    return state


def _laid_out_like(parameter: Tensor, value: Any) -> Any:
    """Return a state of the parameter's shape with the strides that torch's optimizers give it.

    torch's fused optimizers pair the elements of parameter and state by their places in memory.
    """
    if (
        not isinstance(value, Tensor)
        or is_piece(value)
        or value.layout is not torch.strided
        or parameter.layout is not torch.strided
        or value.shape != parameter.shape
        or value.stride() == parameter.stride()
    ):
        return value
    return torch.empty_like(parameter, dtype=value.dtype, device=value.device).copy_(value)


def _brief(groups: list[list[str]]) -> str:
    text = repr(groups)
    return text if len(text) <= 300 else f"{text[:300]}…"
