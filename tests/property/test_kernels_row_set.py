"""Row sets of any shape come back; bytes of any shape are a set that fits, or a ValueError."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recpoint.kernels import row_set
from recpoint.kernels.row_set import reference
from recpoint.kernels.row_set.frame import compress
from tests.example_counts import examples

SPANS = st.sampled_from([60, 10_000, 2**32 + 5, 2**48])
CODINGS = st.sampled_from(["bitmap", "delta", "runs"])
#: Escapes are rare among random bytes, and zeros are what planes are full of.
SYMBOLS = st.lists(st.one_of(st.just(255), st.just(0), st.integers(0, 255)), max_size=40)


@st.composite
def sets(draw: st.DrawFn) -> tuple[list[int], int]:
    rows = draw(SPANS)
    starts = draw(st.sets(st.integers(0, rows - 1), max_size=30))
    length = draw(st.sampled_from([1, 1, 2, 9]))
    return sorted({min(row + i, rows - 1) for row in starts for i in range(length)}), rows


@settings(deadline=None)
@given(sets())
def test_a_set_comes_back_in_the_bytes_of_the_reference(given_set: tuple[list[int], int]) -> None:
    ids, rows = given_set
    tensor = torch.tensor(ids, dtype=torch.int64)
    coded = row_set.encode(tensor)
    assert coded == reference.encode(tensor)
    consecutive = ids == list(range(ids[0], ids[0] + len(ids))) if ids else True
    assert (coded.coding == "range") == consecutive
    assert coded.first == (ids[0] if ids else 0)
    for decode in (row_set.decode, reference.decode):
        assert decode(*coded, count=len(ids), rows=rows).tolist() == ids


@settings(deadline=None)
@given(sets(), st.data())
def test_damaged_payloads_never_give_a_wrong_kind_of_set(
    given_set: tuple[list[int], int], data: st.DataObject
) -> None:
    ids, rows = given_set
    coding, first, payload = row_set.encode(torch.tensor(ids, dtype=torch.int64))
    damaged = bytearray(payload or b"")
    for _ in range(data.draw(st.integers(1, 3))):
        if damaged:
            at = data.draw(st.integers(0, len(damaged) - 1))
            damaged[at] ^= data.draw(st.integers(1, 255))
    counts = [len(ids), len(ids) + 1, 0]
    # A range, or the last of several runs, may well have so many rows: their ids fill the memory.
    if coding in ("bitmap", "delta"):
        counts.append(2**31 - 1)
    count = data.draw(st.sampled_from(counts))
    _decodes_to_a_set_or_is_refused(coding, first, bytes(damaged), count, rows)


@settings(deadline=None, max_examples=examples(300))
@given(CODINGS, SYMBOLS, st.integers(0, 8), st.integers(0, 8), st.integers(2, 12), SPANS, st.data())
def test_arbitrary_content_agrees_with_the_reference(
    coding: str,
    content: list[int],
    low: int,
    low_starts: int,
    count: int,
    rows: int,
    data: st.DataObject,
) -> None:
    runs = data.draw(st.integers(1, count))
    header = {
        "bitmap": b"",
        "delta": bytes([low]),
        "runs": runs.to_bytes(8, "little") + bytes([low, low_starts]),
    }[coding]
    if coding != "bitmap" and data.draw(st.booleans()):
        # As many symbols as there have to be: what is in them is looked at, too.
        gaps = count - 1 if coding == "delta" else runs - 1
        planes = low * gaps if coding == "delta" else (low + low_starts) * gaps
        ends = gaps if coding == "delta" else 2 * gaps
        content = (content + [0] * 200)[: planes + ends]
        content[planes:] = [min(symbol, 254) for symbol in content[planes:]]
        content[planes:planes] = [255] * data.draw(st.integers(0, ends))
    payload = header + compress([np.array(content, np.uint8)])
    _decodes_to_a_set_or_is_refused(coding, data.draw(st.integers(0, 50)), payload, count, rows)


@settings(deadline=None)
@given(CODINGS, st.binary(max_size=60), st.integers(0, 20))
def test_arbitrary_bytes_are_refused_or_a_set(coding: str, payload: bytes, count: int) -> None:
    _decodes_to_a_set_or_is_refused(coding, 0, payload, count, 1000)
    _decodes_to_a_set_or_is_refused(coding, 0, b"\x28\xb5\x2f\xfd" + payload, count, 1000)


def _decodes_to_a_set_or_is_refused(
    coding: str, first: int, payload: bytes, count: int, rows: int
) -> None:
    try:
        ids = row_set.decode(coding, first, payload, count=count, rows=rows)
    except ValueError as error:
        found = f"ValueError: {error}"
    else:
        found = str(ids.tolist())
        assert ids.numel() == count
        assert (ids.diff() > 0).all() and (ids >= 0).all() and (ids < rows).all()
    try:
        again = reference.decode(coding, first, payload, count=count, rows=rows)
    except ValueError as error:
        assert found == f"ValueError: {error}"
    else:
        assert found == str(again.tolist())
