"""Restoring into the training process: everything, checked first; or what was asked for by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from recpoint.catalog.restore import TableTarget
from recpoint.errors import IncompatibleModel, SettingsError
from recpoint.format.dtypes import torch_dtype
from recpoint.format.manifest import Manifest, TableSpec
from recpoint.trainer_plugin.policy import Tip
from recpoint.trainer_plugin.tables import Table
from recpoint.trainer_plugin.training_state import TrainingState

__all__ = ["ModelTarget", "PartialTarget", "check_partial", "tip_of"]

_NEXT = (
    "build model and optimizers as they were, or load parts of the checkpoint by name: "
    'restore(partial={"tables": [...], "dense": [...]})'
)
_PARTS = ("tables", "dense")


class ModelTarget:
    """Model, optimizers, schedulers, reader, extras and generators of this process.

    Attributes:
        manifest: what was restored; None before.
        batches_done: of the restored checkpoint.
    """

    def __init__(self, tables: Sequence[Table], state: TrainingState) -> None:
        self._tables = {table.name: table for table in tables}
        self._state = state
        self._rows: dict[str, dict[str, Tensor]] = {}
        self.manifest: Manifest | None = None
        self.batches_done = 0

    def begin(self, manifest: Manifest) -> Sequence[TableTarget]:
        """See `catalog.restore.RestoreTarget.begin`."""
        _refuse(manifest, table_differences(self._tables, manifest.tables))
        self._rows.clear()
        return [self._target(spec) for spec in manifest.tables]

    def check_state(self, manifest: Manifest, state: dict[int, object]) -> None:
        """See `catalog.restore.StateCheckingTarget.check_state`."""
        found = self._state.differences(state.get(0))
        if manifest.ranks != 1:
            found.append(f"the checkpoint is of {manifest.ranks} ranks, this process is the only")
        _refuse(manifest, found)

    def finish(self, manifest: Manifest, state: dict[int, object]) -> None:
        """See `catalog.restore.RestoreTarget.finish`."""
        saved = state[0]
        assert isinstance(saved, dict)  # check_state has looked at it
        self.batches_done = self._state.restore(saved, self._rows)
        self.manifest = manifest

    def _target(self, spec: TableSpec) -> TableTarget:
        table = self._tables[spec.name]
        current = self._state.optimizers.row_states(table).tensors
        rows = self._rows[table.parameter_name] = {}
        for state in spec.row_states:
            # Optimizers create state at the first step, so a fresh one has none yet.
            shape, dtype = (spec.rows, *state.shape), torch_dtype(state.dtype)
            tensor = current.get(state.name)
            if tensor is None or tuple(tensor.shape) != shape or tensor.dtype != dtype:
                tensor = torch.empty(shape, dtype=dtype, device=table.weight.device)
            rows[state.name] = tensor
        return TableTarget(values=table.weight.detach(), row_states=tuple(rows.values()))


class PartialTarget:
    """Values of tables and of dense tensors that were asked for by name, and nothing else."""

    def __init__(
        self, tables: Sequence[Table], state: TrainingState, wanted: Mapping[str, Sequence[str]]
    ) -> None:
        self._tables = {table.name: table for table in tables}
        self._state = state
        self._wanted_tables = tuple(wanted.get("tables", ()))
        self._wanted_dense = tuple(wanted.get("dense", ()))

    def begin(self, manifest: Manifest) -> Sequence[TableTarget | None]:
        """See `catalog.restore.RestoreTarget.begin`."""
        there = {spec.name for spec in manifest.tables}
        found = [f"table {name!r} is not in the checkpoint" for name in self._missing(there)]
        chosen = {n: self._tables[n] for n in self._wanted_tables if n in self._tables}
        found += [f"table {n!r} is not in the model" for n in self._missing(chosen.keys())]
        found += table_differences(
            {name: table for name, table in chosen.items() if name in there},
            [spec for spec in manifest.tables if spec.name in chosen],
        )
        _refuse(manifest, found)
        return [
            TableTarget(
                values=chosen[spec.name].weight.detach(), row_states=(None,) * len(spec.row_states)
            )
            if spec.name in chosen
            else None
            for spec in manifest.tables
        ]

    def check_state(self, manifest: Manifest, state: dict[int, object]) -> None:
        """See `catalog.restore.StateCheckingTarget.check_state`."""
        here, there = self._state.model.tensors(), _dense(state)
        found = []
        for name in self._wanted_dense:
            if name not in there or name not in here:
                where = "checkpoint" if name not in there else "model"
                found.append(f"{name!r} is not in the {where}")
            elif here[name].shape != there[name].shape or here[name].dtype != there[name].dtype:
                found.append(
                    f"{name!r} is {here[name].dtype} {list(here[name].shape)} in the model and "
                    f"{there[name].dtype} {list(there[name].shape)} in the checkpoint"
                )
        _refuse(manifest, found)

    def finish(self, manifest: Manifest, state: dict[int, object]) -> None:
        """See `catalog.restore.RestoreTarget.finish`."""
        self._state.model.restore({"tensors": _dense(state)}, self._wanted_dense)

    def _missing(self, there: Any) -> list[str]:
        return [name for name in self._wanted_tables if name not in there]


def check_partial(wanted: object) -> Mapping[str, Sequence[str]]:
    """What `restore(partial=...)` may be: names of tables, of dense tensors, or of both.

    Raises:
        SettingsError: something else.
    """
    fits = (
        isinstance(wanted, Mapping)
        and any(wanted.values())
        and all(
            part in _PARTS
            and isinstance(names, list | tuple)
            and all(type(n) is str for n in names)
            for part, names in wanted.items()
        )
    )
    if not fits:
        raise SettingsError(
            "partial",
            found=f"{wanted!r:.200}",
            expected='{"tables": [names], "dense": [names]}, one of the two or both',
            next_step="name what to load: recpoint show lists what a checkpoint holds",
        )
    assert isinstance(wanted, Mapping)
    return wanted


def tip_of(manifest: Manifest) -> Tip:
    """The chain's tip once `manifest` has been restored."""
    return Tip(
        ref=manifest.ref,
        base=manifest.base or manifest.ref,
        chain_length=manifest.chain_length,
        tables=manifest.tables,
    )


def table_differences(tables: Mapping[str, Table], specs: Sequence[TableSpec]) -> list[str]:
    """How the tables of a model and of a checkpoint differ, one sentence each."""
    there = {spec.name: spec for spec in specs}
    found = [f"table {name!r} is not in the checkpoint" for name in tables if name not in there]
    found += [f"table {name!r} is not in the model" for name in there if name not in tables]
    for name in tables.keys() & there.keys():
        table, spec = tables[name], there[name]
        for what, here, stored in (
            ("rows", table.rows, spec.rows),
            ("values a row", table.dim, spec.dim),
            ("dtype", table.dtype, spec.dtype),
        ):
            if here != stored:
                found.append(
                    f"table {name!r}: {what} {here} in the model, {stored} in the checkpoint"
                )
    return sorted(found)


def _dense(state: dict[int, object]) -> dict[str, Tensor]:
    saved = state.get(0)
    model = saved.get("model") if isinstance(saved, dict) else None
    return dict(model["tensors"]) if isinstance(model, dict) else {}


def _refuse(manifest: Manifest, differences: Sequence[str]) -> None:
    if differences:
        raise IncompatibleModel(
            f"checkpoint of {manifest.ref}",
            found="; ".join(differences),
            # Not "and nothing was loaded": rows of a newer, damaged checkpoint may have been.
            expected="the model, optimizers and state that were saved",
            next_step=_NEXT,
        )
