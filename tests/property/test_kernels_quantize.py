"""What format §3.2 and §3.3 promise, for arbitrary bit patterns of binary32."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recpoint.kernels import bit_packing, quantize
from recpoint.kernels.bit_packing import BITS
from recpoint.kernels.quantize import ASYMMETRIC, SYMMETRIC, Method, reference
from recpoint.kernels.quantize.method import WIDEST_STEP

WIDTHS = st.sampled_from(BITS)
PLAIN = st.sampled_from([SYMMETRIC, ASYMMETRIC])
SEARCHES = st.one_of(
    st.builds(
        Method,
        name=st.just("greedy"),
        bins=st.sampled_from([1, 3, 25]),
        ratio_permille=st.sampled_from([1, 160, 600, 1000]),
    ),
    st.builds(
        Method,
        name=st.just("refit"),
        bins=st.sampled_from([0, 2, 3, 4, 5]),
        refits=st.sampled_from([0, 1, 3]),
    ),
    st.builds(Method, name=st.just("level"), refits=st.sampled_from([0, 1, 3])),
)


@st.composite
def matrices(draw: st.DrawFn) -> torch.Tensor:
    """Rows of raw patterns, of one magnitude, or of a few repeated values."""
    n, dim = draw(st.integers(0, 4)), draw(st.integers(1, 20))
    kind = draw(st.sampled_from(["patterns", "floats", "few"]))
    if kind == "patterns":
        value = st.integers(0, 2**32 - 1)
        patterns = draw(st.lists(value, min_size=n * dim, max_size=n * dim))
        array = np.array(patterns, np.uint32).view(np.float32)
    elif kind == "floats":
        exponent = draw(st.integers(-149, 127))
        unit = st.floats(-1, 1, width=32)
        values = draw(st.lists(unit, min_size=n * dim, max_size=n * dim))
        array = (np.array(values, np.float64) * 2.0**exponent).astype(np.float32)
    else:
        choice = st.sampled_from([0.0, -0.0, 1.0, -1.0, 1e30, -1e30, 1e-45, 2.0**-126, 2.0**126])
        values = draw(st.lists(choice, min_size=n * dim, max_size=n * dim))
        array = np.array(values, np.float32)
    return torch.from_numpy(array.reshape(n, dim).copy())


def patterns(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int32) if tensor.dtype == torch.float32 else tensor


@settings(deadline=None)
@given(matrices(), WIDTHS, PLAIN, st.booleans())
def test_the_fast_version_has_the_bits_of_the_reference(
    rows: torch.Tensor, bits: int, method: Method, half: bool
) -> None:
    found = quantize.quantize_packed(rows, bits, method, half_parameters=half)
    expected = reference.quantize_packed(rows, bits, method, half_parameters=half)
    for left, right in zip(found, expected, strict=True):
        assert torch.equal(patterns(left), patterns(right))
    dim = rows.shape[1]
    decoded = quantize.dequantize_packed(*found[:3], dim=dim, bits=bits)
    again = reference.dequantize_packed(*found[:3], dim=dim, bits=bits)
    assert torch.equal(patterns(decoded), patterns(again))


@settings(deadline=None)
@given(matrices(), WIDTHS, PLAIN, st.booleans())
def test_each_value_decodes_within_the_bound_or_its_row_is_exact(
    rows: torch.Tensor, bits: int, method: Method, half: bool
) -> None:
    found = quantize.quantize_packed(rows, bits, method, half_parameters=half)
    packed, scale, offset, exact, _ = found
    decoded = quantize.dequantize_packed(packed, scale, offset, dim=rows.shape[1], bits=bits)
    assert decoded.isfinite().all()
    assert exact[~rows.isfinite().all(dim=1)].all()
    kept = ~exact
    x, y, step = rows[kept].double(), decoded[kept].double(), scale[kept].double()[:, None]
    span = (step * (2**bits - 1)).expand_as(x)
    bound = step / 2 + 4 * 2.0**-24 * torch.maximum(x.abs(), span)
    assert ((y - x).abs() <= bound).all()


@settings(deadline=None)
@given(matrices(), WIDTHS, PLAIN)
def test_parameters_of_binary16_are_such_or_their_row_is_wide(
    rows: torch.Tensor, bits: int, method: Method
) -> None:
    found = quantize.quantize(rows, bits, method, half_parameters=True)
    plain = quantize.quantize(rows, bits, method)
    assert not plain.wide.any() and torch.equal(found.exact, plain.exact)
    for half, single in zip(found[1:3], plain[1:3], strict=True):
        narrow, wide = half[~found.wide], found.wide
        assert torch.equal(narrow.half().float().view(torch.int32), narrow.view(torch.int32))
        assert torch.equal(patterns(half[wide]), patterns(single[wide]))
    assert (found.scale <= plain.scale * WIDEST_STEP).all()
    assert not (found.wide & found.exact).any()


@settings(deadline=None)
@given(matrices(), WIDTHS, SEARCHES, st.booleans())
def test_a_search_has_the_bits_of_the_reference(
    rows: torch.Tensor, bits: int, method: Method, half: bool
) -> None:
    found = quantize.quantize_packed(rows, bits, method, half_parameters=half)
    expected = reference.quantize_packed(rows, bits, method, half_parameters=half)
    for left, right in zip(found, expected, strict=True):
        assert torch.equal(patterns(left), patterns(right))


@settings(deadline=None)
@given(matrices(), WIDTHS, SEARCHES, st.booleans())
def test_a_search_never_has_a_larger_error_and_decodes_to_finite_values(
    rows: torch.Tensor, bits: int, method: Method, half: bool
) -> None:
    found = quantize.quantize(rows, bits, method, half_parameters=half)
    plain = quantize.quantize(rows, bits, half_parameters=half)
    assert torch.equal(found.exact, plain.exact) and torch.equal(found.wide, plain.wide)
    narrow = ~(found.wide | found.exact) & half
    for parameter in (found.scale[narrow], found.offset[narrow]):
        assert torch.equal(patterns(parameter.half().float()), patterns(parameter))
    kept = ~found.exact
    steps = torch.where(plain.scale > 0, plain.scale, torch.ones_like(plain.scale))[kept].double()
    errors = []
    for each in (found, plain):
        decoded = quantize.dequantize(each.codes, each.scale, each.offset)
        assert decoded.isfinite().all()
        # In steps, so that squares neither overflow nor vanish.
        difference = (decoded[kept].double() - rows[kept].double()) / steps[:, None]
        errors.append(difference.square().sum(dim=1))
    assert (errors[0] <= errors[1]).all()


@settings(deadline=None)
@given(matrices(), WIDTHS)
def test_more_bits_never_have_a_larger_step(rows: torch.Tensor, bits: int) -> None:
    coarse, fine = quantize.quantize(rows, bits), quantize.quantize(rows, 8)
    both = ~(coarse.exact | fine.exact)
    assert (fine.scale[both] <= coarse.scale[both]).all()
    assert (coarse.exact <= fine.exact).all()  # a range too small for few levels is so for many


@settings(deadline=None)
@given(matrices(), WIDTHS)
def test_larger_values_never_have_smaller_codes(rows: torch.Tensor, bits: int) -> None:
    codes, _, _, exact, _ = quantize.quantize(rows, bits)
    for row, code in zip(rows[~exact], codes[~exact], strict=True):
        order = row.argsort()
        assert (code[order].int().diff() >= 0).all()


@settings(deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 255), min_size=11, max_size=11), max_size=3),
    st.integers(0, 11),
    WIDTHS,
)
def test_packing_is_the_bit_string_of_the_codes(
    values: list[list[int]], dim: int, bits: int
) -> None:
    codes = torch.tensor(values, dtype=torch.uint8).reshape(len(values), 11)[:, :dim].contiguous()
    packed = bit_packing.pack(codes, bits)
    assert packed.shape == (len(values), bit_packing.packed_width(dim, bits))
    for row, stored in zip(codes.tolist(), packed.tolist(), strict=True):
        string = "".join(format(code % 2**bits, f"0{bits}b")[::-1] for code in row)
        string += "0" * (-len(string) % 8)
        assert stored == [int(string[b : b + 8][::-1], 2) for b in range(0, len(string), 8)]
    assert torch.equal(bit_packing.unpack(packed, dim=dim, bits=bits), codes & (2**bits - 1))
