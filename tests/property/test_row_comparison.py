"""The bound of a validation: never a false alarm, and one wrong code is noticed (format §10)."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from recpoint.catalog.check.rows import DecodedRows, TrainedRows, compare
from recpoint.format.dtypes import Dtype, dtype_name
from recpoint.format.manifest import RowStateSpec, TableSpec
from recpoint.format.row_state import to_bfloat16
from recpoint.kernels import bit_packing, quantize
from recpoint.kernels.bit_packing import BITS
from recpoint.kernels.quantize import ASYMMETRIC, SYMMETRIC, Method, default_method
from tests.example_counts import examples

GREEDY = Method(name="greedy", bins=20, ratio_permille=500)
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
TableDtype = Literal["F64", "F32", "F16", "BF16"]


def spec(rows: int, dim: int, dtype: TableDtype) -> TableSpec:
    return TableSpec(name="t", rows=rows, dim=dim, dtype=dtype, row_states=())


def method_of(name: str, bits: int) -> Method:
    searches = {"refit": default_method(bits if bits < 8 else 4), "greedy": GREEDY}
    return {"asymmetric": ASYMMETRIC, "symmetric": SYMMETRIC, **searches}[name]


def stored(rows: Tensor, bits: int, method: Method, half: bool) -> tuple[Tensor, DecodedRows]:
    """Positions of the rows that can be quantized, and what a chunk of them holds."""
    packed, scale, offset, exact, wide = quantize.quantize_packed(
        rows.to(torch.float32), bits, method, half_parameters=half
    )
    kept = torch.nonzero(~(exact | wide)).flatten()
    parameters = scale[kept], offset[kept]
    decoded = quantize.dequantize_packed(packed[kept], *parameters, dim=rows.shape[1], bits=bits)
    return kept, DecodedRows(
        values=decoded.to(rows.dtype),
        row_states=(),
        bits=bits,
        scale=parameters[0],
        offset=parameters[1],
        symmetric=method.name == "symmetric",
        narrow=(),
    )


@settings(max_examples=examples(150), deadline=None)
@given(
    seed=st.integers(0, 2**32),
    dim=st.integers(1, 40),
    bits=st.sampled_from(BITS),
    name=st.sampled_from(["asymmetric", "symmetric", "greedy", "refit"]),
    dtype=st.sampled_from(["F64", "F32", "F16", "BF16"]),
    half=st.booleans(),
    exponent=st.integers(-12, 12),
    shift=st.sampled_from([0.0, 1.0, -30.0, 1000.0]),
)
def test_what_was_quantized_is_never_reported(
    seed: int,
    dim: int,
    bits: int,
    name: str,
    dtype: TableDtype,
    half: bool,
    exponent: int,
    shift: float,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(16, dim, generator=generator) * 2.0**exponent + shift
    rows[0] = shift  # constant
    rows[1, dim // 2] *= 50  # an outlier, which a search may cut off
    if dtype in ("F16", "BF16"):
        rows = rows.to(DTYPES[dtype])
    rows = rows.to(DTYPES[dtype])
    kept, there = stored(rows, bits, method_of(name, bits), half)
    compared = compare(spec(16, dim, dtype), TrainedRows(rows[kept], ()), there)
    assert compared.differences == []
    assert compared.worst <= 1


@settings(max_examples=examples(100), deadline=None)
@given(
    seed=st.integers(0, 2**32),
    dim=st.integers(2, 40),
    bits=st.sampled_from(BITS),
    name=st.sampled_from(["asymmetric", "symmetric", "greedy", "refit"]),
    dtype=st.sampled_from(["F32", "F16", "BF16"]),
    half=st.booleans(),
    data=st.data(),
)
def test_one_wrong_code_is_reported(
    seed: int, dim: int, bits: int, name: str, dtype: TableDtype, half: bool, data: st.DataObject
) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(8, dim, generator=generator).to(DTYPES[dtype])
    method = method_of(name, bits)
    packed, scale, offset, exact, wide = quantize.quantize_packed(
        rows.to(torch.float32), bits, method, half_parameters=half
    )
    assert not exact.any()
    row = data.draw(st.integers(0, 7))
    column = data.draw(st.integers(0, dim - 1))
    codes = bit_packing.unpack(packed, dim=dim, bits=bits)
    before = int(codes[row, column])
    after = before + 1 if before == 0 else before - 1
    x = float(rows[row, column])
    step, low = float(scale[row]), float(offset[row])
    worse = abs(low + after * step - x) - abs(low + before * step - x)
    rounding = {"F32": 0.0, "F16": 2.0**-11, "BF16": 2.0**-8}[dtype] * (abs(x) + step)
    if worse < 0.05 * step + 4 * rounding:
        return  # both codes are equally good, or a step is no more than what the dtype rounds off
    codes[row, column] = after
    decoded = quantize.dequantize(codes, scale, offset).to(rows.dtype)
    there = DecodedRows(
        values=decoded,
        row_states=(),
        bits=bits,
        scale=scale,
        offset=offset,
        symmetric=name == "symmetric",
        narrow=(),
    )
    compared = compare(spec(8, dim, dtype), TrainedRows(rows, ()), there)
    assert [difference.position for difference in compared.differences] == [row]
    assert compared.worst > 1
    assert compared.differences[0].what == f"values[{column}]"


def test_scales_that_cut_rows_off_are_reported() -> None:
    """Each code is the one next to its value; yet the row is worse than the formula makes it."""
    rows = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))
    scale = torch.full((8,), 1e-3)
    offset = torch.zeros(8)
    codes = ((rows - offset[:, None]) / scale[:, None] + 0.5).floor().clamp(0, 15).to(torch.uint8)
    there = DecodedRows(
        values=quantize.dequantize(codes, scale, offset),
        row_states=(),
        bits=4,
        scale=scale,
        offset=offset,
        symmetric=True,
        narrow=(),
    )
    compared = compare(spec(8, 16, "F32"), TrainedRows(rows, ()), there)
    assert len(compared.differences) == 8 and compared.worst <= 1
    assert "squared errors" in compared.differences[0].found


def test_rows_restored_from_codes_and_left_alone_are_equal() -> None:
    rows = torch.randn(30, 7, generator=torch.Generator().manual_seed(2))
    for bits in BITS:
        _, there = stored(rows, bits, default_method(bits), True)
        compared = compare(spec(30, 7, "F32"), TrainedRows(there.values, ()), there)
        assert compared == ([], 0.0)


# --- what is stored exactly ----------------------------------------------------------------------


def exactly(
    values: Tensor, states: tuple[Tensor, ...], narrow: tuple[Dtype | None, ...]
) -> DecodedRows:
    return DecodedRows(
        values=values,
        row_states=states,
        bits=32,
        scale=None,
        offset=None,
        symmetric=False,
        narrow=narrow,
    )


def with_states(values: Tensor, states: tuple[Tensor, ...]) -> TableSpec:
    return TableSpec(
        name="t",
        rows=len(values),
        dim=values.shape[1],
        dtype="F32",
        row_states=tuple(
            RowStateSpec(
                name=f"s{k}", dtype=dtype_name(s.dtype), shape=tuple(s.shape[1:]), optimizer=0
            )
            for k, s in enumerate(states)
        ),
    )


SPECIAL = torch.tensor([0.0, -0.0, 1e-45, float("inf"), float("-inf"), float("nan"), 3.4e38, 1.0])


@pytest.mark.parametrize("at", range(8))
def test_exact_rows_are_compared_bit_by_bit(at: int) -> None:
    values = SPECIAL.repeat(4, 1)
    states = (torch.arange(4), SPECIAL.repeat(4, 1))
    table = with_states(values, states)
    same = exactly(values.clone(), tuple(s.clone() for s in states), (None, None))
    assert compare(table, TrainedRows(values, states), same) == ([], 0.0)
    same.values.view(torch.int32)[2, at] ^= 1
    same.row_states[0][3] += 1
    differences = compare(table, TrainedRows(values, states), same).differences
    assert [(d.position, d.what, d.bound) for d in differences] == [
        (2, f"values[{at}]", ""),
        (3, "row state s0", ""),
    ]


def test_rounded_row_states_are_those_of_the_rule() -> None:
    values = torch.zeros(2, 1)
    states = (torch.cat([SPECIAL, torch.rand(8)]).reshape(2, 8),)
    table = with_states(values, states)
    rounded = to_bfloat16(states[0])
    exact = TrainedRows(values, states)
    assert compare(table, exact, exactly(values, (rounded.float(),), ("BF16",))).differences == []
    for column in range(8):
        other = rounded.clone()
        other.view(torch.int16)[1, column] += 1
        narrow = exactly(values, (other.float(),), ("BF16",))
        differences = compare(table, exact, narrow).differences
        assert [(d.position, d.what) for d in differences] == [(1, f"row state s0[{column}]")]
