"""Validates a table: decodes its rows, newest first; compares them with the trainer's sample.

Compares decoded rows with the trainer's, within the bounds of their scheme (format §10). The bounds
hold for any method of finding scale and offset, because all methods take the code nearest to a
value; and a search's squared error is at most the error of the formula (format §3.2).

Reads the samples that a trainer recorded of its tables (format §3.6).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import torch
from torch import Tensor

from recpoint.catalog.restore.base_rows import BaseRows, base_entries, decoded_values, sum_of
from recpoint.catalog.restore.chunks import ChunkSource, StoredRows, read_chunk, read_rows
from recpoint.catalog.restore.coded_state import CodedState, StoredState, state_values
from recpoint.catalog.restore.rows import RowCoverage, SeenRows
from recpoint.catalog.run.lineage import Representation
from recpoint.catalog.store.scheduler import ReadScheduler
from recpoint.errors import FormatError, MalformedObject, ObjectNotFound
from recpoint.format.chunk import Section, section_tensor
from recpoint.format.dtypes import Dtype, dtype_name, torch_dtype
from recpoint.format.manifest import ChunkEntry, Manifest, RowStateSpec, TableSpec
from recpoint.format.row_state import to_bfloat16
from recpoint.format.validation import TableDigests
from recpoint.kernels import moments, quantize, row_digest

__all__ = [
    "DecodedRows",
    "TrainedRows",
    "RowValidation",
    "Sampled",
    "Unequal",
    "compare",
    "decode_samples",
    "read_samples",
]


#: Relative error of eight binary32 roundings: twice the roundings of the quotient, the code and the
#: decoded value (README of kernels/quantize).
_ROUNDINGS: Final = 8 * 2.0**-24
#: Half a unit in the last place of a table's dtype: relative to the value, and its minimum.
_HALF_UNITS: Final = {"F16": (2.0**-11, 2.0**-25), "BF16": (2.0**-8, 2.0**-134)}
#: Relative error allowed for summing squares in binary64.
_SUMS: Final = 1e-6


class TrainedRows(NamedTuple):
    """Rows as a trainer had them: values [n, dim] of the table's dtype, row states [n, …]."""

    values: Tensor
    row_states: tuple[Tensor, ...]


@dataclass(frozen=True, kw_only=True)
class DecodedRows:
    """Rows decoded from a chunk.

    Attributes:
        values: decoded, [n, dim], of the table's dtype.
        row_states: decoded, [n, …] each, of the table's dtypes.
        bits: bits of a code; of a value if the rows are stored exactly.
        scale: f32 [n]; None if the rows are stored exactly.
        offset: f32 [n]; None if the rows are stored exactly.
        symmetric: whether the method may have been `symmetric`, which has a larger error.
        narrow: for each row state, its array's dtype if that is BF16 or codes; None: as it is.
        base: the rows that residuals were added to, [n, dim]; None if the rows are no residuals.
    """

    values: Tensor
    row_states: tuple[Tensor, ...]
    bits: int
    scale: Tensor | None
    offset: Tensor | None
    symmetric: bool
    narrow: tuple[Dtype | None, ...]
    base: Tensor | None = None

    def __getitem__(self, positions: Tensor) -> DecodedRows:
        """Return the rows at `positions`, int64 [m]."""
        return DecodedRows(
            values=self.values[positions],
            row_states=tuple(state[positions] for state in self.row_states),
            bits=self.bits,
            scale=None if self.scale is None else self.scale[positions],
            offset=None if self.offset is None else self.offset[positions],
            symmetric=self.symmetric,
            narrow=self.narrow,
            base=None if self.base is None else self.base[positions],
        )


class Difference(NamedTuple):
    """A row whose decoded contents exceed the bound; `position` counts the compared rows."""

    position: int
    what: str
    found: str
    expected: str
    bound: str


class Compared(NamedTuple):
    """The result of a comparison: the differences, and the largest error divided by its bound."""

    differences: list[Difference]
    worst: float


