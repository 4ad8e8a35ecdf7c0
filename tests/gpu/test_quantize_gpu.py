from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from recpoint.kernels.bit_packing import BITS
from recpoint.kernels.quantize import ASYMMETRIC, SYMMETRIC, Method, grid, reference, triton
from recpoint.kernels.quantize.shapes import PackedRows, Quantized

pytestmark = [
    pytest.mark.gpu,
    # The interpreter computes with numpy, which reports the overflows that format §3.2 defines.
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:divide by zero encountered:RuntimeWarning"),
]


def difficult_rows(dim: int) -> torch.Tensor:
    torch.manual_seed(dim)
    rows = torch.randn(48, dim)
    scales = [1e-45, 1e-40, 2.0**-126, 2.0**-118, 1e-20, 1e20, 2.0**125, 2.0**126, 1e30, 3e38]
    for i, scale in enumerate(scales):
        rows[i] *= scale
    rows[20], rows[21], rows[22] = 0.0, -0.0, -1.5
    rows[23] = 0.0
    rows[23, 0] = -0.0
    rows[24, -1] = float("nan")
    rows[25, 0], rows[26, -1] = float("inf"), float("-inf")
    rows[27, 0], rows[27, -1] = -1e30, 1e30
    rows[28] = rows[28].relu()
    # Near the ends of binary16: its largest value, its steps above and below 2^-14, and beyond.
    rows[29] *= 65504.0 / rows[29].abs().max().clamp_min(1e-3)
    rows[30], rows[31], rows[32] = rows[30] * 1e5, rows[31] * 2.0**-14, rows[32] * 2.0**-20
    rows[33], rows[34] = 1000.0 + rows[33] * 1e-3, rows[34] * 1e-3 - 30.0
    rows[35], rows[36], rows[37] = 1.0 / 3.0, 65504.0, -65536.0
    return rows


def difficult_for(device: torch.device, dim: int, turn: int) -> torch.Tensor:
    """The difficult rows; in the interpreter of long ones every fourth: four turns have them all.

    There a long row is a program of its own, which takes a tenth of a second and more.
    """
    rows = difficult_rows(dim)
    return rows[turn::4].contiguous() if device.type == "cpu" and dim > 1024 else rows


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    cpu = tensor.cpu()
    return cpu.view(torch.int32) if cpu.dtype == torch.float32 else cpu


def require_equal(found: Sequence[torch.Tensor], expected: PackedRows | Quantized) -> None:
    for name, left, right in zip(expected._fields, expected, found, strict=True):
        assert torch.equal(bits_of(left), bits_of(right)), name


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dim", [1, 2, 3, 8, 13, 16, 64, 1025])
def test_every_output_has_the_bits_of_the_reference(
    device: torch.device, dim: int, bits: int
) -> None:
    rows = difficult_for(device, dim, BITS.index(bits))
    require_equal(triton.quantize(rows.to(device), bits), reference.quantize(rows, bits))
    packed = reference.quantize_packed(rows, bits)
    found_packed = triton.quantize_packed(rows.to(device), bits)
    require_equal(found_packed, packed)
    decoded = triton.dequantize_packed(*found_packed[:3], dim=dim, bits=bits)
    again = reference.dequantize_packed(*packed[:3], dim=dim, bits=bits)
    assert torch.equal(bits_of(decoded), bits_of(again))


@pytest.mark.parametrize("method", [ASYMMETRIC, SYMMETRIC], ids=lambda method: method.name)
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize(("dim", "bits"), [(1, 4), (7, 3), (16, 4), (33, 2), (64, 8), (2050, 3)])
def test_each_plain_method_and_parameter_width_has_the_bits_of_the_reference(
    device: torch.device, method: Method, half: bool, dim: int, bits: int
) -> None:
    rows = difficult_for(device, dim, 2 * half + (method == SYMMETRIC))
    expected = reference.quantize_packed(rows, bits, method, half_parameters=half)
    assert dim == 1 or half == bool(expected.wide.any()), "no row tells the widths apart"
    found = triton.quantize_packed(rows.to(device), bits, method, half_parameters=half)
    require_equal(found, expected)


SEARCHES = [
    Method(name="greedy", bins=20, ratio_permille=500),
    Method(name="refit", bins=5, refits=2),
    Method(name="refit", bins=2, refits=0),
    Method(name="refit", bins=9, refits=1),
    Method(name="refit", bins=0, refits=2),
    Method(name="level", refits=2),
]


@pytest.mark.parametrize(
    "method", SEARCHES, ids=lambda method: f"{method.name}-{method.bins}-{method.refits}"
)
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize(("dim", "bits"), [(1, 4), (5, 3), (16, 4), (64, 2), (13, 8)])
def test_each_search_finds_the_parameters_of_the_reference(
    device: torch.device, method: Method, half: bool, dim: int, bits: int
) -> None:
    rows = difficult_rows(dim)
    expected = reference.quantize_packed(rows, bits, method, half_parameters=half)
    require_equal(
        triton.quantize_packed(rows.to(device), bits, method, half_parameters=half), expected
    )
    plain = reference.quantize_packed(rows, bits, half_parameters=half)
    if 1 < dim and bits < 8:
        assert not torch.equal(plain.scale, expected.scale), "the search found nothing"


