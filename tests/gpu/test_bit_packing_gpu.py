from __future__ import annotations

import pytest
import torch

from recpoint.kernels.bit_packing import BITS, reference, triton

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dim", [0, 1, 2, 3, 5, 7, 8, 9, 16, 127])
def test_packing_equals_the_reference(device: torch.device, dim: int, bits: int) -> None:
    torch.manual_seed(dim)
    codes = torch.randint(0, 256, (29, dim), dtype=torch.uint8)  # higher bits must be dropped
    packed = triton.pack(codes.to(device), bits)
    assert torch.equal(packed.cpu(), reference.pack(codes, bits))
    unpacked = triton.unpack(packed, dim=dim, bits=bits)
    assert torch.equal(unpacked.cpu(), codes & (2**bits - 1))
    noise = torch.randint(0, 256, packed.shape, dtype=torch.uint8)
    assert torch.equal(
        triton.unpack(noise.to(device), dim=dim, bits=bits).cpu(),
        reference.unpack(noise, dim=dim, bits=bits),
    )
