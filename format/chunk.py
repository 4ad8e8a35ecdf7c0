"""Builds and checks chunks, which hold rows, parts of a rank's state, or samples (format §3)."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal, NamedTuple, NoReturn, Self

import crc32c
from pydantic import Field, model_validator

from recpoint.errors import DigestMismatch, ForeignObject, MalformedObject
from recpoint.format import naming
from recpoint.format.dtypes import Dtype, item_bytes
from recpoint.format.first_values import FirstValueRule, most_first_rows
from recpoint.format.manifest import (
    GRID_DTYPE,
    MAX_TABLE_ROWS,
    ChunkEntry,
    Manifest,
    RowCount,
    Scheme,
    Size,
    TableSpec,
)
from recpoint.format.records import (
    Generation,
    HexToken,
    Part,
    Step,
    check_version,
    validate,
)
from recpoint.format.tensor_file import (
    MAX_HEADER_BYTES,
    Section,
    file_header,
    parse_file,
    section_tensor,
    tensor_section,
)
from recpoint.format.untrusted_json import brief, parse_json
from recpoint.format.version import FORMAT_VERSION

__all__ = [
    "MAX_SAMPLE_ROWS",
    "Chunk",
    "ChunkMeta",
    "RowSetCoding",
    "Section",
    "build_chunk",
    "check_digest",
    "chunk_header",
    "parse_chunk",
    "sample_arrays",
    "section_tensor",
    "tensor_section",
]

_NEXT_STEP: Final = "recpoint check URL --level full"

#: Rows of one table that a sample chunk may hold.
MAX_SAMPLE_ROWS = 1 << 16

_METADATA_KEY = "recpoint"
_SAMPLE_IDS = re.compile(r"sample\.(0|[1-9][0-9]{0,4})\.ids\Z")
_STATE_SECTION = re.compile(r"tensor\.(?:0|[1-9][0-9]{0,8})(\.(?:0|[1-9][0-9]{0,8}))?\Z")


class RowSetCoding(Part):
    """How the row ids of a chunk are stored; `first` is the first row id (format §3.1)."""

    coding: Literal["range", "bitmap", "runs", "delta"]
    first: Annotated[int, Field(ge=0, lt=MAX_TABLE_ROWS)]


class ChunkMeta(Part):
    """What a chunk says about itself; only row chunks have the fields from `table` on.

    `first` is the rule of their first values, in chunks of scheme `first` alone.
    """

    version: Literal[1] = FORMAT_VERSION
    run: HexToken
    step: Step
    generation: Generation
    attempt: HexToken
    content: naming.Content
    rank: Annotated[int, Field(ge=0, le=naming.MAX_RANK)]
    table: Annotated[int, Field(ge=0, le=naming.MAX_TABLE)] | None = None
    row_count: RowCount | None = None
    dim: Size | None = None
    bits: Annotated[int, Field(ge=0, le=64)] | None = None
    scheme: Scheme | None = None
    row_set: RowSetCoding | None = None
    first: FirstValueRule | None = None

    @model_validator(mode="after")
    def _content(self) -> Self:
        about_rows = (
            self.table,
            self.row_count,
            self.dim,
            self.bits,
            self.scheme,
            self.row_set,
        )
        present = sum(field is not None for field in about_rows)
        if present != (len(about_rows) if self.content == "rows" else 0):
            raise ValueError("table, row_count, dim, bits, scheme, row_set are for chunks of rows")
        if (self.first is not None) != (self.scheme == "first"):
            raise ValueError("a rule is for chunks of rows with their first values")
        return self


class Chunk(NamedTuple):
    """A checked chunk; the sections' data are views of the parsed bytes."""

    meta: ChunkMeta
    sections: dict[str, Section]


def chunk_header(meta: ChunkMeta, sections: Sequence[Section]) -> bytes:
    """Return the bytes before a chunk's body; the body is the sections' data, without gaps.

    Raises:
        ValueError: a reader would refuse these sections, whatever the manifest says.
    """
    text = json.dumps(meta.model_dump(mode="json", exclude_none=True), separators=(",", ":"))
    return file_header({_METADATA_KEY: text}, sections)


def build_chunk(meta: ChunkMeta, sections: Sequence[Section]) -> bytes:
    """Return the bytes of a whole chunk; raise as `chunk_header` does."""
    return b"".join([chunk_header(meta, sections), *(section.data_view for section in sections)])


def check_digest(data: bytes | bytearray | memoryview, *, key: str, entry: ChunkEntry) -> None:
    """Check the length and the digest of a chunk's bytes, and nothing in them.

    Args:
        data: the whole object.
        key: where the chunk was read from, for errors.
        entry: what a manifest or a part says about the chunk.

    Raises:
        DigestMismatch: the length or the crc32c differs from the recorded one.
    """
    if len(data) != entry.bytes:
        raise DigestMismatch(
            key, found=f"{len(data)} bytes", expected=f"{entry.bytes}", next_step=_NEXT_STEP
        )
    digest = crc32c.crc32c(data)
    if digest != entry.crc32c:
        raise DigestMismatch(
            key,
            found=f"bytes with crc32c {digest}",
            expected=f"crc32c {entry.crc32c}",
            next_step=_NEXT_STEP,
        )


