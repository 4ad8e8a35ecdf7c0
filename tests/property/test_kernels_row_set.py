"""Row sets of any shape come back; bytes of any shape are a set that fits, or a ValueError."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recpoint.kernels import row_set
from recpoint.kernels.row_set import reference
from recpoint.kernels.row_set.coding import compress

SPANS = st.sampled_from([40, 10_000, 2**32 + 5, 2**48])


@st.composite
def sets(draw: st.DrawFn) -> tuple[list[int], int]:
    rows = draw(SPANS)
    return sorted(draw(st.sets(st.integers(0, rows - 1), max_size=40))), rows


@settings(deadline=None)
@given(sets())
def test_a_set_comes_back_in_the_bytes_of_the_reference(given_set: tuple[list[int], int]) -> None:
    ids, rows = given_set
    tensor = torch.tensor(ids, dtype=torch.int64)
    coded = row_set.encode(tensor)
    assert coded == reference.encode(tensor)
    consecutive = ids == list(range(ids[0], ids[0] + len(ids))) if ids else True
    assert (coded.coding == "range") == consecutive
    coding, first, payload = coded
    for decode in (row_set.decode, reference.decode):
        assert decode(coding, first, payload, count=len(ids), rows=rows).tolist() == ids


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
    count = data.draw(st.sampled_from([len(ids), len(ids) + 1, 0, 2**31 - 1]))
    _decodes_to_a_set_or_is_refused(coding, first, bytes(damaged), count, rows)


@settings(deadline=None)
@given(
    st.sampled_from([("delta32", 4), ("delta64", 8)]),
    st.integers(1, 6),
    SPANS,
    st.data(),
)
def test_arbitrary_differences_agree_with_the_reference(
    coding: tuple[str, int], count: int, rows: int, data: st.DataObject
) -> None:
    name, item_bytes = coding
    planes = data.draw(st.binary(min_size=count * item_bytes, max_size=count * item_bytes))
    keep = data.draw(st.integers(1, item_bytes)) * count
    payload = compress(planes[:keep] + bytes(len(planes) - keep))
    _decodes_to_a_set_or_is_refused(name, None, payload, count, rows)


@settings(deadline=None)
@given(st.binary(max_size=60), st.integers(0, 20))
def test_arbitrary_bytes_are_refused_or_a_set(payload: bytes, count: int) -> None:
    _decodes_to_a_set_or_is_refused("delta32", None, payload, count, 1000)
    _decodes_to_a_set_or_is_refused("delta32", None, b"\x28\xb5\x2f\xfd" + payload, count, 1000)


def _decodes_to_a_set_or_is_refused(
    coding: str, first: int | None, payload: bytes, count: int, rows: int
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
