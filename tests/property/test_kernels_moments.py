"""Codes of any second moments: those of the reference, in order, in the bound, and for ever."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from recpoint.kernels.moments import decode, encode, reference
from recpoint.kernels.moments.grid import LARGEST, LEAST_SHIFT
from tests.example_counts import examples

#: Bits of values: zero, the ends, subnormal ones, and all others alike.
PATTERNS = st.one_of(
    st.sampled_from([0, 1, LARGEST, LARGEST - 1, 0x00800000, 0x007FFFFF]),
    st.integers(0, 0x00800000),
    st.integers(0, LARGEST),
    st.integers(0x3F000000, 0x3F800000),
)


@st.composite
def rows(draw: st.DrawFn) -> Tensor:
    m = draw(st.integers(1, 20))
    row = st.lists(PATTERNS, min_size=m, max_size=m)
    patterns = draw(st.lists(row, min_size=1, max_size=5))
    return torch.tensor(patterns, dtype=torch.int32).view(torch.float32)


@settings(max_examples=examples(150), deadline=None)
@given(rows())
def test_any_rows(exact: Tensor) -> None:
    coded, expected = encode(exact), reference.encode(exact)
    assert all(torch.equal(*pair) for pair in zip(coded, expected, strict=True))
    assert not bool(coded.refused.any())
    decoded = decode(coded.codes, coded.grids)
    shift = LEAST_SHIFT + ((coded.grids.double() % 2**16) / 2**12).floor()[:, None]
    bound = torch.maximum(torch.exp2(shift - 24) * exact.double(), torch.exp2(shift - 149))
    assert bool(((decoded.double() - exact.double()).abs() <= bound).all())
    assert torch.equal(decoded.view(torch.int32) == 0, exact.view(torch.int32) == 0)
    ascending = decoded.gather(1, exact.view(torch.int32).argsort(dim=1)).view(torch.int32)
    assert bool((ascending[:, 1:] >= ascending[:, :-1]).all())
    again = encode(decoded)
    assert torch.equal(decode(again.codes, again.grids), decoded)
