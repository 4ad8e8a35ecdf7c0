"""What a checkpoint is restored into: a model's tensors, or fresh ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from recpoint.errors import IncompatibleModel
from recpoint.format.dtypes import torch_dtype
from recpoint.format.manifest import Manifest, TableSpec

__all__ = [
    "MemoryTarget",
    "RestoreTarget",
    "StateCheckingTarget",
    "TableTarget",
    "check_targets",
]


@dataclass(frozen=True, kw_only=True)
class TableTarget:
    """Where one table's rows go, in place, on any device.

    Attributes:
        values: [rows, dim], of the table's dtype, contiguous.
        row_states: one [rows, *shape] for each row state of the table, of its dtype, contiguous;
            None for a state that is not wanted.
    """

    values: Tensor
    row_states: tuple[Tensor | None, ...]


class RestoreTarget(Protocol):
    """What a checkpoint is restored into."""

    def begin(self, manifest: Manifest) -> Sequence[TableTarget | None]:
        """Say where the tables go, one for each of `manifest.tables`; None: not wanted.

        Called after everything that can be checked without reading chunks has been, and again for
        an older checkpoint when a chunk of this one turns out to be damaged. What the first call's
        tensors hold by then does not matter: a chain starts with a full, which overwrites every
        row.

        Raises:
            IncompatibleModel: the checkpoint does not fit; nothing has been written.
        """

    def finish(self, manifest: Manifest, state: dict[int, object]) -> None:
        """Take the state tree of each rank; every row has been written."""


@runtime_checkable
class StateCheckingTarget(Protocol):
    """A target that looks at the state before the first row is written."""

    def check_state(self, manifest: Manifest, state: dict[int, object]) -> None:
        """Called between `begin` and the first row.

        Raises:
            IncompatibleModel: the state does not fit; nothing has been written.
        """


def check_targets(manifest: Manifest, targets: Sequence[TableTarget | None]) -> None:
    """Whether every row of the checkpoint has its place, before one is written.

    Raises:
        IncompatibleModel: a tensor of another shape or dtype than its table or row state.
        ValueError: not one target for each table.
    """
    if len(targets) != len(manifest.tables):
        raise ValueError(f"{len(targets)} targets for {len(manifest.tables)} tables")
    for spec, target in zip(manifest.tables, targets, strict=True):
        if target is None:
            continue
        _check_tensor(spec, "values", target.values, (spec.rows, spec.dim), torch_dtype(spec.dtype))
        if len(target.row_states) != len(spec.row_states):
            raise _does_not_fit(
                spec, f"{len(target.row_states)} row states", f"{len(spec.row_states)}"
            )
        for state, tensor in zip(spec.row_states, target.row_states, strict=True):
            if tensor is not None:
                shape = (spec.rows, *state.shape)
                _check_tensor(spec, state.name, tensor, shape, torch_dtype(state.dtype))


def _check_tensor(
    spec: TableSpec, what: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    found = f"{what}: {tensor.dtype} {tuple(tensor.shape)}"
    if tuple(tensor.shape) != shape or tensor.dtype != dtype:
        raise _does_not_fit(spec, found, f"{dtype} {shape}")
    if not tensor.is_contiguous():
        raise _does_not_fit(spec, f"{found}, not contiguous", "a contiguous tensor")


def _does_not_fit(spec: TableSpec, found: str, expected: str) -> IncompatibleModel:
    return IncompatibleModel(
        f"table {spec.name!r}",
        found=found,
        expected=expected,
        next_step="build the model as it was when the checkpoint was taken",
    )


class MemoryTarget:
    """Restores into fresh CPU tensors, without a model.

    Args:
        tables: names of the tables wanted; None: all.

    Attributes:
        manifest: the checkpoint that was restored.
        tables: by name.
        state: the state tree of each rank.
    """

    def __init__(self, tables: Iterable[str] | None = None) -> None:
        self._wanted = None if tables is None else frozenset(tables)
        self.manifest: Manifest | None = None
        self.tables: dict[str, TableTarget] = {}
        self.state: dict[int, object] = {}

    def begin(self, manifest: Manifest) -> Sequence[TableTarget | None]:
        """See `RestoreTarget.begin`."""
        known = {spec.name for spec in manifest.tables}
        for name in sorted((self._wanted or frozenset()) - known):
            raise IncompatibleModel(
                f"table {name!r}",
                found=f"no such table in {manifest.ref}",
                expected=f"one of {', '.join(sorted(known))[:500]}",
                next_step="name a table of the checkpoint",
            )
        self.tables = {
            spec.name: TableTarget(
                values=torch.empty(spec.rows, spec.dim, dtype=torch_dtype(spec.dtype)),
                row_states=tuple(
                    torch.empty(spec.rows, *state.shape, dtype=torch_dtype(state.dtype))
                    for state in spec.row_states
                ),
            )
            for spec in manifest.tables
            if self._wanted is None or spec.name in self._wanted
        }
        return [self.tables.get(spec.name) for spec in manifest.tables]

    def finish(self, manifest: Manifest, state: dict[int, object]) -> None:
        """See `RestoreTarget.finish`."""
        self.manifest, self.state = manifest, state
