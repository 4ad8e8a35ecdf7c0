from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import crc32c
import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch

from recpoint.errors import (
    DigestMismatch,
    ForeignObject,
    FormatError,
    MalformedObject,
    UnsupportedVersion,
)
from recpoint.format import naming
from recpoint.format.chunk import (
    Chunk,
    ChunkMeta,
    RowSetCoding,
    Section,
    build_chunk,
    chunk_header,
    parse_chunk,
    section_tensor,
    tensor_section,
)
from recpoint.format.dtypes import DTYPES, Dtype, dtype_name, item_bytes, torch_dtype
from recpoint.format.history import History
from recpoint.format.manifest import ChunkEntry, Manifest, RowStateSpec, TableSpec

RUN, ATTEMPT = "ab" * 16, "cd" * 16
ROWS, DIM, BITS = 3, 5, 3
TABLE = TableSpec(
    name="items",
    rows=100,
    dim=DIM,
    dtype="F32",
    row_states=(RowStateSpec(name="sum", dtype="F64", shape=(2,), optimizer=0),),
)


def meta(**changes: Any) -> ChunkMeta:
    fields: dict[str, Any] = {
        "run": RUN,
        "step": 7,
        "generation": 2,
        "attempt": ATTEMPT,
        "content": "rows",
        "rank": 0,
        "table": 1,
        "row_count": ROWS,
        "dim": DIM,
        "bits": BITS,
        "scheme": "asymmetric",
        "row_set": RowSetCoding(coding="delta", first=1),
    }
    return ChunkMeta.model_validate(fields | changes)


def row_sections(*, exact: bool = False) -> list[Section]:
    state = tensor_section("state.0", torch.arange(6, dtype=torch.float64).reshape(ROWS, 2))
    coded = Section("row_set", "U8", (4,), b"\x01\x02\x03\x04")
    if exact:
        return [state, tensor_section("values", torch.ones(ROWS, DIM)), coded]
    width = (DIM * BITS + 7) // 8
    return [
        state,
        tensor_section("scale", torch.ones(ROWS)),
        tensor_section("offset", torch.zeros(ROWS)),
        tensor_section("codes", torch.zeros(ROWS, width, dtype=torch.uint8)),
        coded,
    ]


def entry_of(data: bytes, **changes: Any) -> ChunkEntry:
    fields: dict[str, Any] = {
        "key": naming.row_chunk_key(7, 2, ATTEMPT, rank=0, table=1, number=0),
        "bytes": len(data),
        "crc32c": crc32c.crc32c(data),
        "content": "rows",
        "rank": 0,
        "table": 1,
        "row_count": ROWS,
        "first_row": 1,
        "last_row": 9,
        "bits": BITS,
        "scheme": "asymmetric",
    }
    return ChunkEntry.model_validate(fields | changes)


def state_entry(data: bytes, *, number: int = 0) -> ChunkEntry:
    return ChunkEntry(
        key=naming.state_chunk_key(7, 2, ATTEMPT, rank=0, number=number),
        bytes=len(data),
        crc32c=crc32c.crc32c(data),
        content="state",
        rank=0,
    )


def manifest_of(entry: ChunkEntry, **changes: Any) -> Manifest:
    parent = {"step": 1, "generation": 1, "attempt": "00" * 16}
    fields: dict[str, Any] = {
        "run": RUN,
        "step": 7,
        "generation": 2,
        "attempt": ATTEMPT,
        "kind": "increment",
        "base": parent,
        "parent": parent,
        "chain_length": 2,
        "policy": "consecutive",
        "stands_for": None,
        "ranks": 1,
        "tables": (TABLE.model_copy(update={"name": "other"}), TABLE),
        "chunks": (entry,),
        "snapshot_ms": 0,
        "staged_ms": 0,
        "committed_ms": 0,
        "stall_us": 0,
        "dirty_rows": 0,
        "full_bytes": 0,
        "history": History(trained_ms=0, lossy_restores=0, precision=None),
        "quantizers": (),
        "quantized_by": "",
        "state_bits": None,
        "writer": "",
    }
    return Manifest.model_validate(fields | changes)


def parse(data: bytes, entry: ChunkEntry | None = None, **changes: Any) -> Chunk:
    entry = entry or entry_of(data)
    return parse_chunk(data, key=entry.key, entry=entry, manifest=manifest_of(entry, **changes))


