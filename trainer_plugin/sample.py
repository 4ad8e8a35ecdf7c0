"""What a checkpoint is compared with later: a few rows of each table, exactly as they are at a cut.

Some are drawn from the whole table, whichever checkpoint stored them: they also show a change that
nobody marked. Those, some 64 a table, are all that a stall pays for. Some are drawn from the rows
that the snapshot stages, and these are digested too; the background thread does that (format §3.6).
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from recpoint.format.chunk import sample_arrays
from recpoint.format.dtypes import array_bytes, item_bytes
from recpoint.format.manifest import TableSpec
from recpoint.kernels import row_digest
from recpoint.trainer_plugin.device_drain import DeviceDrain
from recpoint.trainer_plugin.slot import ALIGNMENT_BYTES

__all__ = ["Sample", "Sampler", "StagedRows", "live_rows", "spread_rows"]

#: Most rows of a table from each of the two sources, and most bytes they take: a sample is to be
#: small against any increment.
_ROWS: Final = 64
_TABLE_BYTES: Final = 16 << 10
#: Most bytes over all tables, where these are many.
_TOTAL_BYTES: Final = 16 << 20

_Integers = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, kw_only=True, eq=False)
class StagedRows:
    """What a snapshot stages of one table: arrays in its slot.

    Attributes:
        ids: int64 [n], ascending; None: all rows.
        arrays: values and row states, [n, …] each.
    """

    ids: Tensor | None
    arrays: tuple[Tensor, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class Sample:
    """The sampled rows of one snapshot.

    Attributes:
        seed: from the attempt's name: the same rows whoever asks.
        first_rows: of each table, the position in it of the first row that is held here; what is
            stored are positions in the whole table, everything else here counts from that row.
        ids: of each table, int64 [n], ascending: rows drawn from all that are held here.
        arrays: of each table, their values and row states; filled by `copy`.
        size_bytes: most that all of it takes in the slot.
    """

    seed: int
    specs: tuple[TableSpec, ...]
    first_rows: tuple[int, ...]
    ids: tuple[Tensor, ...]
    size_bytes: int
    arrays: list[tuple[Tensor, ...]] = field(default_factory=list)

    def copy(self, sources: Sequence[Sequence[Tensor]], device: DeviceDrain) -> None:
        """Copy the rows; those on a device once `device` is drained.

        Args:
            sources: of each table, the live values and row states.
            device: takes charge of rows that are on one.
        """
        there: dict[torch.device, tuple[Tensor, ...]] = {}
        for index, (ids, arrays) in enumerate(zip(self.ids, sources, strict=True)):
            found = []
            for source in arrays:
                if source.is_cpu:
                    found.append(source.index_select(0, ids))
                    continue
                if source.device not in there:
                    # One transfer for all tables.
                    moved = torch.cat(self.ids).to(source.device)
                    there[source.device] = moved.split([len(some) for some in self.ids])
                out = torch.empty((len(ids), *source.shape[1:]), dtype=source.dtype, device="cpu")
                device.gather(source, there[source.device][index], out)
                found.append(out)
            self.arrays.append(tuple(found))

    def parts(self, staged: Sequence[StagedRows | None]) -> Iterator[tuple[str, Tensor]]:
        """Name and contents of each array of format §3.6. The device has been drained.

        Args:
            staged: of each table, what the snapshot stages; None: no row of it.
        """
        for index, (spec, rows) in enumerate(zip(self.specs, staged, strict=True)):
            ids, arrays = self.ids[index], self.arrays[index]
            if rows is not None and rows.ids is not None:
                strata = _strata(len(rows.ids), _rows_of(spec, spec.rows, len(self.specs)))
                at = torch.from_numpy(_draw(*strata, self.seed + 1 + index))
                # A row from both sources is the same row: the first is kept.
                both, first = np.unique(torch.cat([ids, rows.ids[at]]).numpy(), return_index=True)
                kept = torch.from_numpy(first)
                ids = torch.from_numpy(both)
                pairs = zip(arrays, rows.arrays, strict=True)
                arrays = tuple(torch.cat([live, own[at]])[kept] for live, own in pairs)
            if not len(ids):
                continue  # no row of it is held here
            first_row = self.first_rows[index]
            named = zip(sample_arrays(spec, len(ids)), (ids + first_row, *arrays), strict=False)
            for name, array in named:
                yield f"sample.{index}.{name}", array
            if rows is not None:
                yield f"sample.{index}.digests", _digests(rows, first_row)


class Sampler:
    """Draws samples; what follows from the tables alone is worked out once."""

    def __init__(self) -> None:
        self._specs: tuple[TableSpec, ...] | None = None
        self._starts = self._widths = np.empty(0, np.int64)
        self._counts: list[int] = []
        self._size_bytes = 0

    def draw(self, specs: Sequence[TableSpec], held: Sequence[range], attempt: str) -> Sample:
        """Rows of each table for the snapshot `attempt`.

        Args:
            specs: of all tables.
            held: which rows of each are held here.
            attempt: its name.
        """
        self._follow(tuple(specs), held)
        seed = int(attempt, 16)
        drawn = _draw(self._starts, self._widths, seed)
        return Sample(
            seed=seed,
            specs=tuple(specs),
            first_rows=tuple(rows.start for rows in held),
            ids=torch.from_numpy(drawn).split(self._counts),
            size_bytes=self._size_bytes,
        )

    def size_bytes(self, specs: Sequence[TableSpec], held: Sequence[range]) -> int:
        """Most bytes that a sample of these tables takes in a slot; arguments as for `draw`."""
        self._follow(tuple(specs), held)
        return self._size_bytes

    def _follow(self, specs: tuple[TableSpec, ...], held: Sequence[range]) -> None:
        known = self._specs
        # By identity: a cutter keeps them, and comparing records field by field takes a while.
        if known and len(known) == len(specs) and all(map(operator.is_, known, specs)):
            return
        tables = [(spec, len(rows)) for spec, rows in zip(specs, held, strict=True)]
        strata = [_strata(rows, _rows_of(spec, rows, len(specs))) for spec, rows in tables]
        self._starts = np.concatenate([starts for starts, _ in strata] or [self._starts[:0]])
        self._widths = np.concatenate([widths for _, widths in strata] or [self._widths[:0]])
        self._counts = [len(starts) for starts, _ in strata]
        self._size_bytes = sum(_size_bytes(spec, rows, len(specs)) for spec, rows in tables)
        self._specs = specs


def spread_rows(rows: int, count: int, seed: int) -> Tensor:
    """`count` positions of `rows`, or all of fewer: one of each part of nearly the same size.

    Returns:
        int64 [n], ascending.
    """
    return torch.from_numpy(_draw(*_strata(rows, count), seed))


def live_rows(values: Tensor, row_states: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The arrays of a table, as `Sample.copy` wants them."""
    return values.detach(), *(state.detach() for state in row_states)


