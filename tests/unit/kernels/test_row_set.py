from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
import zstandard

from recpoint.kernels import row_set
from recpoint.kernels.row_set import reference
from recpoint.kernels.row_set.frame import compress
from tests.unit.kernels.every import every

E = 255  # a symbol that is followed by another of the same gap


def frame(*parts: Sequence[int]) -> bytes:
    return compress([np.array(part, np.uint8) for part in parts])


def delta(low: int, *parts: Sequence[int]) -> bytes:
    return bytes([low]) + frame(*parts)


def runs(number: int, low: int, low_starts: int, *parts: Sequence[int]) -> bytes:
    return number.to_bytes(8, "little") + bytes([low, low_starts]) + frame(*parts)


def content(payload: bytes | None, header: int) -> list[int]:
    assert payload is not None
    return list(zstandard.ZstdDecompressor().decompress(payload[header:]))


def coded(ids: Sequence[int]) -> row_set.RowSet:
    """By both implementations, and back."""
    tensor = torch.tensor(ids, dtype=torch.int64)
    found = row_set.encode(tensor)
    assert found == reference.encode(tensor)
    rows = ids[-1] + 1 if ids else 0
    for decode in (row_set.decode, reference.decode):
        assert decode(*found, count=len(ids), rows=rows).tolist() == list(ids)
    return found


def test_a_range_is_found() -> None:
    assert coded(range(7, 20)) == ("range", 7, None)
    assert coded([2**47]) == ("range", 2**47, None)
    assert coded([]) == ("range", 0, None)


def test_a_bitmap_begins_and_ends_with_an_id_of_the_set() -> None:
    coding, first, payload = coded([1000, 1001, 1003, 1009])
    assert (coding, first) == ("bitmap", 1000)
    assert content(payload, 0) == [0b1011, 0b10]


def test_gaps_without_planes() -> None:
    coding, first, payload = coded([7, 8, 60, 315, 571, 1100])
    assert (coding, first) == ("delta", 7)
    assert payload is not None and payload[0] == 0
    assert content(payload, 1) == [0, 51, 254, E, 0, E, E, 18]


def test_gaps_with_planes() -> None:
    coding, _, payload = coded([0, 0x10305, 0x20A06])
    assert coding == "delta"
    assert payload is not None and payload[0] == 1
    # Gaps 0x10304 and 0x10700: the low bytes, then 0x103 and 0x107 over 255.
    assert content(payload, 1) == [0x04, 0x00, E, 0x103 - E, E, 0x107 - E]