def compare(spec: TableSpec, exact: TrainedRows, stored: DecodedRows) -> Compared:
    """Compare n rows of the trainer with the same rows as stored."""
    if stored.scale is None or stored.offset is None:
        values = Compared(_bits_differ("values", exact.values, stored.values), 0.0)
    else:
        values = _quantized(spec, exact.values, stored, stored.scale, stored.offset)
    differences = list(values.differences)
    trained = zip(spec.row_states, exact.row_states, strict=True)
    as_stored = zip(stored.row_states, stored.narrow, strict=True)
    for (state, values_at_cut), (decoded, dtype) in zip(trained, as_stored, strict=True):
        label = f"row state {state.name}"
        expected = values_at_cut if dtype is None else _narrowed(state, values_at_cut, dtype)
        differences += _bits_differ(label, expected, decoded, any_nan=dtype == "BF16")
    return Compared(differences, values.worst)


def _narrowed(state: RowStateSpec, rows: Tensor, dtype: Dtype) -> Tensor:
    """Return what rows of a state decode to: the format fixes the rounding (§3.5)."""
    if not state.is_coded(dtype):
        return to_bfloat16(rows).to(rows.dtype)
    coded = moments.encode(rows.reshape(len(rows), -1))
    expected = moments.decode(coded.codes, coded.grids).view(rows.shape)
    expected[coded.refused] = rows[coded.refused]  # which no code decodes to
    return expected


def _quantized(
    spec: TableSpec, values: Tensor, stored: DecodedRows, scale: Tensor, offset: Tensor
) -> Compared:
    x, decoded = values.double(), stored.values.double()
    trained = values
    if stored.base is not None:  # the bound is of residuals (format §3.7)
        values = values.to(torch.float32) - stored.base.to(torch.float32)
        x, decoded = values.double(), decoded - stored.base.double()
    step, low = scale.double()[:, None], offset.double()[:, None]
    span = step * (2**stored.bits - 1)
    # The nearest code is at most half a step away, or at the end if the value lies beyond the end.
    beyond = torch.maximum(low - x, x - (low + span)).clamp(min=0.0)
    slack = _ROUNDINGS * torch.maximum(torch.maximum(x.abs(), low.abs()), span)
    if stored.base is not None:
        sums = torch.maximum(x.abs(), stored.values.double().abs())
        slack = slack + 2 * 2.0**-24 * torch.maximum(sums, trained.double().abs())
    if spec.dtype in _HALF_UNITS:
        relative, least = _HALF_UNITS[spec.dtype]
        slack = slack + (relative * 1.01 * stored.values.double().abs()).clamp(min=least)
    bound = torch.maximum(step / 2, beyond) + slack
    error = (decoded - x).abs()
    differences = [
        _value_difference(int(row), trained, stored.values, error, bound)
        for row in torch.nonzero(~(error <= bound).all(dim=1)).flatten()
    ]
    # A constant row (scale 0) must be restored bit for bit; a constant residual is added once.
    constant = torch.nonzero(scale == 0).flatten()
    expected = trained[constant]
    if stored.base is not None:
        expected = sum_of(stored.base[constant], values[constant])
    for difference in _bits_differ("values", expected, stored.values[constant]):
        differences.append(difference._replace(position=int(constant[difference.position])))
    of_rows = error.square().sum(dim=1).sqrt()
    most = _plain_error(values, stored) * (1 + _SUMS) + slack.square().sum(dim=1).sqrt()
    for row in torch.nonzero(of_rows > most).flatten().tolist():
        differences.append(
            Difference(
                row,
                "values",
                f"a root of squared errors of {float(of_rows[row]):.9g}",
                "at most the error of the formula in format §3.2",
                f"{float(most[row]):.9g}",
            )
        )
    finite = error / bound.clamp(min=torch.finfo(torch.float64).tiny)
    worst = float(finite.nan_to_num(nan=torch.inf).max()) if finite.numel() else 0.0
    one_each = {difference.position: difference for difference in reversed(differences)}
    return Compared([one_each[row] for row in sorted(one_each)], worst)


def _plain_error(values: Tensor, stored: DecodedRows) -> Tensor:
    """Return the root of the summed squared errors of the plain formula for each row: f64 [n].

    It is infinite for a row that the formula cannot quantize, which may be a row that was restored
    from codes and not trained since.
    """
    rows = values.to(torch.float32).contiguous()
    methods = [quantize.ASYMMETRIC] + ([quantize.SYMMETRIC] if stored.symmetric else [])
    worst = torch.zeros(len(rows), dtype=torch.float64, device="cpu")
    for method in methods:
        for half in (False, True):  # parameters may be stored as F32 or F16
            packed, scale, offset, refused, _ = quantize.quantize_packed(
                rows, stored.bits, method, half_parameters=half
            )
            decoded = quantize.dequantize_packed(
                packed, scale, offset, dim=rows.shape[1], bits=stored.bits
            )
            error = (decoded.double() - rows.double()).square().sum(dim=1).sqrt()
            worst = torch.maximum(worst, error.masked_fill(refused, torch.inf))
    return worst


