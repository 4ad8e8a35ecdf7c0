from __future__ import annotations

import pytest
import torch
import zstandard

from recpoint.kernels import row_set
from recpoint.kernels.row_set.coding import compress

IDS = [1, 2, 5, 64, 69]


def payload_of(steps: list[int], item_bytes: int) -> bytes:
    words = [step.to_bytes(item_bytes, "little") for step in steps]
    return compress(b"".join(bytes(word[p] for word in words) for p in range(item_bytes)))


def test_a_range_is_found() -> None:
    assert row_set.encode(torch.arange(7, 20)) == ("range", 7, None)
    assert row_set.encode(torch.tensor([2**47])) == ("range", 2**47, None)
    assert row_set.encode(torch.zeros(0, dtype=torch.int64)) == ("range", 0, None)


def test_differences_of_more_than_32_bits_take_the_wide_coding() -> None:
    assert row_set.encode(torch.tensor([0, 2**32])).coding == "delta32"
    assert row_set.encode(torch.tensor([0, 2**32 + 1])).coding == "delta64"
    assert row_set.encode(torch.tensor([2**32, 2**32 + 2])).coding == "delta64"


def test_the_payload_is_the_shuffled_differences() -> None:
    payload = row_set.encode(torch.tensor([1, 300, 302])).payload
    assert payload is not None
    assert zstandard.get_frame_parameters(payload).content_size == 12
    planes = zstandard.ZstdDecompressor().decompress(payload)
    assert planes == bytes([1, 42, 1, 0, 1, 0]) + bytes(6)


@pytest.mark.parametrize("ids", [[1, 1], [2, 1], [1, 3, 2, 4], [-1, 0], [0, -1], [5, -(2**63), 9]])
def test_what_is_not_an_ascending_set_is_refused(ids: list[int]) -> None:
    with pytest.raises(ValueError, match="ascending"):
        row_set.encode(torch.tensor(ids))


def test_ids_that_only_look_like_a_range_are_refused() -> None:
    with pytest.raises(ValueError, match="ascending"):
        row_set.encode(torch.tensor([4, 4, 4, 7]))


GOOD = payload_of([1, 0, 2, 58, 4], 4)


@pytest.mark.parametrize(
    ("coding", "first", "payload", "count", "rows", "what"),
    [
        ("delta16", None, GOOD, 5, 70, "coding 'delta16'"),
        ("delta32", None, None, 5, 70, "needs a payload"),
        ("delta32", 1, GOOD, 5, 70, "needs a payload"),
        ("delta32", None, b"", 5, 70, "not a zstd frame"),
        ("delta32", None, b"\x50\x2a\x4d\x18\x04\0\0\0abcd", 1, 70, "not a zstd frame"),
        ("delta32", None, GOOD[:-1], 5, 70, "row set"),
        ("delta32", None, GOOD[:5], 5, 70, "row set"),
        ("delta32", None, GOOD + b"\0", 5, 70, "row set"),
        ("delta32", None, GOOD + GOOD, 5, 70, "row set"),
        ("delta32", None, GOOD, 4, 70, "states 20 bytes, expected 16"),
        ("delta32", None, GOOD, 6, 70, "states 20 bytes, expected 24"),
        ("delta64", None, GOOD, 5, 70, "states 20 bytes, expected 40"),
        ("delta32", None, GOOD, 5, 69, "not below the table's 69 rows"),
        ("delta32", None, GOOD, 5, 4, "5 ids in a table of 4"),
        ("delta32", None, GOOD, -1, 70, "-1 ids"),
        ("delta32", None, GOOD, 5, -1, "table of -1"),
        ("delta32", None, payload_of([2**32 - 1, 0], 4), 2, 2**32, "not below"),
        ("delta64", None, payload_of([2**64 - 1, 5], 8), 2, 2**48, "not below"),
        ("delta64", None, payload_of([2**63, 5], 8), 2, 2**48, "not below"),
        ("delta64", None, payload_of([2**62] * 4, 8), 4, 2**62, "not below"),
        ("range", None, None, 5, 70, "range from None"),
        ("range", -1, None, 5, 70, "range from -1"),
        ("range", 66, None, 5, 70, "range from 66"),
        ("range", 0, b"", 5, 70, "a range with a payload"),
        ("range", 0, None, 71, 70, "71 ids"),
    ],
)
def test_defects_are_refused(
    coding: str, first: int | None, payload: bytes | None, count: int, rows: int, what: str
) -> None:
    with pytest.raises(ValueError, match=what):
        row_set.decode(coding, first, payload, count=count, rows=rows)


def test_the_last_row_is_still_inside() -> None:
    assert row_set.decode("delta32", None, GOOD, count=5, rows=70).tolist() == IDS
    assert row_set.decode("range", 65, None, count=5, rows=70).tolist() == [65, 66, 67, 68, 69]


def test_a_frame_without_its_size_is_refused() -> None:
    frame = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(20))
    with pytest.raises(ValueError, match="row set"):
        row_set.decode("delta32", None, frame, count=5, rows=70)


def test_a_bomb_is_refused_by_its_stated_size() -> None:
    bomb = compress(bytes(64 << 20))
    assert len(bomb) < 10_000
    with pytest.raises(ValueError, match="states 67108864 bytes, expected 20"):
        row_set.decode("delta32", None, bomb, count=5, rows=2**40)


def test_a_size_that_no_frame_of_this_length_can_hold_is_refused_before_allocating() -> None:
    # A frame of single-segment form with an 8-byte content size and one empty last block.
    claimed = 4 * (2**31 - 1)
    frame = b"\x28\xb5\x2f\xfd\xe0" + claimed.to_bytes(8, "little") + b"\x01\0\0"
    with pytest.raises(ValueError, match="cannot hold"):
        row_set.decode("delta32", None, frame, count=2**31 - 1, rows=2**40)


def test_a_frame_shorter_than_it_states_is_refused() -> None:
    frame = b"\x28\xb5\x2f\xfd\x20\x14\x01\0\0"  # states 20 bytes, holds none
    with pytest.raises(ValueError, match="row set"):
        row_set.decode("delta32", None, frame, count=5, rows=70)
