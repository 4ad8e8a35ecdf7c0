"""The sample: a few rows of each table, exactly as they are at a cut.

The checkpoint is compared with it later. Some rows are drawn from all that a rank holds, whichever
checkpoint stored them, so they also show a change that nobody marked. Other rows are drawn from
those that are staged. `place_sample` draws these, and digests all staged rows (format §3.6).
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from recpoint.catalog.staging.slot import ALIGNMENT_BYTES, Placed, place_behind
from recpoint.format.chunk import sample_arrays
from recpoint.format.dtypes import array_bytes, dtype_name, item_bytes
from recpoint.format.job import StagedTable
from recpoint.format.manifest import TableSpec
from recpoint.format.state_values import booleans
from recpoint.kernels import row_digest

__all__ = ["Sample", "Sampler", "StagedRows", "place_sample", "spread_rows"]

#: The most rows of a table from each of the two sources, and the most bytes that they take: a
#: sample must be small compared with any increment.
_ROWS: Final = 64
_TABLE_BYTES: Final = 16 << 10
#: The most bytes over all tables, if there are many.
_TOTAL_BYTES: Final = 16 << 20

_Integers = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, kw_only=True, eq=False)
class StagedRows:
    """The rows of one table that a snapshot stages, as arrays in its slot.

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
        seed: derived from the attempt's name, so that every process draws the same rows.
        specs: for each table, its spec.
        first_rows: for each table, the position in the whole table of the first row held here.
            Stored positions count from the start of the whole table, all others from this row.
        ids: for each table, int64 [n], ascending: rows drawn from all rows held here.
        size_bytes: the most bytes that the sample takes in the slot.
        arrays: for each table, values and row states of these rows; filled by whoever
            copies them.
    """

    seed: int
    specs: tuple[TableSpec, ...]
    first_rows: tuple[int, ...]
    ids: tuple[Tensor, ...]
    size_bytes: int
    arrays: list[tuple[Tensor, ...]] = field(default_factory=list)

    def parts(self, staged: Sequence[StagedRows | None]) -> Iterator[tuple[str, Tensor]]:
        """Yield name and content of each array of format §3.6; the device must be drained.

        Args:
            staged: for each table, the rows that the snapshot stages; None: no row.
        """
        for index, (spec, rows) in enumerate(zip(self.specs, staged, strict=True)):
            ids, arrays = self.ids[index], self.arrays[index]
            if rows is not None and rows.ids is not None:
                strata = _strata(len(rows.ids), _rows_of(spec, spec.rows, len(self.specs)))
                drawn_places = torch.from_numpy(_draw(*strata, self.seed + 1 + index))
                # A row drawn from both sources is the same in both, so the first copy is kept.
                joined_ids, first = np.unique(
                    torch.cat([ids, rows.ids[drawn_places]]).numpy(), return_index=True
                )
                kept_places = torch.from_numpy(first)
                ids = torch.from_numpy(joined_ids)
                pairs = zip(arrays, rows.arrays, strict=True)
                arrays = tuple(
                    torch.cat([live, drawn[drawn_places]])[kept_places] for live, drawn in pairs
                )
            if not len(ids):
                continue  # this rank holds no row of the table
            first_row = self.first_rows[index]
            named = zip(sample_arrays(spec, len(ids)), (ids + first_row, *arrays), strict=False)
            for name, array in named:
                yield f"sample.{index}.{name}", array
            if rows is not None:
                yield f"sample.{index}.digests", _digests(rows, first_row)


class Sampler:
    """Draws samples; computes what depends only on the tables once."""

    def __init__(self) -> None:
        self._specs: tuple[TableSpec, ...] | None = None
        self._starts = self._widths = np.empty(0, np.int64)
        self._counts: list[int] = []
        self._size_bytes = 0

    def draw(self, specs: Sequence[TableSpec], held: Sequence[range], attempt: str) -> Sample:
        """Draw rows of each table for the snapshot `attempt`.

        Args:
            specs: specs of all tables.
            held: for each table, the rows held here.
            attempt: name of the attempt, hexadecimal.
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
        """Return the most bytes that a sample takes in a slot; arguments as for `draw`."""
        self._follow(tuple(specs), held)
        return self._size_bytes

    def _follow(self, specs: tuple[TableSpec, ...], held: Sequence[range]) -> None:
        last_specs = self._specs
        # Compared by identity: a cutter keeps its specs, and comparing field by field takes long.
        if (
            last_specs
            and len(last_specs) == len(specs)
            and all(map(operator.is_, last_specs, specs))
        ):
            return
        tables = [(spec, len(rows)) for spec, rows in zip(specs, held, strict=True)]
        strata = [_strata(rows, _rows_of(spec, rows, len(specs))) for spec, rows in tables]
        self._starts = np.concatenate([starts for starts, _ in strata] or [self._starts[:0]])
        self._widths = np.concatenate([widths for _, widths in strata] or [self._widths[:0]])
        self._counts = [len(starts) for starts, _ in strata]
        self._size_bytes = sum(_size_bytes(spec, rows, len(specs)) for spec, rows in tables)
        self._specs = specs