def _value_difference(
    row: int, values: Tensor, decoded: Tensor, error: Tensor, bound: Tensor
) -> Difference:
    excess = (error[row] - bound[row]).nan_to_num(nan=torch.inf)
    column = int(excess.argmax())
    found_value, expected = float(decoded[row, column]), float(values[row, column])
    limit = float(bound[row, column])
    return Difference(
        row, f"values[{column}]", f"{found_value:.9g}", f"{expected:.9g}", f"{limit:.9g}"
    )


def _bits_differ(
    what: str, expected: Tensor, found: Tensor, *, any_nan: bool = False
) -> list[Difference]:
    """Return the rows whose bits differ; with `any_nan` all NaNs count as equal."""
    n = len(expected)
    if n == 0:
        return []
    flat_found, flat_expected = found.reshape(n, -1), expected.reshape(n, -1)
    is_equal = (
        (_raw(flat_found) == _raw(flat_expected)).reshape(n, flat_found.shape[1], -1).all(dim=2)
    )
    if any_nan:
        is_equal |= flat_found.isnan() & flat_expected.isnan()
    differences = []
    for row in torch.nonzero(~is_equal.all(dim=1)).flatten().tolist():
        column = int((~is_equal[row]).nonzero()[0])
        index = f"[{column}]" if flat_found.shape[1] > 1 else ""
        texts = (_text(flat_found[row, column]), _text(flat_expected[row, column]))
        differences.append(Difference(row, what + index, *texts, ""))
    return differences


def _raw(rows: Tensor) -> Tensor:
    return rows.contiguous().view(torch.uint8)


def _text(value: Tensor) -> str:
    """Return a number as text; a float with its bits, because two may print alike but differ."""
    if not value.is_floating_point():
        return str(value.item())
    return f"{float(value):.9g} ({bytes(reversed(_raw(value.reshape(1)).tolist())).hex()})"


_NEXT_STEP = "nothing: no restore reads samples, and a later checkpoint's sample may be good"


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """Rows of one table, exactly as they were when a checkpoint was cut.

    Attributes:
        ids: int64 [n], ascending, inside the table; a row is there more than once if several parts
            have sampled it, which only rows of embedding servers may be.
        values: [n, dim], of the table's dtype.
        row_states: one [n, …] for each row state of the table.
        digests: digests of the rows that the checkpoint itself stores: of their ids, their values,
            and each row state; None if it stores none.
    """

    ids: Tensor
    values: Tensor
    row_states: tuple[Tensor, ...]
    digests: tuple[int, ...] | None


def read_samples(
    source: ChunkSource, manifest: Manifest, reads: ReadScheduler
) -> dict[int, Sampled]:
    """Read the samples of a checkpoint, by table index; a table may have none.

    Raises:
        ObjectNotFound: a chunk is missing.
        FormatError: a chunk is damaged, or has rows that the table does not have.
        StoreError: a chunk could not be read.
    """
    entries = [entry for entry in manifest.chunks if entry.content == "sample"]
    read = reads.in_order(entries, lambda entry: read_chunk(source, manifest, entry))
    return decode_samples(manifest, ((entry, outcome.result().sections) for entry, outcome in read))


def decode_samples(
    manifest: Manifest, chunks: Iterable[tuple[ChunkEntry, dict[str, Section]]]
) -> dict[int, Sampled]:
    """Return the samples in the sample chunks of a checkpoint, by table index.

    Args:
        manifest: the checkpoint.
        chunks: entries of the sample chunks, each with the sections of the chunk by name; names
            and shapes have been checked.

    Raises:
        FormatError: a sample has rows that the table does not have, or a row or table twice.
    """
    samples: dict[int, dict[int, Sampled]] = {}
    for entry, sections in chunks:
        for name in sections:
            _, table, part = name.split(".", 2)
            if part != "ids":
                continue
            spec = manifest.tables[int(table)]
            of_ranks = samples.setdefault(int(table), {})
            if entry.rank in of_ranks:
                raise _malformed(entry.key, f"table {spec.name!r:.80} again", "each table once")
            of_ranks[entry.rank] = _sampled(entry.key, int(table), spec, sections)
    return {table: _of_all_ranks(manifest, table, samples[table]) for table in sorted(samples)}


