"""Chunks that lie: refused by name, before they cost memory (format §9)."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import crc32c
import pytest

from recpoint.errors import MalformedObject
from recpoint.format import naming
from recpoint.format.chunk import Chunk, Section, build_chunk, parse_chunk
from recpoint.format.dtypes import array_bytes, item_bytes
from recpoint.format.manifest import ChunkEntry, Manifest
from recpoint.format.records import unpack_record
from tests.hostile.forged import MIB, V1, cost, golden_chunk, parse


def with_header(change: Callable[[dict[str, Any]], object], *, body: bytes | None = None) -> bytes:
    data = golden_chunk()[2]
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + (data[8 + length :] if body is None else body)


def set_array(**changes: object) -> Callable[[dict[str, Any]], object]:
    return lambda header: header["scale"].update(changes)


def test_the_helper_changes_nothing_by_itself() -> None:
    assert parse(with_header(lambda header: None)).meta.bits == 2


@pytest.mark.parametrize(
    "change",
    [
        set_array(shape=[2**62, 2**62]),
        set_array(shape=[10**4000]),
        set_array(shape=[-4]),
        set_array(shape=[True, 4]),
        set_array(shape=[4.0]),
        set_array(shape=["4"]),
        set_array(shape=4),
        set_array(shape=None),
        set_array(shape=[4] + [1] * 100),
        set_array(shape=[0, 2**62, 2**62]),
        set_array(data_offsets=[0, 2**70]),
        set_array(data_offsets=[-16, 0]),
        set_array(data_offsets=[16, 0]),
        set_array(data_offsets=[0, 16]),
        set_array(data_offsets=[0]),
        set_array(data_offsets=[0, 16, 32]),
        set_array(data_offsets=[True, 16]),
        set_array(data_offsets="ab"),
        set_array(dtype="F99"),
        set_array(dtype=["F32"]),
        set_array(dtype="F64"),
        set_array(more=1),
        lambda header: header.pop("scale"),
        lambda header: header.update(scale=[]),
        lambda header: header.update(scale=dict(header["offset"])),
        lambda header: header.update(extra=dict(header["offset"])),
        lambda header: header.update({"../../x": header.pop("scale")}),
        lambda header: header.pop("__metadata__"),
        lambda header: header.update(__metadata__={"recpoint": 1}),
        lambda header: header.update(__metadata__={"recpoint": "{" * 1000}),
        lambda header: header.update(__metadata__=[]),
    ],
    ids=range(31),
)
def test_headers_that_lie(change: Callable[[dict[str, Any]], object]) -> None:
    data = with_header(change)
    peak_bytes, _, error = cost(lambda: parse(data))
    assert isinstance(error, MalformedObject)
    assert error.subject == golden_chunk()[1].key and "recpoint check" in error.next_step
    assert peak_bytes < MIB and len(str(error)) < 1000


@pytest.mark.parametrize("extra", [-1, 1, 1000])
def test_a_body_that_is_too_short_or_too_long(extra: int) -> None:
    data = golden_chunk()[2]
    with pytest.raises(MalformedObject):
        parse(data[:extra] if extra < 0 else data + bytes(extra))


@pytest.mark.parametrize("length", [2**64 - 1, 2**63, 2**20 + 1, 10_000, 1, 0])
def test_a_header_length_that_lies(length: int) -> None:
    data = golden_chunk()[2]
    peak_bytes, _, _ = cost(lambda: parse(length.to_bytes(8, "little") + data[8:]))
    assert peak_bytes < MIB


@pytest.mark.parametrize("data", [b"\x00", b"\x00" * 7, b"\x00" * 8, b"\x02" + b"\x00" * 7 + b"{}"])
def test_files_that_are_hardly_there(data: bytes) -> None:
    with pytest.raises(MalformedObject):
        parse(data)


def test_a_header_of_duplicate_keys() -> None:
    data = golden_chunk()[2]
    length = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + length].rstrip()[:-1] + b',"scale":{}}'
    with pytest.raises(MalformedObject, match="twice"):
        parse(len(header).to_bytes(8, "little") + header + data[8 + length :])


def test_a_header_of_more_than_a_mebibyte() -> None:
    header = b"{" + b" " * MIB + b"}"
    with pytest.raises(MalformedObject, match="at most 1048576 bytes"):
        parse(len(header).to_bytes(8, "little") + header)


@pytest.mark.parametrize(
    "change",
    [
        {"sample.0.ids": ("I64", (0,))},
        {"sample.0.ids": ("I64", (1, 3))},
        {"sample.0.ids": ("I32", (3,))},
        {"sample.0.ids": None},
        {"sample.0.values": None},
        {"sample.0.values": ("F32", (2, 5))},
        {"sample.0.values": ("F16", (3, 5))},
        {"sample.0.state.1": None},
        {"sample.0.state.2": ("I64", (3,))},
        {"sample.0.digests": ("I64", (3,))},
        {"sample.1.ids": ("I64", (3,))},
        {"sample.00.ids": ("I64", (3,))},
        {"tensor.0": ("I64", (3,))},
        {"tree": ("U8", (3,))},
    ],
    ids=lambda change: str(change)[1:40],
)
def test_samples_that_do_not_fit_their_tables(change: dict[str, Any]) -> None:
    key = naming.sample_chunk_key(100, 1, "0a" * 16, rank=0, number=0)
    full = unpack_record(
        Manifest, (V1 / naming.MANIFEST_KEY.of(100, 1)).read_bytes(), name="", next_step=""
    )

    def parse(data: bytes) -> Chunk:
        entry = ChunkEntry(
            key=key, bytes=len(data), crc32c=crc32c.crc32c(data), content="sample", rank=0
        )
        return parse_chunk(data, key=key, entry=entry, manifest=full)

    good = parse((V1 / key).read_bytes())
    sections = dict(good.sections)
    for name, form in change.items():
        sections.pop(name, None)
        if form is not None:
            dtype, shape = form
            sections[name] = Section(name, dtype, shape, bytes(array_bytes(dtype, shape)))
    # Wider items first, as a writer puts them: else this would be refused for its alignment.
    ordered = sorted(sections.values(), key=lambda section: -item_bytes(section.dtype))
    with pytest.raises(MalformedObject) as caught:
        parse(build_chunk(good.meta, ordered))
    assert len(str(caught.value)) < 600