def parse_chunk(
    data: bytes | bytearray | memoryview, *, key: str, entry: ChunkEntry, manifest: Manifest
) -> Chunk:
    """Check every byte of a chunk and take it apart; nothing is copied.

    Args:
        data: the whole object.
        key: where the chunk was read from, for errors.
        entry: what the manifest says about the chunk.
        manifest: the manifest that names the chunk. `entry.key` names the checkpoint for which the
            chunk was written. After a consolidation this is not the manifest's checkpoint
            (format §4, invariant 1).

    Returns:
        The chunk. The section of a row set is known to be there; `kernels.row_set.decode` checks
        its contents.

    Raises:
        DigestMismatch: the length or the crc32c differs from the recorded one.
        UnsupportedVersion: a later release wrote the chunk.
        ForeignObject: the chunk belongs to another run, checkpoint, rank or table.
        MalformedObject: anything else differs from format §3.
    """
    next_step = _NEXT_STEP
    check_digest(data, key=key, entry=entry)
    metadata, sections = parse_file(data, name=key, next_step=next_step)
    meta = _meta(metadata, key, next_step)
    _check_belongs(meta, key, entry, manifest, next_step)
    if meta.content == "rows":
        _check_rows(meta, sections, key, entry, manifest, next_step)
    elif meta.content == "state":
        _check_state(sections, key, entry, next_step)
    else:
        _check_sample(sections, key, manifest, next_step)
    for section in sections.values():
        if section.dtype == "BOOL" and bytes(section.data_view).strip(b"\x00\x01"):
            raise MalformedObject(
                key,
                found=f"other bytes than 0 and 1 in {section.name}",
                expected="BOOL",
                next_step=next_step,
            )
    return Chunk(meta, sections)


def _meta(metadata: dict[str, str], key: str, next_step: str) -> ChunkMeta:
    def malformed(found: str, expected: str) -> MalformedObject:
        return MalformedObject(key, found=found, expected=expected, next_step=next_step)

    if metadata.keys() != {_METADATA_KEY}:
        raise malformed(f"{len(metadata)} metadata entries", f"exactly one, {_METADATA_KEY}")
    fields = parse_json(
        metadata[_METADATA_KEY].encode(),
        name=key,
        next_step=next_step,
        max_bytes=MAX_HEADER_BYTES,
    )
    if not isinstance(fields, dict):
        raise malformed(f"metadata that is {brief(fields)}", "an object")
    check_version(fields, (FORMAT_VERSION,), name=key, next_step=next_step)
    return validate(ChunkMeta, fields, name=key, next_step=next_step, exclude_none=True)


def _check_belongs(
    meta: ChunkMeta, key: str, entry: ChunkEntry, manifest: Manifest, next_step: str
) -> None:
    attempt = naming.parse_chunk_key(entry.key)
    assert attempt is not None  # ChunkEntry lets no other key through
    for name, actual, expected in (
        ("run", meta.run, manifest.run),
        ("step", meta.step, attempt.step),
        ("generation", meta.generation, attempt.generation),
        ("attempt", meta.attempt, attempt.attempt),
        ("content", meta.content, entry.content),
        ("rank", meta.rank, entry.rank),
        ("table", meta.table, entry.table),
    ):
        if actual != expected:
            raise ForeignObject(
                key, found=f"{name} {actual}", expected=f"{name} {expected}", next_step=next_step
            )


