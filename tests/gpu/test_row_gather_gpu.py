from __future__ import annotations

import pytest
import torch

from recpoint.kernels.row_gather import reference, triton

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("shape", [(), (1,), (3,), (16,), (5, 7), (1500,), (0,)])
@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.uint8, torch.bool],
)
def test_gather_and_scatter_equal_the_reference(
    device: torch.device, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    torch.manual_seed(len(shape))
    source = (torch.randint(0, 2, (90, *shape)) * 7).to(dtype)
    ids = torch.randperm(90)[:41]
    out = torch.full((41, *shape), 1, dtype=dtype, device=device)
    triton.gather(source.to(device), ids.to(device), out)
    expected = torch.empty(41, *shape, dtype=dtype)
    reference.gather(source, ids, expected)
    assert torch.equal(out.cpu(), expected)

    dest = source.flip(0).contiguous()
    on_device = dest.to(device, copy=True)
    triton.scatter(out, ids.to(device), on_device)
    reference.scatter(expected, ids, dest)
    assert torch.equal(on_device.cpu(), dest)


def test_ids_outside_the_table_touch_nothing(device: torch.device) -> None:
    table = torch.arange(6.0, device=device).reshape(3, 2)
    ids = torch.tensor([-1, 2, 3, 2**40], device=device)
    out = torch.full((4, 2), -7.0, device=device)
    triton.gather(table, ids, out)
    assert out.tolist() == [[-7.0, -7.0], [4.0, 5.0], [-7.0, -7.0], [-7.0, -7.0]]
    triton.scatter(torch.zeros(4, 2, device=device), ids, table)
    assert table.tolist() == [[0.0, 1.0], [2.0, 3.0], [0.0, 0.0]]


def test_rows_that_start_inside_a_word_are_copied(device: torch.device) -> None:
    table = torch.arange(9, dtype=torch.uint8, device=device)[1:].reshape(2, 4)
    out = torch.zeros(2, 4, dtype=torch.uint8, device=device)
    triton.gather(table, torch.tensor([1, 0], device=device), out)
    assert out.tolist() == [[5, 6, 7, 8], [1, 2, 3, 4]]