def test_what_is_built_parses_to_the_same() -> None:
    data = build_chunk(meta(), row_sections())
    chunk = parse(data)
    assert chunk.meta == meta()
    assert list(chunk.sections) == ["state.0", "scale", "offset", "codes", "row_set"]
    for section in row_sections():
        found = chunk.sections[section.name]
        assert (found.dtype, found.shape) == (section.dtype, section.shape)
        assert bytes(found.data_view) == bytes(section.data_view)


def test_sections_are_views_of_the_bytes_that_were_parsed() -> None:
    data = build_chunk(meta(), row_sections())
    for section in parse(data).sections.values():
        assert isinstance(section.data, memoryview)
        assert section.data.obj is data and section.data.readonly


def test_the_body_starts_at_a_multiple_of_eight_for_headers_of_every_length() -> None:
    for digits in range(1, 12):
        header = chunk_header(meta(step=10**digits), row_sections())
        assert len(header) % 8 == 0
        assert int.from_bytes(header[:8], "little") == len(header) - 8
        assert json.loads(header[8:])["__metadata__"].keys() == {"recpoint"}


def test_the_safetensors_library_reads_what_we_write() -> None:
    loaded = safetensors.torch.load(build_chunk(meta(), row_sections()))
    assert loaded.keys() == {"state.0", "scale", "offset", "codes", "row_set"}
    for section in row_sections():
        assert loaded[section.name].equal(section_tensor(section))


def test_metadata_as_the_safetensors_library_shows_it(tmp_path: Path) -> None:
    (tmp_path / "chunk").write_bytes(build_chunk(meta(), row_sections()))
    with safetensors.safe_open(tmp_path / "chunk", framework="numpy") as opened:
        stored = json.loads(opened.metadata()["recpoint"])
    assert ChunkMeta.model_validate(stored) == meta()


