"""Bytes that were changed anyhow: refused by name, or read as what they are (format §9)."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recpoint.errors import DigestMismatch, FormatError
from recpoint.format.chunk import Chunk, parse_chunk
from recpoint.format.job import Cancel, Job
from recpoint.format.manifest import Manifest
from recpoint.format.records import (
    EndRecord,
    GenerationRecord,
    RunRecord,
    pack_record,
    unpack_record,
)
from recpoint.format.servers import ServersRecord
from tests.example_counts import examples
from tests.hostile.forged import MANIFEST, V1, body_text, envelope, golden_chunk, mutations, parse


@pytest.mark.parametrize(
    ("kind", "path"),
    [
        (RunRecord, "run.json"),
        (GenerationRecord, "generations/00000002.json"),
        (EndRecord, "ends/00000002.json"),
        (Manifest, MANIFEST),
        (Job, "staging/job.json"),
        (Cancel, "staging/cancel.json"),
        (ServersRecord, "staging/servers.json"),
    ],
)
@settings(max_examples=examples(150), deadline=None)
@given(data=st.data())
def test_mutated_records(kind: type[Any], path: str, data: st.DataObject) -> None:
    written = (V1 / path).read_bytes()
    original = unpack_record(kind, written, name="", next_step="")
    bad = data.draw(mutations(written))
    try:
        found = unpack_record(kind, bad, name="", next_step="")
    except FormatError:
        return
    assert found == original  # only what JSON does not distinguish, such as a space, may differ


@pytest.mark.parametrize("path", ["run.json", MANIFEST, "staging/job.json"])
@settings(max_examples=examples(150), deadline=None)
@given(data=st.data())
def test_mutated_bodies_with_a_right_digest(path: str, data: st.DataObject) -> None:
    kind: type[Any] = {"run.json": RunRecord, MANIFEST: Manifest}.get(path, Job)
    mutated = data.draw(mutations(body_text(path).encode()))
    try:
        bad = envelope(json.loads(mutated))
    except ValueError:
        bad = b'{"body":%b,"crc32c":0}' % mutated
    try:
        record = unpack_record(kind, bad, name="", next_step="")
        assert unpack_record(kind, pack_record(record), name="", next_step="") == record
    except FormatError as error:
        assert len(str(error)) < 1000


@settings(max_examples=examples(300), deadline=None)
@given(data=st.data())
def test_mutated_chunks_with_a_right_digest(data: st.DataObject) -> None:
    index = data.draw(st.integers(0, 5))
    written = golden_chunk(index)[2]
    original = parse(written, index)
    try:
        found = parse(data.draw(mutations(written)), index)
    except FormatError as error:
        assert len(str(error)) < 1000
        return
    # What is in the arrays is the digest's business, which was put right here; their form is not.
    assert (found.meta.run, found.meta.step) == (original.meta.run, original.meta.step)
    if found.meta.content == "rows":
        assert _forms(found) == _forms(original)


def _forms(chunk: Chunk) -> dict[str, object]:
    sections = chunk.sections.values()
    return {s.name: (s.dtype, s.shape) for s in sections if s.name != "row_set"}


@settings(max_examples=examples(100), deadline=None)
@given(data=st.data())
def test_mutated_chunks_as_the_manifest_knows_them(data: st.DataObject) -> None:
    manifest, entry, written = golden_chunk()
    mutated = data.draw(mutations(written))
    if mutated == written:
        return
    with pytest.raises(DigestMismatch):
        parse_chunk(mutated, key=entry.key, entry=entry, manifest=manifest)