def test_runs_are_two_lists_of_gaps() -> None:
    coding, first, payload = coded([5, 6, 7, 8, 300, 301, 302, 99_999, 100_000])
    assert (coding, first) == ("runs", 5)
    assert payload is not None
    assert (int.from_bytes(payload[:8], "little"), payload[8], payload[9]) == (3, 1, 0)
    # Offsets 5, 296, 99992 and starts 0, 4, 7: gaps 290, 99695 and 3, 2.
    assert content(payload, 10) == [290 & 255, 99695 & 255, 1, E, 99695 // 256 - E, 3, 2]


@pytest.mark.parametrize(
    ("count", "span", "found", "coding"),
    [
        (1000, 1000, 1, "range"),
        (1000, 8 * 400, 400, "bitmap"),
        (1000, 8 * 400 + 1, 400, "runs"),
        (1000, 8 * 500 + 1, 500, "runs"),
        (1000, 8 * 501, 501, "bitmap"),
        (1000, 8 * 501 + 1, 501, "delta"),
        (2, 2**62, 2, "delta"),
        (4, 2**62, 2, "runs"),
    ],
)
def test_the_coding_follows_from_three_counts(
    count: int, span: int, found: int, coding: str
) -> None:
    from recpoint.kernels.row_set.coding import choose

    assert choose(count, span, found) == coding


@pytest.mark.parametrize(
    ("count", "span", "low", "most"),
    [
        (2, 2, 0, 1),
        (3, 3 + 2 * 255 + 254, 0, 4),
        (3, 3 + 3 * 255, 1, 2),
        (3, 3 + (3 * 255 << 8), 2, 2),
        (2, 2**62, 7, 1),
    ],
)
def test_no_list_needs_more_than_two_symbols_a_gap(
    count: int, span: int, low: int, most: int
) -> None:
    from recpoint.kernels.row_set.coding import gap_room

    assert gap_room(count, span) == (low, most)


@pytest.mark.parametrize(
    "ids",
    [
        [0, 1, 3, 9],
        [0, 2**31, 2**32 + 5],
        [0, 1, 2, 2**33, 2**33 + 1, 2**33 + 2, 2**47, 2**47 + 1],
        [0, 254 + 1, 2 * 255 + 1, 4 * 255 + 1, 4 * 255 + 1002],
        list(range(0, 4000, 3)),
        [block * 200 + row for block in range(50) for row in range(9)],
        [i * i * i for i in range(300)],
    ],
    ids=["bitmap", "far", "far runs", "escapes", "thirds", "blocks", "cubes"],
)
@every("first", [0, 2**31 - 3, 2**32 - 3, 2**40, 2**61])
def test_ids_far_from_zero(ids: list[int], first: int) -> None:
    coding, start, _ = coded([first + row for row in ids])
    assert coding == coded(ids).coding
    assert start == first


def random_sets() -> list[tuple[str, torch.Tensor]]:
    draw = torch.Generator().manual_seed(5)
    sets = []
    for density in (0.002, 0.01, 0.1, 0.26, 0.5, 0.9, 0.99):
        marked = torch.rand(int(20_000 / density), generator=draw) < density
        sets.append((f"uniform {density}", marked.nonzero().reshape(-1)))
    ids = torch.randint(0, 300_000, (2_000,), generator=draw).unique()
    for length in (2, 30):
        clusters = (ids[:, None] + torch.arange(length)).unique()
        sets.append((f"clusters of {length}", clusters))
    return sets


@pytest.mark.parametrize(("name", "ids"), random_sets(), ids=lambda value: str(value)[:20])
def test_large_sets_at_any_number_of_threads(name: str, ids: torch.Tensor, threads: int) -> None:
    found = row_set.encode(ids)
    assert found == reference.encode(ids)
    rows = int(ids[-1]) + 1
    assert torch.equal(row_set.decode(*found, count=ids.numel(), rows=rows), ids)
    with pytest.raises(ValueError, match="not below"):
        row_set.decode(*found, count=ids.numel(), rows=rows - 1)


@pytest.mark.parametrize(
    ("density", "most"),
    [(0.001, 1.02), (0.01, 1.02), (0.1, 1.03), (0.26, 1.03), (0.5, 1.03), (0.75, 1.05), (0.9, 1.2)],
)
def test_a_random_set_takes_little_more_than_its_entropy(density: float, most: float) -> None:
    draw = torch.Generator().manual_seed(1)
    ids = (torch.rand(int(50_000 / density), generator=draw) < density).nonzero().reshape(-1)
    payload = row_set.encode(ids).payload
    assert payload is not None
    p = torch.tensor(density, dtype=torch.float64)
    entropy = -(p * p.log2() + (1 - p) * (1 - p).log2())
    assert len(payload) * 8 <= most * float(entropy) * 50_000 / density


@pytest.mark.parametrize(
    "ids",
    [
        [1, 1],
        [2, 1],
        [1, 3, 2, 4],
        [1, 3, 3, 9],
        [-1, 0],
        [0, -1],
        [5, -(2**63), 9],
        [0, 2**63 - 1, -(2**63), 9],
        [4, 4, 4, 7],
        [-3],
    ],
)
def test_what_is_not_an_ascending_set_is_refused(ids: list[int]) -> None:
    for encode in (row_set.encode, reference.encode):
        with pytest.raises(ValueError, match="ascending"):
            encode(torch.tensor(ids))


BITS = frame([0b1011, 0b10])  # 4 ids from the first on, the last 9 rows further
GAPS = delta(0, [1, 0, E, 40, 4])  # 5 ids, the last 304 rows after the first
FAR = delta(7, [0] * 7, [64])  # 2 ids, 2^62 + 1 apart
RUNS = runs(2, 0, 0, [90], [2])  # offsets 0, 91 and starts 0, 3 of 5 ids: 0 1 2 94 95


@pytest.mark.parametrize(
    ("coding", "first", "payload", "count", "rows", "what"),
    [
        ("delta32", 0, GAPS, 5, 400, "coding 'delta32'"),
        ("delta", 0, None, 5, 400, "no payload"),
        ("bitmap", 0, None, 5, 400, "no payload"),
        ("runs", 0, None, 5, 400, "no payload"),
        ("range", 0, b"", 5, 70, "a range with a payload"),
        ("range", -1, None, 5, 70, "5 ids from -1 on"),
        ("range", 66, None, 5, 70, "5 ids from 66 on"),
        ("range", 0, None, 71, 70, "71 ids"),
        ("delta", 396, GAPS, 5, 400, "5 ids from 396 on"),
        ("delta", 0, GAPS, -1, 400, "-1 ids"),
        ("delta", 0, GAPS, 5, -1, "table of -1"),
        ("delta", 0, GAPS, 5, 2**62 + 1, "table of 4611686018427387905"),
        ("delta", 0, delta(0), 1, 400, "1 ids, and not a range"),
        ("bitmap", 0, frame([1]), 1, 400, "1 ids, and not a range"),
        ("delta", 0, delta(0), 0, 400, "0 ids, and not a range"),
        # frames
        ("delta", 0, b"", 5, 400, "planes ''"),
        ("delta", 0, b"\0", 5, 400, "not a zstd frame"),
        ("bitmap", 0, b"", 5, 400, "not a zstd frame"),
        ("bitmap", 0, b"\x50\x2a\x4d\x18\x04\0\0\0abcd", 4, 70, "not a zstd frame"),
        ("runs", 0, b"\x02\0\0", 5, 400, "planes ''"),
        ("runs", 0, RUNS[:9], 5, 400, "planes '00'"),
        ("runs", 0, RUNS[:10], 5, 400, "not a zstd frame"),
        ("delta", 0, GAPS[:-1], 5, 400, "row set"),
        ("delta", 0, GAPS + b"\0", 5, 400, "row set"),
        ("delta", 0, GAPS + GAPS[1:], 5, 400, "row set"),
        # bitmaps
        ("bitmap", 0, BITS, 3, 70, "a bitmap of 4 ids, expected 3"),
        ("bitmap", 0, BITS, 5, 70, "a bitmap of 4 ids, expected 5"),
        ("bitmap", 0, BITS, 4, 9, "not below the table's 9 rows"),
        ("bitmap", 60, BITS, 4, 69, "not below the table's 69 rows"),
        ("bitmap", 0, frame([0b1010, 0b11]), 4, 70, "whose ends"),
        ("bitmap", 0, frame([0b1111, 0]), 4, 70, "whose ends"),
        ("bitmap", 0, BITS, 17, 70, "states 2 bytes, expected 3 to 17"),
        ("bitmap", 0, frame([1, 0, 0, 1]), 2, 70, "states 4 bytes, expected 1 to 2"),
        # gaps
        ("delta", 0, b"\x08" + GAPS[1:], 5, 400, "planes '08'"),
        ("delta", 0, b"\x01" + GAPS[1:], 5, 400, "states 5 bytes, expected 8 to 12"),
        ("delta", 0, GAPS, 4, 400, "symbols of 4 whole gaps, expected 3"),
        ("delta", 0, GAPS, 6, 400, "symbols of 4 whole gaps, expected 5"),
        ("delta", 0, delta(0, [1, 0, 40, E]), 5, 400, "symbols of 3 whole gaps"),
        ("delta", 0, delta(0, [1, 0, 40, 4, E]), 5, 400, "symbols of 4 whole gaps"),
        ("delta", 0, GAPS, 5, 304, "not below the table's 304 rows"),
        ("delta", 95, GAPS, 5, 399, "not below the table's 399 rows"),
        ("delta", 0, FAR, 2, 2**62, "not below"),
        ("delta", 0, delta(7, [0] * 7, [127]), 2, 2**62, "not below"),
        ("delta", 0, delta(7, [E] * 7, [E, 254]), 2, 2**62, "not below"),
        ("delta", 0, delta(7, [0] * 28, [63] * 4), 5, 2**62, "not below"),
        ("delta", 0, delta(7, [0] * 21, [0, E, 1, 0]), 4, 2**62, "not below"),
        # runs
        ("runs", 0, runs(1, 0, 0), 5, 400, "1 runs of 5 ids"),
        ("runs", 0, runs(0, 0, 0), 5, 400, "0 runs of 5 ids"),
        ("runs", 0, runs(6, 0, 0, [0] * 10), 5, 400, "6 runs of 5 ids"),
        ("runs", 0, runs(2**63, 0, 0, [0] * 10), 5, 400, "9223372036854775808 runs"),
        ("runs", 0, runs(2, 0, 8, [90], [2]), 5, 400, "planes '0008'"),
        ("runs", 0, runs(2, 0, 1, [90], [2]), 5, 400, "states 2 bytes, expected 3 to 5"),
        ("runs", 0, runs(2, 0, 0, [90], [2, 0]), 5, 400, "symbols of 3 whole gaps, expected 2"),
        ("runs", 0, runs(2, 0, 0, [E, 90]), 5, 400, "symbols of 1 whole gaps, expected 2"),
        ("runs", 0, RUNS, 5, 95, "not below the table's 95 rows"),
        ("runs", 10, RUNS, 5, 105, "not below the table's 105 rows"),
        ("runs", 0, RUNS, 3, 400, "runs of more than 3 ids"),
        ("runs", 0, runs(2, 0, 0, [90], [4]), 5, 400, "runs of more than 5 ids"),
        ("runs", 0, runs(2, 7, 0, [0] * 7, [64], [2]), 5, 2**62, "not below"),
        ("runs", 0, runs(2, 0, 7, [0] * 7, [90], [64]), 5, 400, "runs of more than 5 ids"),
    ],
)
def test_defects_are_refused(
    coding: str, first: int, payload: bytes | None, count: int, rows: int, what: str
) -> None:
    for decode in (row_set.decode, reference.decode):
        with pytest.raises(ValueError, match=what):
            decode(coding, first, payload, count=count, rows=rows)


@pytest.mark.parametrize(
    ("coding", "payload", "rows", "ids"),
    [
        ("bitmap", BITS, 10, [0, 1, 3, 9]),
        ("delta", GAPS, 304 + 1, [0, 2, 3, 299, 304]),
        ("runs", RUNS, 96, [0, 1, 2, 94, 95]),
        ("range", None, 5, [0, 1, 2, 3, 4]),
    ],
)
def test_the_last_row_is_still_inside(
    coding: str, payload: bytes | None, rows: int, ids: list[int]
) -> None:
    for decode in (row_set.decode, reference.decode):
        for first in (0, 40):
            found = decode(coding, first, payload, count=len(ids), rows=first + rows)
            assert found.tolist() == [first + row for row in ids]


def test_another_coding_of_the_same_set_is_read() -> None:
    # A writer takes the coding that the counts give; nothing depends on it.
    ids = [0, 1, 2, 94, 95]
    as_gaps = delta(0, [0, 0, 91, 0])
    assert row_set.decode("delta", 0, as_gaps, count=5, rows=96).tolist() == ids
    as_a_plane = delta(1, [0, 0, 91, 0], [0, 0, 0, 0])
    assert row_set.decode("delta", 0, as_a_plane, count=5, rows=96).tolist() == ids


def test_a_frame_without_its_size_is_refused() -> None:
    unsized = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(4))
    with pytest.raises(ValueError, match="row set"):
        row_set.decode("delta", 0, b"\0" + unsized, count=5, rows=70)


