"""Validating one table: its chunks decoded, newest first, and compared with what was recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from recpoint.catalog.chunks.chunk_reader import StoredRows, read_rows
from recpoint.catalog.chunks.chunk_source import ChunkSource
from recpoint.catalog.chunks.row_coverage import RowCoverage
from recpoint.catalog.chunks.seen_rows import SeenRows
from recpoint.catalog.runs.lineage import Representation
from recpoint.catalog.stores.io_scheduler import ReadScheduler
from recpoint.catalog.validation.row_comparison import DecodedRows, ExactRows, compare
from recpoint.catalog.validation.sampled_rows import Sampled
from recpoint.errors import FormatError, MalformedObject, ObjectNotFound
from recpoint.format.dtypes import torch_dtype
from recpoint.format.manifest import ChunkEntry, Manifest, TableSpec
from recpoint.format.validation import TableDigests
from recpoint.kernels import quantize, row_digest

__all__ = ["RowValidation", "Unequal"]

_MASK = 2**64 - 1


class Unequal(NamedTuple):
    """Rows that are not what they were; `row` None: it is not known which."""

    row: int | None
    what: str
    found: str
    expected: str
    bound: str


class _Read(NamedTuple):
    rows: range | Tensor
    decoded: DecodedRows


class RowValidation:
    """One table of one checkpoint.

    Args:
        source: where the chunks are.
        links: the manifests to look at, newest first.
        table: index of the table in each of them.
        samples: of each link, what its trainer recorded of the table.
        whole: the links are a whole chain, so that every row is there.

    Attributes:
        rows_compared: sampled rows that were found and compared.
        worst: largest error of a value, as a part of its bound.
        digests: of all rows, when `whole` and nothing was damaged.
    """

    def __init__(
        self,
        source: ChunkSource,
        links: Sequence[Manifest],
        table: int,
        samples: Sequence[Sampled | None],
        *,
        whole: bool,
    ) -> None:
        self._source = source
        self._links = links
        self._table = table
        self._spec = links[0].tables[table]
        self._samples = samples
        self._whole = whole
        # Of each sample, the positions of the rows that were not met yet.
        self._left = [torch.arange(0 if s is None else len(s.ids), device="cpu") for s in samples]
        # Of one link no row comes twice, so that nothing has to be remembered.
        several = whole and len(links) > 1
        self._seen = SeenRows(self._spec.rows) if several else None
        self._sums = [0] * (1 + len(self._spec.row_states))
        self.rows_compared = 0
        self.worst = 0.0
        self.digests: TableDigests | None = None

    def find_unequal(
        self, reads: ReadScheduler, on_chunk: Callable[[ChunkEntry], None]
    ) -> Iterator[Unequal | FormatError | ObjectNotFound]:
        """Read every chunk of the table, and tell what is wrong.

        Raises:
            StoreError: a chunk could not be read.
        """
        good = True
        for number in range(len(self._links)):
            for found in self._look_at_link(reads, number, on_chunk):
                good = False
                yield found
        if self._whole and good:
            for position in self._left[0].tolist():
                newest = self._samples[0]
                assert newest is not None  # there are positions only of a sample
                yield Unequal(int(newest.ids[position]), "row", "no such row", "each row once", "")
            self.digests = TableDigests(
                table=self._table,
                values=f"{self._sums[0]:016x}",
                row_states=tuple(f"{value:016x}" for value in self._sums[1:]),
            )

    def _look_at_link(
        self,
        reads: ReadScheduler,
        number: int,
        on_chunk: Callable[[ChunkEntry], None],
    ) -> Iterator[Unequal | FormatError | ObjectNotFound]:
        link, sampled = self._links[number], self._samples[number]
        entries = [entry for entry in link.chunks if entry.table == self._table]
        counts = [entry.row_count or 0 for entry in entries]
        coverage = RowCoverage(rows=self._spec.rows, row_counts=counts)
        own = _OwnDigests(len(self._spec.row_states))
        good = True
        for entry, outcome in reads.in_order(entries, lambda entry: self._read(link, entry)):
            try:
                read = outcome.result()
            except (FormatError, ObjectNotFound) as error:
                good = False
                # Which rows it would have brought is not known: older ones are no substitute.
                self._left = [left[:0] for left in self._left]
                yield error
                continue
            coverage.add(read.rows)
            own.add(read)
            for sample in range(len(self._samples)):
                yield from self._compare(read, number, sample)
            if self._whole:
                self._add_to_sums(read)
            on_chunk(entry)
        if not good:
            return
        try:
            coverage.finish(key=Representation.of(link).key, table=self._spec.name)
        except FormatError as error:
            yield error
            return
        # A consolidated link holds the rows of several checkpoints.
        if sampled is not None and sampled.digests is not None and link.stands_for is None:
            where = f"of step {link.step}"
            yield from own.compare(sampled.digests, [s.name for s in self._spec.row_states], where)

    def _read(self, link: Manifest, entry: ChunkEntry) -> _Read:
        stored = read_rows(self._source, link, entry)
        try:
            return _Read(stored.rows, _decoded(stored, self._spec, link, entry))
        except ValueError as error:
            raise MalformedObject(
                entry.key,
                found=f"codes that do not decode ({error})",
                expected="format §3.2",
                next_step="recpoint check URL --level full, and restore an older checkpoint",
            ) from error

    def _compare(self, read: _Read, link: int, sample: int) -> Iterator[Unequal]:
        """Compare the rows of a sample that are in a chunk of `link`, and in no newer one.

        What was sampled before this link was written, it has replaced: that is not compared.
        """
        sampled, left = self._samples[sample], self._left[sample]
        if sampled is None or not len(left):
            return
        ids = sampled.ids[left]
        rows = read.rows
        if isinstance(rows, range):
            at = ids - rows.start
            there = (at >= 0) & (at < len(rows))
        else:
            at = torch.searchsorted(rows, ids).clamp(max=len(rows) - 1)
            there = rows[at] == ids
        if not bool(there.any()):
            return
        here = left[there]
        self._left[sample] = left[~there]
        if sample > link:
            return
        exact = ExactRows(sampled.values[here], tuple(state[here] for state in sampled.row_states))
        compared = compare(self._spec, exact, read.decoded[at[there]])
        self.rows_compared += len(here)
        self.worst = max(self.worst, compared.worst)
        of = "" if sample == 0 else f" of the sample of step {self._links[sample].step}"
        for position, what, *texts in compared.differences:
            yield Unequal(int(sampled.ids[here[position]]), what + of, *texts)

    def _add_to_sums(self, read: _Read) -> None:
        """Digest the rows that no newer link has brought: those that a restore would give."""
        ids: Tensor | int = read.rows.start if isinstance(read.rows, range) else read.rows
        arrays: Sequence[Tensor] = (read.decoded.values, *read.decoded.row_states)
        at = None if self._seen is None else self._seen.claim(read.rows)
        if at is not None:
            ids = at + ids if isinstance(ids, int) else ids[at]
            arrays = [array[at] for array in arrays]
        for number, array in enumerate(arrays):
            total = self._sums[number] + row_digest.digest(array.contiguous(), ids)
            self._sums[number] = total & _MASK


class _OwnDigests:
    """Digests of the rows that one checkpoint stores of a table, as far as they are exact."""

    def __init__(self, row_states: int) -> None:
        self._sums: list[int | None] = [0] * (2 + row_states)

    def add(self, read: _Read) -> None:
        """Take in a chunk."""
        rows, decoded = read
        ids = rows.start if isinstance(rows, range) else rows
        exact = [True, decoded.scale is None, *(not narrow for narrow in decoded.narrow)]
        arrays = (decoded.values[:, :0].contiguous(), decoded.values, *decoded.row_states)
        for number, (array, is_exact) in enumerate(zip(arrays, exact, strict=True)):
            before = self._sums[number]
            if before is None or not is_exact:
                self._sums[number] = None
                continue
            self._sums[number] = (before + row_digest.digest(array.contiguous(), ids)) & _MASK

    def compare(
        self, recorded: Sequence[int], states: Sequence[str], where: str
    ) -> Iterator[Unequal]:
        """What is not as it was recorded."""
        names = ["row ids", "values", *(f"row state {name}" for name in states)]
        for name, found, expected in zip(names, self._sums, recorded, strict=True):
            if found is not None and found != expected:
                what = f"digest of the {name} {where}"
                yield Unequal(None, what, f"{found:016x}", f"{expected:016x}", "")


def _decoded(stored: StoredRows, spec: TableSpec, link: Manifest, entry: ChunkEntry) -> DecodedRows:
    values, scale, offset = stored.values, None, None
    if stored.scheme != "exact":
        scale, offset = stored.scale, stored.offset
        rows = quantize.dequantize_packed(values, scale, offset, dim=spec.dim, bits=stored.bits)
        values = rows.to(torch_dtype(spec.dtype))  # rounds, format §3.2
    states = zip(spec.row_states, stored.row_states, strict=True)
    # A consolidated manifest tells the newest method of its rows; older ones may be of any.
    quantizers = link.quantizers if link.stands_for is None else ()
    known = {(one.table, one.rank): one.method for one in quantizers}
    return DecodedRows(
        values=values,
        row_states=tuple(part.to(torch_dtype(state.dtype)) for state, part in states),
        bits=stored.bits,
        scale=scale,
        offset=offset,
        symmetric=known.get((entry.table or 0, entry.rank), "symmetric") == "symmetric",
        narrow=tuple(
            part.dtype != torch_dtype(state.dtype)
            for state, part in zip(spec.row_states, stored.row_states, strict=True)
        ),
    )