def test_we_read_what_the_safetensors_library_writes() -> None:
    text = json.dumps(meta().model_dump(mode="json", exclude_none=True))
    tensors = {section.name: section_tensor(section) for section in row_sections()}
    data = safetensors.torch.save(tensors, {"recpoint": text})
    chunk = parse(data)
    assert chunk.meta == meta()
    for name, tensor in tensors.items():
        assert section_tensor(chunk.sections[name]).equal(tensor)


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (5,), (2, 3, 1)])
def test_tensors_of_every_dtype_and_shape_come_back(name: Dtype, shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(1)
    tensor = torch.randint(0, 2, shape, generator=generator).to(torch_dtype(name))
    section = tensor_section("x", tensor)
    assert section.dtype == name == dtype_name(tensor.dtype)
    assert section.nbytes == tensor.numel() * item_bytes(name)
    for data in (bytes(section.data_view), bytearray(section.data_view), section.data):
        back = section_tensor(section._replace(data=data))
        assert back.dtype == tensor.dtype and back.shape == tensor.shape and back.equal(tensor)


def test_a_tensor_of_other_strides_is_stored_in_row_order() -> None:
    tensor = torch.arange(6).reshape(2, 3).t().requires_grad_(False)
    assert section_tensor(tensor_section("x", tensor)).tolist() == [[0, 3], [1, 4], [2, 5]]


def test_a_contiguous_tensor_is_not_copied() -> None:
    tensor = torch.zeros(4, requires_grad=True)
    section = tensor_section("x", tensor)
    with torch.no_grad():
        tensor[0] = 1
    assert bytes(section.data_view)[:4] == b"\x00\x00\x80\x3f"


def test_a_section_tensor_shares_aligned_memory_and_copies_the_rest() -> None:
    data = bytearray(64)
    aligned, shifted = (
        section_tensor(Section("x", "F64", (2,), memoryview(data)[start : start + 16]))
        for start in (8, 9)
    )
    data[8:26] = b"\x3f" * 18
    assert aligned[0] != 0 and shifted[0] == 0


def test_a_section_tensor_keeps_its_memory_alive() -> None:
    tensor = section_tensor(Section("x", "I64", (1000,), np.arange(1000).tobytes()))
    junk = [bytes(8000) for _ in range(50)]
    assert tensor.equal(torch.arange(1000)) and len(junk) == 50


def test_an_exact_chunk_and_a_range() -> None:
    about = {"bits": 32, "scheme": "exact"}
    sections = row_sections(exact=True)[:2]
    for first, fits in ((97, True), (98, False)):
        coding = RowSetCoding(coding="range", first=first)
        data = build_chunk(meta(**about, row_set=coding), sections)
        if fits:
            assert parse(data, entry_of(data, **about)).sections.keys() == {"state.0", "values"}
        else:
            with pytest.raises(MalformedObject, match="ids below 100"):
                parse(data, entry_of(data, **about))


def test_a_chunk_of_a_consolidation_belongs_by_its_key() -> None:
    other = "ef" * 16
    data = build_chunk(meta(attempt=other), row_sections())
    entry = entry_of(data, key=naming.row_chunk_key(7, 2, other, rank=0, table=1, number=9))
    parents = [{"step": step, "generation": 1, "attempt": "00" * 16} for step in (1, 3)]
    taken = {"kind": "increment", "base": parents[0], "parent": parents[1], "chain_length": 3}
    assert parse(data, entry, stands_for=taken).meta.attempt == other
    with pytest.raises(ForeignObject, match=f"attempt {other}; expected attempt {ATTEMPT}"):
        parse(data)


@pytest.mark.parametrize(
    "changes",
    [
        {"run": "00" * 16},
        {"step": 8},
        {"generation": 3},
        {"attempt": "00" * 16},
        {"rank": 1},
        {"table": 0},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_foreign_chunk_is_named_as_one(changes: dict[str, Any]) -> None:
    data = build_chunk(meta(**changes), row_sections())
    with pytest.raises(ForeignObject) as caught:
        parse(data)
    assert caught.value.subject == entry_of(data).key
    assert next(iter(changes)) in caught.value.expected
    assert "recpoint check" in caught.value.next_step


@pytest.mark.parametrize(
    "changes",
    [{"row_count": 4}, {"bits": 4}, {"scheme": "exact"}, {"dim": 6}],
    ids=lambda changes: next(iter(changes)),
)
def test_metadata_that_contradicts_the_manifest(changes: dict[str, Any]) -> None:
    data = build_chunk(meta(**changes), row_sections())
    with pytest.raises(MalformedObject, match="as in the manifest"):
        parse(data)


def test_length_and_digest_come_before_everything_else() -> None:
    data = build_chunk(meta(), row_sections())
    for bad in (b"", data[:-1], data + b"\x00", data[:-1] + b"\x00", b"\x00" + data[1:]):
        with pytest.raises(DigestMismatch):
            parse(bad, entry_of(data))


def test_every_flipped_bit_is_found() -> None:
    data = build_chunk(meta(), row_sections())
    entry = entry_of(data)
    for index in range(len(data)):
        bad = bytearray(data)
        bad[index] ^= 1 << index % 8
        with pytest.raises(DigestMismatch):
            parse(bytes(bad), entry)


@pytest.mark.parametrize("drop", range(5))
def test_a_section_missing(drop: int) -> None:
    sections = row_sections()
    del sections[drop]
    data = build_chunk(meta(), sections)
    with pytest.raises(MalformedObject):
        parse(data)


@pytest.mark.parametrize(
    "section",
    [
        Section("extra", "U8", (1,), b"x"),
        Section("values", "F32", (ROWS, DIM), bytes(4 * ROWS * DIM)),
        Section("state.1", "F32", (ROWS,), bytes(4 * ROWS)),
    ],
    ids=lambda section: section.name,
)
def test_a_section_too_many(section: Section) -> None:
    data = build_chunk(meta(), [*row_sections(), section])
    with pytest.raises(MalformedObject, match="sections differ"):
        parse(data)


def test_row_parameters_of_half_the_width() -> None:
    halves = [
        tensor_section(section.name, section_tensor(section).to(torch.float16))
        if section.name in ("scale", "offset")
        else section
        for section in row_sections()
    ]
    chunk = parse(build_chunk(meta(), halves))
    assert chunk.sections["scale"].dtype == chunk.sections["offset"].dtype == "F16"


def test_row_parameters_of_two_widths_are_refused() -> None:
    for mixed in ("scale", "offset"):
        half = Section(mixed, "F16", (ROWS,), bytes(2 * ROWS))
        sections = [half if section.name == mixed else section for section in row_sections()]
        with pytest.raises(MalformedObject, match="offset"):
            parse(build_chunk(meta(), sections))


@pytest.mark.parametrize(
    "section",
    [
        Section("scale", "F64", (ROWS,), bytes(8 * ROWS)),
        Section("scale", "BF16", (ROWS,), bytes(2 * ROWS)),
        Section("scale", "F16", (ROWS + 1,), bytes(2 * (ROWS + 1))),
        Section("scale", "F32", (ROWS + 1,), bytes(4 * (ROWS + 1))),
        Section("scale", "F32", (ROWS, 1), bytes(4 * ROWS)),
        Section("codes", "U8", (ROWS, 1), bytes(ROWS)),
        Section("state.0", "F64", (ROWS, 1, 2), bytes(16 * ROWS)),
        Section("row_set", "U8", (0,), b""),
        Section("row_set", "U8", (2, 2), b"abcd"),
        Section("row_set", "I8", (4,), b"abcd"),
    ],
)
def test_a_section_of_another_dtype_or_shape(section: Section) -> None:
    sections = [section if section.name == old.name else old for old in row_sections()]
    data = build_chunk(meta(), sections)
    with pytest.raises(MalformedObject):
        parse(data)


def with_state(
    state: RowStateSpec, stored: torch.Tensor, grids: torch.Tensor | None = None
) -> Chunk:
    """A chunk whose one row state is `stored`, of a table whose row state is `state`."""
    table = TABLE.model_copy(update={"row_states": (state,)})
    sections = [tensor_section("state.0", stored), *row_sections()[1:]]
    if grids is not None:
        sections.append(tensor_section("state.0.grid", grids))
    tables = (table.model_copy(update={"name": "other"}), table)
    return parse(build_chunk(meta(), sections), tables=tables)


def test_row_states_of_several_f32_a_row_may_be_bf16() -> None:
    state = RowStateSpec(name="sum", dtype="F32", shape=(2,), optimizer=0)
    for dtype, name in ((torch.float32, "F32"), (torch.bfloat16, "BF16")):
        chunk = with_state(state, torch.ones(ROWS, 2, dtype=dtype))
        assert chunk.sections["state.0"].dtype == name
    with pytest.raises(MalformedObject, match=r"state\.0"):
        with_state(state, torch.ones(ROWS, 2, dtype=torch.float16))


def test_row_states_of_several_f32_a_row_may_be_codes_with_a_grid_each() -> None:
    state = RowStateSpec(name="sum", dtype="F32", shape=(2,), optimizer=0)
    codes, grids = torch.ones(ROWS, 2, dtype=torch.uint8), torch.ones(ROWS, dtype=torch.int16)
    sections = with_state(state, codes, grids).sections
    assert (sections["state.0"].dtype, sections["state.0.grid"].dtype) == ("U8", "I16")
    for stored, beside in [
        (codes, None),
        (codes, grids[:-1]),
        (codes, grids.int()),
        (codes[:, :1].contiguous(), grids),
        (codes.float(), grids),
        (codes.to(torch.bfloat16), grids),
    ]:
        with pytest.raises(MalformedObject, match=r"state\.0"):
            with_state(state, stored, beside)


@pytest.mark.parametrize(
    ("dtype", "shape"), [("F32", ()), ("F32", (1,)), ("F64", (2,)), ("F16", (2,)), ("I32", (2,))]
)
def test_other_row_states_may_not(dtype: Dtype, shape: tuple[int, ...]) -> None:
    state = RowStateSpec(name="sum", dtype=dtype, shape=shape, optimizer=0)
    with_state(state, torch.ones(ROWS, *shape, dtype=torch_dtype(dtype)))
    with pytest.raises(MalformedObject, match=r"state\.0"):
        with_state(state, torch.ones(ROWS, *shape, dtype=torch.bfloat16))
    codes, grids = torch.ones(ROWS, *shape, dtype=torch.uint8), torch.ones(ROWS, dtype=torch.int16)
    with pytest.raises(MalformedObject, match=r"state\.0"):
        with_state(state, codes, grids)


def state_meta() -> ChunkMeta:
    return ChunkMeta(run=RUN, step=7, generation=2, attempt=ATTEMPT, content="state", rank=0)


def parse_state(sections: list[Section], *, number: int = 0) -> Chunk:
    data = build_chunk(state_meta(), sections)
    return parse(data, state_entry(data, number=number))


TREE = Section("tree", "U8", (4,), b"null")


def test_state_chunks() -> None:
    sections = [tensor_section("tensor.0", torch.tensor(3)), TREE]
    assert list(parse_state(sections).sections) == ["tensor.0", "tree"]
    piece = Section("tensor.12.3", "F32", (2,), bytes(8))
    assert list(parse_state([piece], number=1).sections) == ["tensor.12.3"]


@pytest.mark.parametrize(
    ("sections", "number"),
    [
        ([], 0),
        ([TREE], 1),
        ([TREE._replace(dtype="I8")], 0),
        ([TREE._replace(shape=(2, 2))], 0),
        ([TREE, Section("tensor.01", "U8", (1,), b"x")], 0),
        ([TREE, Section("tensor.", "U8", (1,), b"x")], 0),
        ([TREE, Section("tensor.0.1", "U8", (1, 1), b"x")], 0),
        ([TREE, Section("tensor.1234567890", "U8", (1,), b"x")], 0),
        ([TREE, Section("values", "U8", (1,), b"x")], 0),
    ],
)
def test_sections_that_no_state_chunk_has(sections: list[Section], number: int) -> None:
    with pytest.raises(MalformedObject):
        parse_state(sections, number=number)


def test_a_boolean_that_is_neither_is_refused() -> None:
    good = Section("tensor.0", "BOOL", (3,), b"\x00\x01\x00")
    assert section_tensor(parse_state([good, TREE]).sections["tensor.0"]).tolist() == [
        False,
        True,
        False,
    ]
    for data in (b"\x00\x02\x00", b"\xff\x00\x01"):
        with pytest.raises(MalformedObject, match="other bytes than 0 and 1"):
            parse_state([good._replace(data=data), TREE])


@pytest.mark.parametrize(
    ("version", "error"),
    [
        (2, UnsupportedVersion),
        (0, UnsupportedVersion),
        (10**4000, UnsupportedVersion),
        ("1", MalformedObject),
        (True, MalformedObject),
        (None, MalformedObject),
    ],
    ids=["two", "zero", "huge", "text", "true", "null"],
)
def test_versions(version: object, error: type[FormatError]) -> None:
    fields = meta().model_dump(mode="json", exclude_none=True) | {"version": version}
    tensors = {section.name: section_tensor(section) for section in row_sections()}
    data = safetensors.torch.save(tensors, {"recpoint": json.dumps(fields)})
    with pytest.raises(error) as caught:
        parse(data)
    assert "version" in caught.value.found and len(str(caught.value)) < 600


@pytest.mark.parametrize(
    "changes",
    [
        {"step": -1},
        {"step": True},
        {"step": "7"},
        {"generation": 0},
        {"attempt": "CD" * 16},
        {"attempt": "cd" * 16 + "\n"},
        {"content": "other"},
        {"unknown": 1},
        {"row_set": {"coding": "delta32", "first": 3}},
        {"row_set": {"coding": "delta"}},
        {"row_set": {"coding": "range"}},
        {"row_set": {"coding": "range", "first": -1}},
        {"row_set": {"coding": "range", "first": 2**48}},
        {"row_set": "range"},
        {"row_count": 0},
        {"row_count": 2**31},
        {"table": None},
        {"scheme": "symmetric"},
    ],
    ids=str,
)
def test_metadata_outside_its_bounds(changes: dict[str, Any]) -> None:
    fields = meta().model_dump(mode="json", exclude_none=True) | changes
    tensors = {section.name: section_tensor(section) for section in row_sections()}
    data = safetensors.torch.save(tensors, {"recpoint": json.dumps(fields)})
    with pytest.raises(MalformedObject):
        parse(data)


@pytest.mark.parametrize(
    "metadata", [None, {}, {"other": "{}"}, {"recpoint": "{}", "other": ""}, {"recpoint": "[]"}]
)
def test_other_metadata_than_ours(metadata: dict[str, str] | None) -> None:
    data = safetensors.torch.save({"x": torch.zeros(1)}, metadata)
    with pytest.raises(MalformedObject):
        parse(data)


@pytest.mark.parametrize(
    "sections",
    [
        [Section("x", "F32", (2,), bytes(7))],
        [Section("x", "F32", (-1,), b"")],
        [Section("X", "U8", (1,), b"x")],
        [Section("", "U8", (1,), b"x")],
        [Section("x", "U8", (1,), b"x")] * 2,
        [Section("x" * 65, "U8", (1,), b"x")],
        [Section(f"tensor.{index}", "U8", (0,), b"") for index in range(20_000)],
    ],
)
def test_a_writer_cannot_build_what_no_reader_takes(sections: list[Section]) -> None:
    with pytest.raises(ValueError):
        build_chunk(state_meta(), sections)


def test_dtypes_that_cannot_be_stored() -> None:
    for dtype in (torch.complex64, torch.uint32):
        with pytest.raises(ValueError, match="cannot be stored"):
            tensor_section("x", torch.zeros(1, dtype=dtype))