@pytest.mark.parametrize("dim", [5000, grid.LARGEST_DIM + 1])
def test_long_rows_are_searched_as_far_as_sums_are_exact(device: torch.device, dim: int) -> None:
    torch.manual_seed(dim)
    rows = torch.randn(3, dim)
    expected = reference.quantize_packed(rows, 2, SEARCHES[2])
    require_equal(triton.quantize_packed(rows.to(device), 2, SEARCHES[2]), expected)
    searched = not torch.equal(expected.scale, reference.quantize_packed(rows, 2).scale)
    assert searched == (dim <= grid.LARGEST_DIM)


@pytest.mark.parametrize("bits", [3, 4])
def test_quotients_next_to_the_middle_of_two_codes_round_alike(
    device: torch.device, bits: int
) -> None:
    # Rows 0, L·s and the floats around (c + 1/2)·s: each is the least that gets its code, or not.
    levels = 2**bits - 1
    torch.manual_seed(bits)
    scale = torch.rand(60) + torch.logspace(-30, 30, 60)
    middles = (torch.arange(levels) + 0.5) * scale[:, None]
    bits_around = middles.view(torch.int32)[:, :, None] + torch.arange(-2, 3, dtype=torch.int32)
    around = bits_around.view(torch.float32).reshape(60, -1)
    rows = torch.cat([torch.zeros(60, 1), around, (scale * levels)[:, None]], dim=1)
    expected = reference.quantize_packed(rows, bits)
    require_equal(triton.quantize_packed(rows.to(device), bits), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("dim", "bits"), [(5, 3), (16, 4), (64, 2)])
def test_rows_are_quantized_straight_from_their_table(
    device: torch.device, dtype: torch.dtype, dim: int, bits: int
) -> None:
    table = difficult_rows(dim).to(dtype)
    on_device = table.to(device)
    ids = torch.randint(0, 48, (301,))  # with duplicates, in no order, odd
    for some in (ids, ids[:1], ids[:0]):
        expected = reference.quantize_packed(table[some].float(), bits, half_parameters=True)
        found = triton.quantize_rows(on_device, some.to(device), bits, half_parameters=True)
        require_equal(found, expected)
    require_equal(
        triton.quantize_rows(on_device, None, bits), reference.quantize_packed(table.float(), bits)
    )


def test_ids_outside_the_table_give_exact_rows_without_codes(device: torch.device) -> None:
    table = torch.arange(24.0, device=device).reshape(3, 8)
    ids = torch.tensor([2, -1, 3, 2**40, -(2**63), 0], device=device)
    packed, scale, offset, exact, wide = triton.quantize_rows(table, ids, 4)
    assert exact.tolist() == [False, True, True, True, True, False]
    assert wide.tolist() == [False] * 6
    assert not packed[1:5].any() and packed[0].any()
    assert scale[1:5].tolist() == offset[1:5].tolist() == [0.0] * 4
    assert offset[[0, 5]].tolist() == [16.0, 0.0]


@pytest.mark.parametrize("dim", [64, 5])
def test_rows_past_two_to_the_31_elements_are_quantized(
    device: torch.device, huge: Callable[[int, torch.dtype], torch.Tensor], dim: int
) -> None:
    rows = (1 << 31) // dim + 1000
    table = huge(rows * dim, torch.float32).view(rows, dim)
    ids = torch.tensor([rows - 1, 0, rows // 2 + 7, rows - 1], device=device)
    values = torch.randn(3, dim)
    for i in range(3):
        table[ids[i]] = values[i].to(device)
    expected = reference.quantize_packed(values[[0, 1, 2, 0]], 4)
    require_equal(triton.quantize_rows(table, ids, 4), expected)


def test_product_and_sum_are_rounded_separately(device: torch.device) -> None:
    torch.manual_seed(1)
    codes = torch.randint(0, 256, (200, 16), dtype=torch.uint8)
    scale, offset = torch.rand(200) * 0.01, torch.randn(200)
    found = triton.dequantize(codes.to(device), scale.to(device), offset.to(device))
    assert torch.equal(bits_of(found), bits_of(reference.dequantize(codes, scale, offset)))
    fused = (codes.double() * scale.double()[:, None] + offset.double()[:, None]).float()
    assert not torch.equal(found.cpu(), fused), "the values do not tell the two roundings apart"


def test_no_rows_give_no_rows(device: torch.device) -> None:
    found = triton.quantize_packed(torch.zeros(0, 5, device=device), 3)
    assert [tuple(part.shape) for part in found] == [(0, 2), (0,), (0,), (0,), (0,)]
    decoded = triton.dequantize_packed(*found[:3], dim=5, bits=3)
    assert tuple(decoded.shape) == (0, 5)