def _of_all_ranks(manifest: Manifest, table: int, of_ranks: dict[int, Sampled]) -> Sampled:
    """Join the samples of a table that its parts have, and sum their digests (format §3.6)."""
    storing = {entry.rank for entry in manifest.chunks if entry.table == table}
    recorded_or_not = [of_ranks[rank].digests for rank in storing if rank in of_ranks]
    recorded = [digests for digests in recorded_or_not if digests is not None]
    total = None
    if recorded and len(recorded) == len(storing):
        total = tuple(sum(of_rank) % 2**64 for of_rank in zip(*recorded, strict=True))
    if len(of_ranks) == 1:
        (sampled,) = of_ranks.values()
        return replace(sampled, digests=total if storing else sampled.digests)
    samples = list(of_ranks.values())
    ids = torch.cat([sampled.ids for sampled in samples])
    order = ids.argsort()
    ids = ids[order]
    # Ranks may sample rows that they have read from servers, so that a row is there again: all of
    # its samples are compared.
    if manifest.servers is None and bool((ids[1:] == ids[:-1]).any()):
        spec = manifest.tables[table]
        key = Representation.of(manifest).key
        raise _malformed(key, f"a row of {spec.name!r:.80} in the samples of two ranks", "one rank")
    states = zip(*(sampled.row_states for sampled in samples), strict=True)
    return Sampled(
        ids=ids,
        values=torch.cat([sampled.values for sampled in samples])[order],
        row_states=tuple(torch.cat(state)[order] for state in states),
        digests=total,
    )


def _sampled(key: str, table: int, spec: TableSpec, sections: dict[str, Section]) -> Sampled:
    ids = section_tensor(sections[f"sample.{table}.ids"])
    ascending = bool((ids[1:] > ids[:-1]).all())
    if not ascending or int(ids[0]) < 0 or int(ids[-1]) >= spec.rows:
        text = f"ids from {int(ids[0])} to {int(ids[-1])}, {'' if ascending else 'not '}ascending"
        raise _malformed(key, text, f"ascending ids below {spec.rows}")
    digests = sections.get(f"sample.{table}.digests")
    return Sampled(
        ids=ids,
        values=section_tensor(sections[f"sample.{table}.values"]),
        row_states=tuple(
            section_tensor(sections[f"sample.{table}.state.{k}"])
            for k in range(len(spec.row_states))
        ),
        digests=None
        if digests is None
        else tuple(digest % 2**64 for digest in section_tensor(digests).tolist()),
    )


def _malformed(key: str, found: str, expected: str) -> MalformedObject:
    return MalformedObject(key, found=found, expected=expected, next_step=_NEXT_STEP)


_MASK = 2**64 - 1


class Unequal(NamedTuple):
    """A row that differs from the trainer's; `row` is None if it is not known which row differs."""

    row: int | None
    what: str
    found: str
    expected: str
    bound: str


class _Read(NamedTuple):
    rows: range | Tensor
    decoded: DecodedRows


