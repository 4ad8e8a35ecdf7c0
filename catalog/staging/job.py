"""Opens a staged job for reading, and checks its slot against what the job says lies in it."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

import crc32c

from recpoint.catalog.staging import owned
from recpoint.catalog.staging.area import StagedRun
from recpoint.catalog.staging.slot_reading import NEXT, Extent, area_of, read_pieces
from recpoint.errors import DigestMismatch, MalformedObject, StagingError
from recpoint.format.chunk import MAX_SAMPLE_ROWS, sample_arrays
from recpoint.format.dtypes import Dtype, array_bytes, item_bytes
from recpoint.format.job import Job, Segment, StagedTable
from recpoint.format.manifest import CODE_BITS, ChosenMethod
from recpoint.kernels.bit_packing.widths import packed_width
from recpoint.kernels.quantize import Method
from recpoint.kernels.quantize.method import MethodName

__all__ = [
    "CodeArray",
    "StagedJob",
    "code_name",
    "ids_name",
    "kernel_method",
    "open_slot",
    "sample_name",
    "state_name",
    "values_name",
]


#: The arrays that a slot has instead of a table's values if the trainer has quantized it.
CodeArray = Literal["codes", "scale", "offset", "wide", "exact_at", "exact"]


def ids_name(table: int) -> str:
    """Return the name of the segment with a table's row ids."""
    return f"t{table}.ids"


def values_name(table: int) -> str:
    """Return the name of the segment with the values of a table's rows."""
    return f"t{table}.values"


def code_name(table: int, array: CodeArray) -> str:
    """Return the name of the segment with one array of a table's codes (format §7)."""
    return f"t{table}.{array}"


def state_name(table: int, state: int) -> str:
    """Return the name of the segment with one row state of a table's rows."""
    return f"t{table}.state.{state}"


def sample_name(table: int, part: str) -> str:
    """Return the name of the segment, and of the chunk's tensor, of one part of a table's sample.

    See format §3.6.
    """
    return f"sample.{table}.{part}"


@dataclass(frozen=True, kw_only=True)
class StagedJob:
    """A job whose slot exists, is long enough, and has the segments that its tables need.

    The slot is read with `pread` and never mapped. So a failing disk or a truncated file is an
    error of one job; with a mapping it would kill the agent (SIGBUS). Resident memory does not grow
    with the slot either.
    """

    path: Path
    job: Job
    slot: Path
    segments: dict[str, Segment]

    @property
    def spool(self) -> Path:
        """Directory for this job's encoded parts; the first writer makes it."""
        return StagedRun.of_job(self.path).spool_directory / self.path.stem

    def extent(self, name: str, *, first: int = 0, count: int | None = None) -> Extent:
        """Return where `count` entries of a segment lie, from entry `first` on.

        Args:
            name: the segment's name.
            first: index in the segment's first dimension.
            count: number of entries; None: all from `first` on.

        Raises:
            KeyError: there is no such segment.
            ValueError: the segment does not have these entries.
        """
        segment = self.segments[name]
        entries = segment.shape[0] if segment.shape else 1
        count = entries - first if count is None else count
        if not 0 <= first <= first + count <= entries:
            raise ValueError(f"{name}: entries {first} to {first + count} of {entries}")
        each = segment.bytes // entries if entries else 0
        return Extent(str(self.slot), segment.offset + first * each, count * each)

    def verify(self) -> None:
        """Read every segment and compare its crc32c.

        Raises:
            DigestMismatch: the slot no longer holds what was staged.
            StagingError: the slot cannot be read.
        """
        for segment in self.job.segments:
            found = 0
            for piece in read_pieces(Extent(str(self.slot), segment.offset, segment.bytes)):
                found = crc32c.crc32c(piece, found)
            if found != segment.crc32c:
                raise DigestMismatch(
                    f"{self.slot} ({segment.name})",
                    found=f"crc32c {found}",
                    expected=f"crc32c {segment.crc32c}",
                    next_step=NEXT,
                )


def open_slot(path: Path, job: Job) -> StagedJob:
    """Check that a job's slot exists and has the segments that its tables need; reads no data.

    Args:
        path: the job file.
        job: the job in it.

    Raises:
        FormatError: the segments are not those that the tables need.
        StagingError: the slot is missing, not a plain file, or too short.
        StagingRefused: the slot, or a directory above it, is not this user's own.
    """
    slot = StagedRun.of_job(path).slots_directory / job.slot
    if not job.slot.startswith(f"r{job.rank:05d}-"):
        raise _malformed(path, f"the slot {job.slot}", f"a slot of rank {job.rank}")
    try:
        status = owned.require_own(area_of(slot), slot)
    except OSError as error:
        raise _no_slot(slot, error.strerror or str(error), "the slot that the job names") from error
    if status is None:
        raise _no_slot(slot, os.strerror(errno.ENOENT), "the slot that the job names")
    if not stat.S_ISREG(status.st_mode):
        raise _no_slot(slot, "no plain file", "a slot, which is a plain file")
    if status.st_size < job.slot_bytes:
        raise _no_slot(slot, f"{status.st_size} bytes", f"at least {job.slot_bytes} bytes")
    segments = {segment.name: segment for segment in job.segments}
    _check_layout(path, job, dict(segments))
    return StagedJob(path=path, job=job, slot=slot, segments=segments)


