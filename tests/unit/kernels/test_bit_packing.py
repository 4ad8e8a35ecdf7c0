from __future__ import annotations

import numpy as np
import pytest
import torch

from recpoint.kernels import bit_packing
from recpoint.kernels.bit_packing import reference
from recpoint.kernels.native import library
from tests.unit.kernels.every import every

DIMS = [0, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 64, 65, 128]


@pytest.mark.parametrize("bits", bit_packing.BITS)
@every("dim", DIMS)
def test_both_directions_equal_the_reference(dim: int, bits: int, threads: int) -> None:
    draw = torch.Generator().manual_seed(dim)
    # Higher bits of a code are dropped, spare bits of a row's last byte ignored.
    codes = torch.randint(0, 256, (11, dim), generator=draw, dtype=torch.uint8)
    packed = bit_packing.pack(codes, bits)
    assert torch.equal(packed, reference.pack(codes, bits))
    garbage = torch.randint(0, 256, packed.shape, generator=draw, dtype=torch.uint8)
    for given in (packed, garbage):
        found = bit_packing.unpack(given, dim=dim, bits=bits)
        assert torch.equal(found, reference.unpack(given, dim=dim, bits=bits))
    back = bit_packing.unpack(packed, dim=dim, bits=bits)
    assert torch.equal(back.int(), codes.int() % 2**bits)


@pytest.mark.parametrize("bits", bit_packing.BITS)
@every("dim", [1, 5, 8, 13, 16])
def test_nothing_beside_a_row_is_touched(dim: int, bits: int) -> None:
    width = bit_packing.packed_width(dim, bits)
    codes = (np.arange(dim) % 2**bits).astype(np.uint8)
    (expected,) = reference.pack(torch.from_numpy(codes[None]), bits)
    for at in range(9):
        packed = np.full(at + width + 9, 171, np.uint8)
        library.pack(codes.ctypes.data, packed.ctypes.data + at, dim, bits, 1, 1)
        assert packed[at : at + width].tolist() == expected.tolist()
        assert set(packed[:at]) | set(packed[at + width :]) == {171}
        found = np.full(at + dim + 9, 171, np.uint8)
        library.unpack(packed.ctypes.data + at, found.ctypes.data + at, dim, bits, 1, 1)
        assert found[at : at + dim].tolist() == codes.tolist()
        assert set(found[:at]) | set(found[at + dim :]) == {171}


def test_no_rows() -> None:
    for bits in bit_packing.BITS:
        packed = bit_packing.pack(torch.empty(0, 9, dtype=torch.uint8), bits)
        assert packed.shape == (0, bit_packing.packed_width(9, bits))
        assert bit_packing.unpack(packed, dim=9, bits=bits).shape == (0, 9)


@pytest.mark.parametrize("bits", [0, 1, 7, 9, -2])
def test_other_widths_are_refused(bits: int) -> None:
    with pytest.raises(ValueError, match=f"bits: {bits}, expected one of"):
        bit_packing.pack(torch.zeros(1, 1, dtype=torch.uint8), bits)


def test_packed_rows_of_another_width_are_refused() -> None:
    with pytest.raises(ValueError, match="3 bytes a row for 5 codes of 3 bits"):
        bit_packing.unpack(torch.zeros(2, 3, dtype=torch.uint8), dim=5, bits=3)
