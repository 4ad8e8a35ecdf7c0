from __future__ import annotations

import pytest
import torch

from recpoint.kernels.quantize import reference, triton

pytestmark = [
    pytest.mark.gpu,
    # The interpreter computes with numpy, which reports the overflows that format §3.2 defines.
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
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
    return rows


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    cpu = tensor.cpu()
    return cpu.view(torch.int32) if cpu.dtype == torch.float32 else cpu


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("dim", [1, 2, 3, 8, 13, 16, 64, 1025])
def test_every_output_has_the_bits_of_the_reference(
    device: torch.device, dim: int, bits: int
) -> None:
    rows = difficult_rows(dim)
    expected = reference.quantize(rows, bits)
    found = triton.quantize(rows.to(device), bits)
    for name, left, right in zip(expected._fields, expected, found, strict=True):
        assert torch.equal(bits_of(left), bits_of(right)), name
    packed = reference.quantize_packed(rows, bits)
    found_packed = triton.quantize_packed(rows.to(device), bits)
    for name, left, right in zip(packed._fields, packed, found_packed, strict=True):
        assert torch.equal(bits_of(left), bits_of(right)), name
    decoded = triton.dequantize_packed(*found_packed[:3], dim=dim, bits=bits)
    again = reference.dequantize_packed(*packed[:3], dim=dim, bits=bits)
    assert torch.equal(bits_of(decoded), bits_of(again))


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