def _check_layout(path: Path, job: Job, left: dict[str, Segment]) -> None:
    def take(name: str, dtype: Dtype | None, shape: tuple[int, ...] | None) -> None:
        segment = left.pop(name, None)
        if segment is None:
            raise _malformed(path, f"no segment {name}", "all segments of its tables and state")
        if dtype not in (None, segment.dtype) or shape not in (None, segment.shape):
            raise _malformed(
                path, f"{name} as {segment.dtype} {list(segment.shape)}", f"{dtype} {shape}"
            )
        try:
            length = array_bytes(segment.dtype, segment.shape)
        except ValueError as error:
            raise _malformed(path, f"{name}: {error}", "a shape that an array can have") from error
        if segment.bytes != length:
            raise _malformed(path, f"{name} of {segment.bytes} bytes", f"{length} bytes")

    for index, table in enumerate(job.tables):
        _check_table(path, table)
        _take_sample(index, job, left, take)
        rows, spec = table.row_count, table.spec
        first = code_name(index, "codes") if table.codes else values_name(index)
        if rows == 0 and first not in left:
            continue  # a table without a dirty row needs no segments
        if not table.all_rows:
            take(ids_name(index), "I64", (rows,))
        if table.codes:
            _take_codes(index, table, take, left)
        else:
            take(values_name(index), spec.dtype, (rows, spec.dim))
        for number, state in enumerate(spec.row_states):
            take(state_name(index, number), state.dtype, (rows, *state.shape))
    if not job.has_state:
        if left:
            raise _malformed(path, f"segment {min(left)}", "rows and samples of tables alone")
        return
    take("tree", "U8", None)
    number = 0
    while left:
        take(f"tensor.{number}", None, None)
        number += 1


def _take_sample(
    index: int,
    job: Job,
    left: dict[str, Segment],
    take: Callable[[str, Dtype, tuple[int, ...]], None],
) -> None:
    """Take the segments of a table's sample, which is optional (format §3.6).

    A rank may sample rows that it has read from embedding servers, and holds none itself.
    """
    ids, table = left.get(sample_name(index, "ids")), job.tables[index]
    if ids is None or (table.shard_rows == 0 and job.servers is None):
        return
    rows = ids.shape[0] if len(ids.shape) == 1 else 0
    # Limited to possible numbers of rows, so that `take` refuses a sample of any other number.
    rows = min(max(rows, 1), MAX_SAMPLE_ROWS)
    for part, (dtype, shape) in sample_arrays(table.spec, rows).items():
        if part != "digests" or sample_name(index, part) in left:
            take(sample_name(index, part), dtype, shape)


def _take_codes(
    index: int,
    table: StagedTable,
    take: Callable[[str, Dtype | None, tuple[int, ...] | None], None],
    left: Mapping[str, Segment],
) -> None:
    rows, spec = table.row_count, table.spec
    take(code_name(index, "codes"), "U8", (rows, packed_width(spec.dim, table.bits)))
    take(code_name(index, "scale"), "F32", (rows,))
    take(code_name(index, "offset"), "F32", (rows,))
    take(code_name(index, "wide"), "BOOL", (rows,))
    exact_at = left.get(code_name(index, "exact_at"))
    shape = (0,) if exact_at is None else exact_at.shape
    # Only the number is checked here; their order and bounds are checked when they are read.
    exact = (min(shape[0] if shape else 0, rows),)
    take(code_name(index, "exact_at"), "I64", exact)
    take(code_name(index, "exact"), spec.dtype, (*exact, spec.dim))


def _check_table(path: Path, table: StagedTable) -> None:
    spec = table.spec
    rows = table.shard_rows
    if table.row_count > rows or (table.all_rows and table.row_count != rows):
        raise _malformed(
            path,
            f"{table.row_count} rows of {spec.name!r:.200}",
            f"{'all' if table.all_rows else 'at most'} {rows}",
        )
    exact_bits = 8 * item_bytes(spec.dtype)
    if table.bits not in (*CODE_BITS, exact_bits):
        widths = ", ".join(map(str, CODE_BITS))
        raise _malformed(path, f"{table.bits} bits", f"{widths} or {exact_bits} bits")
    if table.method is not None:
        try:
            kernel_method(table.method)
        except ValueError as error:
            raise _malformed(path, f"method {error}", "a method of this version") from error


def kernel_method(chosen: ChosenMethod) -> Method:
    """Return the quantization method as the kernels take it.

    Raises:
        ValueError: there is no such method, or it does not have these parameters.
    """
    return Method(
        name=cast(MethodName, chosen.method),
        bins=chosen.bins,
        ratio_permille=chosen.ratio_permille,
        refits=chosen.refits,
    )


def _malformed(path: Path, found: str, expected: str) -> MalformedObject:
    return MalformedObject(str(path), found=found, expected=expected, next_step=NEXT)


def _no_slot(slot: Path, found: str, expected: str) -> StagingError:
    return StagingError(str(slot), found=found, expected=expected, next_step=NEXT)