def _check_rows(
    meta: ChunkMeta,
    sections: dict[str, Section],
    key: str,
    entry: ChunkEntry,
    manifest: Manifest,
    next_step: str,
) -> None:
    def refuse(found: str, expected: str) -> NoReturn:
        raise MalformedObject(key, found=found, expected=expected, next_step=next_step)

    table, row_set, rows, bits = meta.table, meta.row_set, meta.row_count, meta.bits
    assert table is not None and row_set is not None and rows is not None and bits is not None
    spec = manifest.tables[table]
    exact = meta.scheme == "exact"
    for name, actual, expected in (
        ("row_count", rows, entry.row_count),
        ("bits", bits, entry.bits),
        ("scheme", meta.scheme, entry.scheme),
        ("dim", meta.dim, spec.dim),
    ):
        if actual != expected:
            refuse(f"{name} {actual}", f"{name} {expected}, as in the manifest")
    if exact and bits != 8 * item_bytes(spec.dtype):
        refuse(f"{bits} bits of scheme exact", f"{8 * item_bytes(spec.dtype)} for {spec.dtype}")
    if meta.scheme == "first" and rows > most_first_rows(spec):
        refuse(f"{rows} rows with their first values", f"at most {most_first_rows(spec)}")
    if row_set.first + rows > spec.rows:
        refuse(f"{rows} rows from {row_set.first} on", f"ids below {spec.rows}")

    implied: dict[str, tuple[Dtype, tuple[int, ...]]] = {}
    if row_set.coding != "range":
        coded = sections.get("row_set")
        if coded is None or len(coded.shape) != 1 or coded.shape[0] == 0:
            refuse("no row set", f"a section row_set of coding {row_set.coding}, 1-D, not empty")
        implied["row_set"] = ("U8", coded.shape)
    entries = rows
    if meta.scheme == "first":
        entries = 1  # all rows have the same row states
    elif exact:
        implied["values"] = (spec.dtype, (rows, spec.dim))
    else:
        implied["codes"] = ("U8", (rows, -(-spec.dim * bits // 8)))
        # Scale and offset have one dtype, F16 or F32; the chunk's header says which.
        half = "scale" in sections and sections["scale"].dtype == "F16"
        implied["scale"] = implied["offset"] = ("F16" if half else "F32", (rows,))
    for index, state in enumerate(spec.row_states):
        name = f"state.{index}"
        dtype = sections[name].dtype if name in sections else state.dtype
        if meta.scheme == "first" or not (state.is_coded(dtype) or dtype == state.narrow_dtype):
            dtype = state.dtype
        implied[name] = (dtype, (entries, *state.shape))
        if state.is_coded(dtype):
            implied[f"{name}.grid"] = (GRID_DTYPE, (rows,))

    if sections.keys() != implied.keys():
        extra = sorted(sections.keys() - implied.keys()) + sorted(implied.keys() - sections.keys())
        refuse(f"the sections differ: {brief(extra[0])}", ", ".join(implied)[:200])
    for name, (dtype, shape) in implied.items():
        section = sections[name]
        if section.dtype != dtype or section.shape != shape:
            refuse(f"{name}: {section.dtype} {_shape(section.shape)}", f"{dtype} {_shape(shape)}")


def _check_state(sections: dict[str, Section], key: str, entry: ChunkEntry, next_step: str) -> None:
    def refuse(found: str, expected: str) -> NoReturn:
        raise MalformedObject(key, found=found, expected=expected, next_step=next_step)

    name = naming.parse_chunk_name(entry.key)
    assert name is not None  # ChunkEntry lets no other key through
    if ("tree" in sections) != (name.number == 0):
        refuse(
            "a tree" if "tree" in sections else "no tree",
            "the state tree in state chunk 0 and only there",
        )
    for section in sections.values():
        if section.name == "tree":
            if section.dtype != "U8" or len(section.shape) != 1:
                refuse(f"tree: {section.dtype} {_shape(section.shape)}", "U8 of one dimension")
            continue
        match = _STATE_SECTION.match(section.name)
        if not match:
            refuse(f"the section {brief(section.name)}", "tree, tensor.<i>, tensor.<i>.<piece>")
        if match[1] and len(section.shape) != 1:
            refuse(f"{section.name}: {_shape(section.shape)}", "pieces of one dimension")


def _check_sample(
    sections: dict[str, Section], key: str, manifest: Manifest, next_step: str
) -> None:
    def refuse(found: str, expected: str) -> NoReturn:
        raise MalformedObject(key, found=found, expected=expected, next_step=next_step)

    unchecked = dict(sections)
    for name, ids in sections.items():
        match = _SAMPLE_IDS.match(name)
        if match is None:
            continue
        table, n = int(match[1]), ids.shape[0] if len(ids.shape) == 1 else 0
        if table >= len(manifest.tables) or not 1 <= n <= MAX_SAMPLE_ROWS:
            refuse(f"{name}: {_shape(ids.shape)}", f"1 to {MAX_SAMPLE_ROWS} rows of a table")
        for part, (dtype, shape) in sample_arrays(manifest.tables[table], n).items():
            section = unchecked.pop(f"sample.{table}.{part}", None)
            if section is None:
                if part != "digests":
                    refuse(f"no sample.{table}.{part}", "each part of a table's sample")
            elif (section.dtype, section.shape) != (dtype, shape):
                actual = f"sample.{table}.{part}: {section.dtype} {_shape(section.shape)}"
                refuse(actual, f"{dtype} {_shape(shape)}")
    if unchecked:
        refuse(f"the section {brief(next(iter(unchecked)))}", "samples of the manifest's tables")


def sample_arrays(spec: TableSpec, rows: int) -> dict[str, tuple[Dtype, tuple[int, ...]]]:
    """Return the dtype and shape of each part of a table's sample of `rows` rows (format §3.6)."""
    arrays: dict[str, tuple[Dtype, tuple[int, ...]]] = {
        "ids": ("I64", (rows,)),
        "values": (spec.dtype, (rows, spec.dim)),
    }
    for index, state in enumerate(spec.row_states):
        arrays[f"state.{index}"] = (state.dtype, (rows, *state.shape))
    arrays["digests"] = ("I64", (2 + len(spec.row_states),))
    return arrays


def _shape(shape: tuple[Any, ...]) -> str:
    return "x".join(map(str, shape)) or "scalar"
