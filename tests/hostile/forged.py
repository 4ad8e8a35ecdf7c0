"""What an adversary changes: the golden records and chunks, with a digest that is right."""

from __future__ import annotations

import json
import time
import tracemalloc
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import crc32c
import pytest
from hypothesis import strategies as st

from recpoint.errors import FormatError
from recpoint.format.chunk import Chunk, parse_chunk
from recpoint.format.manifest import ChunkEntry, Manifest
from recpoint.format.records import unpack_record

__all__ = [
    "CONSOLIDATED",
    "MANIFEST",
    "MIB",
    "V1",
    "body",
    "body_text",
    "changed",
    "cost",
    "envelope",
    "golden_chunk",
    "mutations",
    "parse",
    "unpack",
]

V1 = Path(__file__).parents[1] / "golden" / "v1"
MANIFEST = "manifests/000000000120-00000002.json"
CONSOLIDATED = "consolidated/000000000120-00000002-full.json"
MIB = 1 << 20


@cache
def body_text(path: str = MANIFEST) -> str:
    return json.dumps(json.loads((V1 / path).read_bytes())["body"])


def body(path: str = MANIFEST) -> dict[str, Any]:
    parsed: dict[str, Any] = json.loads(body_text(path))
    return parsed


def envelope(fields: object) -> bytes:
    """The fields with a digest that is right, as an adversary would write it."""
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    data = text.encode(errors="surrogatepass")
    return b'{"body":%b,"crc32c":%d}' % (data, crc32c.crc32c(data))


def unpack(data: bytes) -> Manifest:
    return unpack_record(Manifest, data, name=MANIFEST, next_step="recpoint check URL")


def cost(refused: Callable[[], object]) -> tuple[int, float, FormatError]:
    """(peak bytes allocated, seconds, error) of a call that must be refused."""
    tracemalloc.start()
    started = time.perf_counter()
    try:
        with pytest.raises(FormatError) as caught:
            refused()
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    return peak_bytes, time.perf_counter() - started, caught.value


def changed(path: str, value: object, of: str = MANIFEST) -> dict[str, Any]:
    """The manifest with the field at `path`, for instance `chunks.0.bytes`, replaced."""
    fields = body(of)
    *above, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    target: Any = fields
    for part in above:
        target = target[part]
    target[last] = value
    return fields


@cache
def golden_chunk(index: int = 0) -> tuple[Manifest, ChunkEntry, bytes]:
    manifest = unpack((V1 / MANIFEST).read_bytes())
    entry = manifest.chunks[index]
    return manifest, entry, (V1 / entry.key).read_bytes()


def parse(data: bytes, index: int = 0) -> Chunk:
    """Parse with the length and the digest that an adversary has put into the manifest."""
    manifest, entry, _ = golden_chunk(index)
    entry = entry.model_copy(update={"bytes": len(data), "crc32c": crc32c.crc32c(data)})
    return parse_chunk(data, key=entry.key, entry=entry, manifest=manifest)


@st.composite
def mutations(draw: st.DrawFn, data: bytes) -> bytes:
    """`data` with a few bytes replaced, inserted, removed or repeated."""
    mutated = bytearray(data)
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(mutated)))
        end = min(len(mutated), start + draw(st.integers(0, 12)))
        piece = draw(st.binary(max_size=12) | st.just(bytes(mutated[start:end]) * 2))
        mutated[start:end] = piece
    return bytes(mutated)