class RowValidation:
    """Validates one table of one checkpoint.

    Args:
        source: where chunks are read from.
        links: the manifests whose chunks are read, newest first.
        table: index of the table in each of them.
        samples: the trainer's sample of the table for each link, if there is one.
        whole: whether the links are a whole chain, which holds every row.
        base: the full that residuals are added to.

    Attributes:
        rows_compared: number of sampled rows that were found and compared.
        worst: largest error of a value, divided by its bound.
        digests: digests of all rows, if `whole` and nothing was damaged.
    """

    def __init__(
        self,
        source: ChunkSource,
        links: Sequence[Manifest],
        table: int,
        samples: Sequence[Sampled | None],
        *,
        whole: bool,
        base: Manifest,
    ) -> None:
        self._base_manifest = base
        self._base = BaseRows(base, table, range(base.tables[table].rows))
        self._source = source
        self._links = links
        self._table = table
        self._spec = links[0].tables[table]
        self._samples = samples
        self._whole = whole
        # For each sample, the positions of its rows that no chunk so far has held.
        self._uncompared = [
            torch.arange(0 if s is None else len(s.ids), device="cpu") for s in samples
        ]
        # Within one link no row comes twice, so only several links need to remember rows.
        several = whole and len(links) > 1
        self._seen_rows = SeenRows(self._spec.rows) if several else None
        self._sums = [0] * (1 + len(self._spec.row_states))
        self.rows_compared = 0
        self.worst = 0.0
        self.digests: TableDigests | None = None

    def find_unequal(
        self, reads: ReadScheduler, on_chunk: Callable[[ChunkEntry], None]
    ) -> Iterator[Unequal | FormatError | ObjectNotFound]:
        """Read every chunk of the table, and yield differences and damage.

        Raises:
            StoreError: a chunk could not be read.
        """
        good = True
        for error in self._read_base(reads, on_chunk):
            good = False
            yield error
        for number in range(len(self._links) if good else 0):
            for unequal in self._look_at_link(reads, number, on_chunk):
                good = False
                yield unequal
        if self._whole and good:
            for position in self._uncompared[0].tolist():
                newest = self._samples[0]
                assert newest is not None  # `_uncompared` is empty without a sample
                yield Unequal(int(newest.ids[position]), "row", "no such row", "each row once", "")
            self.digests = TableDigests(
                table=self._table,
                values=f"{self._sums[0]:016x}",
                row_states=tuple(f"{value:016x}" for value in self._sums[1:]),
            )

    def _read_base(
        self, reads: ReadScheduler, on_chunk: Callable[[ChunkEntry], None]
    ) -> Iterator[FormatError | ObjectNotFound]:
        """Read the rows that residuals are added to, if there are any; yield damage."""
        entries = [entry for link in self._links for entry in link.chunks]
        if not any(e.scheme == "residual" and e.table == self._table for e in entries):
            return
        base = self._base_manifest
        needed_entries = base_entries(base, self._table, range(self._spec.rows))
        for entry, outcome in reads.in_order(
            needed_entries, lambda entry: read_rows(self._source, base, entry)
        ):
            try:
                self._base.add(outcome.result())
            except (FormatError, ObjectNotFound) as error:
                yield error
            else:
                on_chunk(entry)

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
        own_digests = _OwnDigests(len(self._spec.row_states))
        good = True
        for entry, outcome in reads.in_order(entries, lambda entry: self._read(link, entry)):
            try:
                read = outcome.result()
            except (FormatError, ObjectNotFound) as error:
                good = False
                # The rows of this chunk are unknown, so older versions of them cannot be told.
                self._uncompared = [positions[:0] for positions in self._uncompared]
                yield error
                continue
            coverage.add(read.rows)
            own_digests.add(read)
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
        # The digests are of the checkpoint's own rows; a consolidated link holds rows of several.
        if sampled is not None and sampled.digests is not None and link.stands_for is None:
            link_text = f"of step {link.step}"
            yield from own_digests.compare(
                sampled.digests, [s.name for s in self._spec.row_states], link_text
            )

    def _read(self, link: Manifest, entry: ChunkEntry) -> _Read:
        stored = read_rows(self._source, link, entry)
        try:
            return _Read(stored.rows, _decoded(stored, self._spec, link, entry, self._base))
        except ValueError as error:
            raise MalformedObject(
                entry.key,
                found=f"codes that do not decode ({error})",
                expected="format §3.2",
                next_step="recpoint check URL --level full, and restore an older checkpoint",
            ) from error

    def _compare(self, read: _Read, link: int, sample: int) -> Iterator[Unequal]:
        """Compare the rows of a sample that are in a chunk of `link` and in no newer one.

        Rows sampled before this link are not compared, because this link has replaced them.
        """
        sampled, positions = self._samples[sample], self._uncompared[sample]
        if sampled is None or not len(positions):
            return
        ids = sampled.ids[positions]
        rows = read.rows
        if isinstance(rows, range):
            places = ids - rows.start
            is_in_chunk = (places >= 0) & (places < len(rows))
        else:
            places = torch.searchsorted(rows, ids).clamp(max=len(rows) - 1)
            is_in_chunk = rows[places] == ids
        if not bool(is_in_chunk.any()):
            return
        positions_here = positions[is_in_chunk]
        self._uncompared[sample] = positions[~is_in_chunk]
        if sample > link:
            return
        exact = TrainedRows(
            sampled.values[positions_here],
            tuple(state[positions_here] for state in sampled.row_states),
        )
        compared = compare(self._spec, exact, read.decoded[places[is_in_chunk]])
        self.rows_compared += len(positions_here)
        self.worst = max(self.worst, compared.worst)
        sample_text = "" if sample == 0 else f" of the sample of step {self._links[sample].step}"
        for position, label, *texts in compared.differences:
            yield Unequal(int(sampled.ids[positions_here[position]]), label + sample_text, *texts)

    def _add_to_sums(self, read: _Read) -> None:
        """Digest the rows that no newer link has brought, which are the rows of a restore."""
        ids: Tensor | int = read.rows.start if isinstance(read.rows, range) else read.rows
        arrays: Sequence[Tensor] = (read.decoded.values, *read.decoded.row_states)
        claimed = None if self._seen_rows is None else self._seen_rows.claim(read.rows)
        if claimed is not None:
            ids = claimed + ids if isinstance(ids, int) else ids[claimed]
            arrays = [array[claimed] for array in arrays]
        for number, array in enumerate(arrays):
            total = self._sums[number] + row_digest.digest(array.contiguous(), ids)
            self._sums[number] = total & _MASK