def spread_rows(rows: int, count: int, seed: int) -> Tensor:
    """Draw `count` of the positions 0 … `rows` - 1, or all of them if there are fewer.

    The positions are divided into `count` parts of nearly the same size; one is drawn from each.

    Returns:
        int64 [n], ascending.
    """
    return torch.from_numpy(_draw(*_strata(rows, count), seed))


def _row_bytes(spec: TableSpec) -> int:
    states = sum(array_bytes(state.dtype, state.shape) for state in spec.row_states)
    return spec.dim * item_bytes(spec.dtype) + states


def _rows_of(spec: TableSpec, rows: int, tables: int) -> int:
    """Return how many of `rows` rows of a table are drawn from one source."""
    budget = min(_TABLE_BYTES, _TOTAL_BYTES // tables)
    return min(rows, _ROWS, max(1, budget // _row_bytes(spec)))


def _size_bytes(spec: TableSpec, rows: int, tables: int) -> int:
    arrays = sample_arrays(spec, min(rows, 2 * _rows_of(spec, rows, tables)))
    return sum(array_bytes(*array) + ALIGNMENT_BYTES for array in arrays.values())


def _strata(rows: int, count: int) -> tuple[_Integers, _Integers]:
    """Return starts and widths of `count` parts of nearly the same size; at most one for each row.

    One row drawn from each part gives rows that ascend, have no duplicates and spread over all.
    """
    count = min(rows, count)
    edges = np.arange(count + 1) * rows // max(count, 1)
    return edges[:-1], np.diff(edges)


def _draw(starts: _Integers, widths: _Integers, seed: int) -> _Integers:
    """Draw a position of each part by a hash of its number.

    The hash is SplitMix64 (Steele et al., OOPSLA 2014). Training waits for this, and making a numpy
    generator would take five times as long. Widths are below 2^48, so the remainder favours no
    position by more than 2^-16 of its probability.
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
    digests = [row_digest.digest(array, ids) for array in arrays]
    return torch.from_numpy(np.array(digests, np.uint64).view(np.int64))


def place_sample(
    sample: Sample, tables: Sequence[StagedTable], placed: Sequence[Placed], data: Tensor, end: int
) -> tuple[tuple[Placed, ...], int]:
    """Write a sample into a slot, behind what lies there.

    Booleans are normalized first, so that the sample, its digests and the chunk hold the same
    bytes.

    Args:
        sample: the sample, with the rows that were drawn from all.
        tables: the tables as the job describes them.
        placed: places of their arrays, and of the state.
        data: the slot's bytes, uint8 [n].
        end: first byte behind all of these.

    Returns:
        The places of the sample's arrays, and the first byte behind them.
    """
    views = {spot.name: spot.view(data) for spot in placed}
    for spot in placed:
        if spot.dtype == "BOOL":
            views[spot.name].copy_(booleans(views[spot.name]))
    staged: list[StagedRows | None] = []
    for index, table in enumerate(tables):
        names = [f"t{index}.values"]
        names += [f"t{index}.state.{number}" for number in range(len(table.spec.row_states))]
        if table.row_count == 0 or table.codes:  # the slot has no values to sample and digest
            staged.append(None)
            continue
        arrays = tuple(views[name] for name in names)
        staged.append(StagedRows(ids=views.get(f"t{index}.ids"), arrays=arrays))
    sampled: list[Placed] = []
    for name, array in sample.parts(staged):
        array = booleans(array) if array.dtype == torch.bool else array
        spot = place_behind(name, dtype_name(array.dtype), tuple(array.shape), end)
        spot.view(data).copy_(array)
        sampled.append(spot)
        end = spot.end
    return tuple(sampled), end
