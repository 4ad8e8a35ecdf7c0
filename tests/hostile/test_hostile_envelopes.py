"""Records that are none, or too large: refused by name, before they cost memory (format §9)."""

from __future__ import annotations

import json
import time

import pytest

from recpoint.errors import DigestMismatch, MalformedObject, UnsupportedVersion
from recpoint.format import naming
from recpoint.format.untrusted_json import parse_json
from tests.hostile.forged import MANIFEST, MIB, V1, body, cost, envelope, unpack


@pytest.mark.parametrize("version", [2, 0, -1, 10**300])
def test_another_version_is_reported_as_one_whatever_else_is_there(version: int) -> None:
    with pytest.raises(UnsupportedVersion) as caught:
        unpack(envelope({"format": "recpoint/manifest", "version": version, "news": {}}))
    assert "upgrade" in caught.value.next_step


@pytest.mark.parametrize("version", [True, "1", None, [1]])
def test_a_version_that_is_no_number(version: object) -> None:
    with pytest.raises(MalformedObject, match="version"):
        unpack(envelope(body() | {"version": version}))


def test_a_record_of_another_kind() -> None:
    data = (V1 / "run.json").read_bytes()
    with pytest.raises(MalformedObject, match="recpoint/manifest"):
        unpack(data)


def test_digests() -> None:
    data = (V1 / MANIFEST).read_bytes()
    with pytest.raises(DigestMismatch):
        unpack(data.replace(b'"step":120', b'"step":121', 1))
    for digest in (b"true", b"null", b'"1"', b"{}"):
        start = data.index(b'"crc32c":', data.rindex(b'"writer"')) + len(b'"crc32c":')
        with pytest.raises(MalformedObject):
            unpack(data[:start] + digest + b"}")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"null",
        b"[]",
        b'{"body":{}}',
        b'{"body":{},"crc32c":0,"more":1}',
        b'{"body":{},"body":{},"crc32c":0}',
        b'{"body":[],"crc32c":0}',
        b'{"body":{"step":1,"step":2},"crc32c":0}',
        b'{"body":{"step":1.0},"crc32c":0}',
        b'{"body":{"step":1e400},"crc32c":0}',
        b'{"body":{"step":NaN},"crc32c":0}',
        b'{"body":{"step":-Infinity},"crc32c":0}',
        b'{"body":{"format":"\\ud800"},"crc32c":0}',
        b'{"body":{"format":"\xff"},"crc32c":0}',
        b'\xef\xbb\xbf{"body":{},"crc32c":0}',
        b'{"body":{"step":' + b"1" * 5000 + b'},"crc32c":0}',
        b'{"body":' + b"[" * 17 + b"]" * 17 + b',"crc32c":0}',
    ],
    ids=range(17),
)
def test_envelopes_that_are_none(data: bytes) -> None:
    with pytest.raises(MalformedObject) as caught:
        unpack(data)
    assert len(str(caught.value)) < 600
    str(caught.value).encode()


def test_brackets_in_strings_are_not_nesting() -> None:
    for text in ("[" * 99, '\\"[' * 99, "\\" * 7 + "[{" * 50, '"' + "]" * 99):
        data = json.dumps({"x": [text, ["y"]]}).encode()
        assert parse_json(data, name="x", next_step="", max_bytes=MIB) == {"x": [text, ["y"]]}


@pytest.mark.parametrize(
    ("bomb", "times"),
    [
        (b"[" * (16 * MIB), 4),
        (b'{"a":' * (3 * MIB), 4),
        (b'"' * (16 * MIB), 4),
        (b'"' + b'\\"' * (8 * MIB), 5),
        (b"\\" * (16 * MIB), 4),
        (b"[" + b"{}," * (9 * MIB) + b"0]", 4),
        (b"[" + b"1," * (9 * MIB) + b"0]", 4),
        (b"1" * (16 * MIB), 4),
        (b"[" * 16 + b"]" * (16 * MIB), 4),
    ],
    ids=["lists", "objects", "quotes", "escapes", "slashes", "empties", "ints", "digits", "closed"],
)
def test_a_bomb_costs_no_more_than_a_few_times_its_bytes(bomb: bytes, times: int) -> None:
    peak_bytes, seconds, _ = cost(lambda: unpack(bomb))
    assert peak_bytes < times * len(bomb) + 64 * MIB
    assert seconds < 20


def test_what_is_too_large_is_not_even_scanned() -> None:
    data = b"[" * ((64 << 20) + 1)
    peak_bytes, _, error = cost(lambda: unpack(data))
    assert peak_bytes < MIB and "at most" in error.expected


@pytest.mark.parametrize("field", ["chunks", "tables"])
def test_a_million_bad_entries_are_one_error(field: str) -> None:
    data = envelope(body() | {field: [{}] * 100_000})
    peak_bytes, seconds, error = cost(lambda: unpack(data))
    assert peak_bytes < 64 * MIB and seconds < 20
    assert error.found.startswith(f"{field}.0.")


def test_an_object_of_a_million_keys_one_of_them_twice() -> None:
    data = b"{" + b",".join(b'"%d":1' % number for number in range(300_000)) + b',"7":1}'
    peak_bytes, seconds, _ = cost(lambda: unpack(data))
    assert peak_bytes < 256 * MIB and seconds < 20


def test_the_time_for_a_manifest_follows_its_chunks() -> None:
    def parsed_s(chunks: int) -> float:
        fields = body()
        first = dict(fields["chunks"][0])
        fields["tables"][0]["rows"] = 2**40
        fields["chunks"] = [
            first | {"key": naming.row_chunk_key(120, 2, "1b" * 16, rank=0, table=0, number=number)}
            for number in range(chunks)
        ]
        data = envelope(fields)
        started = time.process_time()
        assert len(unpack(data).chunks) == chunks
        return time.process_time() - started

    # Ten times as much where each chunk is looked at once, a hundred where each meets each other.
    assert parsed_s(50_000) < 40 * parsed_s(5_000)
