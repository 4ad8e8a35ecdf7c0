from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from recpoint.kernels.erasure import reference, triton

pytestmark = pytest.mark.gpu

#: Rows and bytes of a row: words, odd widths, several programs, nothing.
SHAPES = [(7, 64), (1, 1), (5, 3), (3, 1301), (3, 1412), (0, 8), (4, 0)]


def stripes(members: int, shape: tuple[int, int], device: torch.device) -> list[Tensor]:
    return [torch.randint(0, 256, shape, dtype=torch.uint8).to(device) for _ in range(members)]


def poisoned(like: Tensor) -> Tensor:
    return torch.full_like(like, 0xA5)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("data", [1, 2, 5, 17])
def test_parities_and_sums_equal_the_reference(
    device: torch.device, shape: tuple[int, int], data: int
) -> None:
    torch.manual_seed(data)
    members = stripes(data, shape, device)
    expected = [torch.empty(shape, dtype=torch.uint8) for _ in range(2)]
    on_cpu = [member.cpu() for member in members]
    reference.encode(on_cpu, expected)
    for count in (1, 2):
        found = [poisoned(members[0]) for _ in range(count)]
        triton.encode(members, found)
        for left, right in zip(found, expected, strict=False):
            assert torch.equal(left.cpu(), right)
    coefficients = torch.randint(0, 256, (data,)).tolist()
    out = poisoned(members[0])
    triton.combine(members, coefficients, out)
    reference.combine(on_cpu, coefficients, expected[0])
    assert torch.equal(out.cpu(), expected[0])
    triton.difference(members[0], members[-1], out)
    assert torch.equal(out.cpu(), on_cpu[0] ^ on_cpu[-1])


def test_every_element_is_multiplied(device: torch.device) -> None:
    elements = torch.arange(256, dtype=torch.uint8).expand(16, 256).contiguous()
    slots, positions = torch.arange(16), torch.tensor([*range(0, 225, 16), 254])
    parity = torch.zeros_like(elements)
    on_device = parity.to(device, copy=True)
    triton.apply(on_device, slots.to(device), elements.to(device), positions.to(device))
    reference.apply(parity, slots, elements, positions)
    assert torch.equal(on_device.cpu(), parity)
    for coefficient in (0, 1, 2, 3, 29, 128, 200, 255):
        out, expected = poisoned(on_device[:1]), torch.empty_like(elements[:1])
        triton.combine([elements[:1].to(device)], [coefficient], out)
        reference.combine([elements[:1]], [coefficient], expected)
        assert torch.equal(out.cpu(), expected)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("begin", [0, 1, 3])
@pytest.mark.parametrize("with_positions", [False, True])
def test_differences_of_the_same_slots_are_all_applied(
    device: torch.device, shape: tuple[int, int], begin: int, with_positions: bool
) -> None:
    """The parity begins anywhere in a word, and the bytes around it stay as they are."""
    n, row_bytes = shape
    rows = 4
    torch.manual_seed(n + begin)
    around = torch.randint(0, 256, (rows * row_bytes + 8,), dtype=torch.uint8)
    differences = torch.randint(0, 256, (3 * n, row_bytes), dtype=torch.uint8)
    slots = torch.randint(0, rows, (3 * n,))
    positions = torch.randint(0, 255, (3 * n,)) if with_positions else None
    on_device = around.to(device, copy=True)

    def parity(of: Tensor) -> Tensor:
        return of[begin : begin + rows * row_bytes].view(rows, row_bytes)

    triton.apply(
        parity(on_device), slots.to(device), differences.to(device),
        None if positions is None else positions.to(device),
    )  # fmt: skip
    reference.apply(parity(around), slots, differences, positions)
    assert torch.equal(on_device.cpu(), around)


def test_indices_out_of_range_touch_nothing(device: torch.device) -> None:
    parity = torch.arange(12, dtype=torch.uint8).reshape(3, 4).to(device)
    slots = torch.tensor([-1, 3, 2**40, -(2**63), 1, 1], device=device)
    positions = torch.tensor([0, 0, 0, 0, 255, -1], device=device)
    ones = torch.ones(6, 4, dtype=torch.uint8, device=device)
    triton.apply(parity, slots, ones, positions)
    triton.apply(parity, slots[:4], ones[:4], None)
    assert parity.flatten().tolist() == list(range(12))


def test_slots_past_two_to_the_32_bytes_are_found(
    device: torch.device, huge: Callable[[int, torch.dtype], Tensor]
) -> None:
    row_bytes = 12
    rows = (1 << 32) // row_bytes + 1000
    parity = huge(rows * row_bytes, torch.uint8).view(rows, row_bytes)
    slots = torch.tensor([rows - 1, 0, rows // 2 + 7, rows - 1], device=device)
    parity[slots] = 0
    differences = torch.randint(0, 256, (4, row_bytes), dtype=torch.uint8, device=device)
    triton.apply(parity, slots, differences, None)
    assert torch.equal(parity[slots[1:3]], differences[1:3])
    assert torch.equal(parity[rows - 1], differences[0] ^ differences[3])