def _row_bytes(spec: TableSpec) -> int:
    states = sum(array_bytes(state.dtype, state.shape) for state in spec.row_states)
    return spec.dim * item_bytes(spec.dtype) + states


def _rows_of(spec: TableSpec, rows: int, tables: int) -> int:
    """How many of `rows` rows of a table are drawn from one source."""
    budget = min(_TABLE_BYTES, _TOTAL_BYTES // tables)
    return min(rows, _ROWS, max(1, budget // _row_bytes(spec)))


def _size_bytes(spec: TableSpec, rows: int, tables: int) -> int:
    arrays = sample_arrays(spec, min(rows, 2 * _rows_of(spec, rows, tables)))
    return sum(array_bytes(*array) + ALIGNMENT_BYTES for array in arrays.values())


def _strata(rows: int, count: int) -> tuple[_Integers, _Integers]:
    """Starts and widths of `count` parts of nearly the same size, or of as many as there are rows.

    One row of each part: ascending, without duplicates, and spread over the whole.
    """
    count = min(rows, count)
    edges = np.arange(count + 1) * rows // max(count, 1)
    return edges[:-1], np.diff(edges)


def _draw(starts: _Integers, widths: _Integers, seed: int) -> _Integers:
    """One position of each part, by a hash of its number (SplitMix64, Steele et al., OOPSLA 2014).

    Training waits for it, and a generator of numpy takes five times as long to be made. Widths are
    below 2^48, so that the remainder favours no position by more than 2^-16 of its chance.
    """
    words = np.arange(1, len(starts) + 1, dtype=np.uint64)
    words *= np.uint64(0x9E3779B97F4A7C15)
    words += np.uint64(seed % 2**64)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        words ^= words >> np.uint64(shift)
        words *= np.uint64(factor)
    words ^= words >> np.uint64(31)
    return starts + (words % widths.astype(np.uint64)).astype(np.int64)


def _digests(rows: StagedRows, first_row: int) -> Tensor:
    ids: Tensor | int = first_row if rows.ids is None else rows.ids + first_row
    arrays = (rows.arrays[0][:, :0].contiguous(), *rows.arrays)
    found = [row_digest.digest(array, ids) for array in arrays]
    return torch.from_numpy(np.array(found, np.uint64).view(np.int64))