class _OwnDigests:
    """Digests of the rows that one checkpoint stores of a table; None for arrays not exact."""

    def __init__(self, row_states: int) -> None:
        self._sums: list[int | None] = [0] * (2 + row_states)

    def add(self, read: _Read) -> None:
        """Add the rows of a chunk."""
        rows, decoded = read
        ids = rows.start if isinstance(rows, range) else rows
        exact = [True, decoded.scale is None, *(dtype is None for dtype in decoded.narrow)]
        arrays = (decoded.values[:, :0].contiguous(), decoded.values, *decoded.row_states)
        for number, (array, is_exact) in enumerate(zip(arrays, exact, strict=True)):
            sum_before = self._sums[number]
            if sum_before is None or not is_exact:
                self._sums[number] = None
                continue
            self._sums[number] = (sum_before + row_digest.digest(array.contiguous(), ids)) & _MASK

    def compare(
        self, recorded: Sequence[int], states: Sequence[str], link_text: str
    ) -> Iterator[Unequal]:
        """Yield the digests that differ from the recorded ones."""
        names = ["row ids", "values", *(f"row state {name}" for name in states)]
        for name, computed, expected in zip(names, self._sums, recorded, strict=True):
            if computed is not None and computed != expected:
                label = f"digest of the {name} {link_text}"
                yield Unequal(None, label, f"{computed:016x}", f"{expected:016x}", "")


def _narrower_dtype(state: RowStateSpec, stored: StoredState) -> Dtype | None:
    dtype = "U8" if isinstance(stored, CodedState) else dtype_name(stored.dtype)
    return None if dtype == state.dtype else dtype


def _decoded(
    stored: StoredRows, spec: TableSpec, link: Manifest, entry: ChunkEntry, base: BaseRows
) -> DecodedRows:
    is_exact = stored.scheme == "exact"
    base_values = None
    if stored.scheme == "residual":
        rows = stored.rows
        ids = torch.arange(rows.start, rows.stop, device="cpu") if isinstance(rows, range) else rows
        base_values = base.values_of(ids)
        values = sum_of(base_values, base.residuals(stored))
    else:
        values = decoded_values(stored, spec)
    states = zip(spec.row_states, stored.row_states, strict=True)
    # A consolidated manifest names only the newest method; its older rows may have any method.
    quantizers = link.quantizers if link.stands_for is None else ()
    methods = {(quantizer.table, quantizer.rank): quantizer.method for quantizer in quantizers}
    return DecodedRows(
        values=values,
        row_states=tuple(state_values(part).to(torch_dtype(state.dtype)) for state, part in states),
        bits=stored.bits,
        scale=None if is_exact else stored.scale,
        offset=None if is_exact else stored.offset,
        symmetric=methods.get((entry.table or 0, entry.rank), "symmetric") == "symmetric",
        narrow=tuple(
            _narrower_dtype(state, part)
            for state, part in zip(spec.row_states, stored.row_states, strict=True)
        ),
        base=base_values,
    )