@pytest.mark.parametrize(
    ("coding", "header"), [("bitmap", b""), ("delta", b"\0"), ("runs", b"\2" + bytes(9))]
)
def test_a_bomb_is_refused_by_its_stated_size(coding: str, header: bytes) -> None:
    bomb = header + compress([np.zeros(64 << 20, np.uint8)])
    assert len(bomb) < 10_000
    with pytest.raises(ValueError, match="states 67108864 bytes, expected"):
        row_set.decode(coding, 0, bomb, count=5, rows=2**40)


def test_a_size_that_no_frame_of_this_length_can_hold_is_refused_before_allocating() -> None:
    # A frame of single-segment form with an 8-byte content size and one empty last block.
    claimed = 2**31 - 2
    empty = b"\x28\xb5\x2f\xfd\xe0" + claimed.to_bytes(8, "little") + b"\x01\0\0"
    with pytest.raises(ValueError, match="cannot hold"):
        row_set.decode("delta", 0, b"\0" + empty, count=2**31 - 1, rows=2**40)


def test_a_frame_shorter_than_it_states_is_refused() -> None:
    empty = b"\x28\xb5\x2f\xfd\x20\x04\x01\0\0"  # states 4 bytes, holds none
    with pytest.raises(ValueError, match="row set"):
        row_set.decode("delta", 0, b"\0" + empty, count=5, rows=70)
