"""Defines what a restore writes into, a model's tensors or fresh ones, and checks that it fits."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from recpoint.errors import IncompatibleModel
from recpoint.format.dtypes import torch_dtype
from recpoint.format.manifest import Manifest, TableSpec
from recpoint.kernels import dirty_bitmap

if TYPE_CHECKING:
    from recpoint.catalog.restore.chunks import StoredRows

__all__ = [
    "RestoreTarget",
    "RowSink",
    "StateCheckingTarget",
    "StateChoosingTarget",
    "StateWanted",
    "TableTarget",
    "check_targets",
    "mark_rows",
]


@dataclass(frozen=True, kw_only=True)
class TableTarget:
    """The tensors that one table's rows, or a range of them, are written into, on any device.

    Attributes:
        values: [n, dim], of the table's dtype, contiguous: rows first_row … first_row + n − 1.
        row_states: one [n, *shape] for each row state of the table, of its dtype, contiguous; None
            for a state that is not wanted.
        changed: if given, a dirty bitmap of the n rows on the CPU, all zero: the rows that come
            from increments are marked in it, the rows that come from the chain's full are not.
        first_row: the table's row that is row 0 of `values`.
    """

    values: Tensor
    row_states: tuple[Tensor | None, ...]
    changed: Tensor | None = None
    first_row: int = 0

    @property
    def wanted(self) -> range:
        """The rows of the table that go here."""
        return range(self.first_row, self.first_row + len(self.values))

    def mark(self, rows: range | Tensor) -> None:
        """Mark rows in `changed`."""
        mark_rows(self.changed, rows, of=len(self.values))


def mark_rows(changed: Tensor | None, rows: range | Tensor, *, of: int) -> None:
    """Mark rows in a dirty bitmap of `of` rows; does nothing if `changed` is None."""
    if changed is not None:
        ids = torch.arange(rows.start, rows.stop, device="cpu") if isinstance(rows, range) else rows
        dirty_bitmap.mark(changed, ids, rows=of)


class RowSink(Protocol):
    """Takes one table's rows as they are stored, undecoded.

    Attributes:
        wanted: the rows of the table that it takes; None: all. `take` and `mark` get ids counted
            from its start.
    """

    @property
    def wanted(self) -> range | None:
        """The rows of the table that it takes; None: all."""

    def take(self, stored: StoredRows, positions: Tensor | None) -> None:
        """Take rows of a chunk, checked against the table; each row of the table comes once.

        Args:
            stored: the chunk; it must not be kept.
            positions: positions of the rows to take in the chunk, int64 [m], ascending; None: all.
        """

    def mark(self, rows: range | Tensor) -> None:
        """Note that an increment holds these rows; they have been taken from it or a newer one."""


class RestoreTarget(Protocol):
    """Receives the tables and the state of a checkpoint."""

    def begin(self, manifest: Manifest) -> Sequence[TableTarget | RowSink | None]:
        """Return where each of `manifest.tables` goes; None for a table that is not wanted.

        Called after all checks that need no chunk, and again for an older checkpoint if a chunk of
        this one turns out to be damaged. By then the first call's tensors may hold anything, which
        does no harm: a chain starts with a full, which overwrites every row.

        Raises:
            IncompatibleModel: the checkpoint does not fit; nothing has been written.
        """

    def finish(self, manifest: Manifest, state: dict[int, object]) -> None:
        """Take the state tree of each rank, or the state that a `StateChoosingTarget` asked for.

        Called after every row has been written.
        """


@runtime_checkable
class StateCheckingTarget(Protocol):
    """A target that looks at the state before the first row is written."""

    def check_state(self, manifest: Manifest, state: dict[int, object]) -> None:
        """Check the state; called between `begin` and the first row.

        Raises:
            IncompatibleModel: the state does not fit; nothing has been written.
        """


class StateWanted(NamedTuple):
    """The parts of the state trees that a target needs.

    Attributes:
        whole: ranks whose whole tree it needs.
        briefly: ranks of whose tree, a dict, it needs only the entries `keys`; it may get more.
        keys: keys of these entries.
    """

    whole: Collection[int] = ()
    briefly: Collection[int] = ()
    keys: Collection[str] = ()


@runtime_checkable
class StateChoosingTarget(Protocol):
    """A target that does not need the state of every rank."""

    def state_wanted(self, manifest: Manifest, known_trees: Mapping[int, object]) -> StateWanted:
        """Return what the target needs; called again until everything it returns has been read.

        Args:
            manifest: as for `begin`, which has been called.
            known_trees: the trees that have been read so far, by rank; empty at first.

        Raises:
            FormatError: what is known is damaged.
        """


def check_targets(manifest: Manifest, targets: Sequence[TableTarget | RowSink | None]) -> None:
    """Check that the targets fit the tables, before a row is written.

    Raises:
        IncompatibleModel: a tensor's shape or dtype differ from its table's or row state's, or its
            rows are not in the table.
        ValueError: there is not one target for each table.
    """
    if len(targets) != len(manifest.tables):
        raise ValueError(f"{len(targets)} targets for {len(manifest.tables)} tables")
    for spec, target in zip(manifest.tables, targets, strict=True):
        if isinstance(target, TableTarget):
            rows = target.values.shape[0] if target.values.dim() else 0
            _check_tensor(spec, "values", target.values, (rows, spec.dim), torch_dtype(spec.dtype))
        wanted_rows = None if target is None else target.wanted
        if wanted_rows is not None and not 0 <= wanted_rows.start <= wanted_rows.stop <= spec.rows:
            rows_text = f"rows {wanted_rows.start} … {wanted_rows.stop - 1} wanted"
            raise _does_not_fit(spec, rows_text, f"rows of 0 … {spec.rows - 1}")
        if not isinstance(target, TableTarget):
            continue
        if len(target.row_states) != len(spec.row_states):
            raise _does_not_fit(
                spec, f"{len(target.row_states)} row states", f"{len(spec.row_states)}"
            )
        for state, tensor in zip(spec.row_states, target.row_states, strict=True):
            if tensor is not None:
                shape = (rows, *state.shape)
                _check_tensor(spec, state.name, tensor, shape, torch_dtype(state.dtype))


def _check_tensor(
    spec: TableSpec, label: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    tensor_text = f"{label}: {tensor.dtype} {tuple(tensor.shape)}"
    if tuple(tensor.shape) != shape or tensor.dtype != dtype:
        raise _does_not_fit(spec, tensor_text, f"{dtype} {shape}")
    if not tensor.is_contiguous():
        raise _does_not_fit(spec, f"{tensor_text}, not contiguous", "a contiguous tensor")


def _does_not_fit(spec: TableSpec, found: str, expected: str) -> IncompatibleModel:
    return IncompatibleModel(
        f"table {spec.name!r}",
        found=found,
        expected=expected,
        next_step="build the model as it was when the checkpoint was taken",
    )
