from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from recpoint.kernels.row_gather import reference, triton

pytestmark = pytest.mark.gpu

DTYPES = [
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float64,
    torch.uint8,
    torch.bool,
]


@pytest.mark.parametrize("shape", [(), (1,), (3,), (16,), (5, 7), (600,), (0,)])
@pytest.mark.parametrize("dtype", DTYPES)
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


@pytest.mark.parametrize("seed", range(3))
def test_many_sources_are_gathered_at_once_into_one_buffer(device: torch.device, seed: int) -> None:
    torch.manual_seed(seed)
    shapes = [(64,), (), (13,), (16,), (8, 3), (0,), (300,), (1,)]
    rows = [50, 1, 700, 3, 90, 5, 20, 33]
    sources, ids = [], []
    for k, (shape, length) in enumerate(zip(shapes, rows, strict=True)):
        dtype = DTYPES[(k + seed) % len(DTYPES)]
        sources.append((torch.rand(length, *shape) * 100).to(dtype))
        n = 0 if k == 4 else 3 * length  # with duplicates, in no order
        ids.append(torch.randint(0, length, (n,)))
    expected = [
        torch.zeros(len(some), *s.shape[1:], dtype=s.dtype)
        for some, s in zip(ids, sources, strict=True)
    ]
    reference.gather_many(sources, ids, expected)

    # Parts lie at multiples of 16 bytes, one of them 8 bytes further; all else must stay poisoned.
    starts, end = [], 16
    for k, part in enumerate(expected):
        starts.append(-(-end // 16) * 16 + 8 * (k == 3))
        end = starts[-1] + part.nbytes + 1
    buffer = torch.full((end + 16,), 0xA5, dtype=torch.uint8, device=device)
    wanted = buffer.cpu().clone()
    outs = []
    for start, part in zip(starts, expected, strict=True):
        spot = slice(start, start + part.nbytes)
        outs.append(buffer[spot].view(part.dtype).view(part.shape))
        wanted[spot] = part.reshape(-1).view(torch.uint8)
    triton.gather_many(
        [source.to(device) for source in sources], [some.to(device) for some in ids], outs
    )
    assert torch.equal(buffer.cpu(), wanted)


def test_ids_outside_the_table_touch_nothing(device: torch.device) -> None:
    table = torch.arange(6.0, device=device).reshape(3, 2)
    ids = torch.tensor([-1, 2, 3, 2**40, -(2**63), 2**62], device=device)
    out = torch.full((6, 2), -7.0, device=device)
    triton.gather(table, ids, out)
    assert out.tolist() == [[-7.0, -7.0], [4.0, 5.0], *[[-7.0, -7.0]] * 4]
    triton.scatter(torch.zeros(6, 2, device=device), ids, table)
    assert table.tolist() == [[0.0, 1.0], [2.0, 3.0], [0.0, 0.0]]


def test_rows_that_start_inside_a_word_are_copied(device: torch.device) -> None:
    table = torch.arange(9, dtype=torch.uint8, device=device)[1:].reshape(2, 4)
    out = torch.zeros(2, 4, dtype=torch.uint8, device=device)
    triton.gather(table, torch.tensor([1, 0], device=device), out)
    assert out.tolist() == [[5, 6, 7, 8], [1, 2, 3, 4]]


def test_nothing_to_gather_launches_nothing(device: torch.device) -> None:
    triton.gather_many([], [], [])
    table, none = torch.zeros(3, 2, device=device), torch.zeros(0, dtype=torch.int64, device=device)
    triton.gather_many([table], [none], [torch.zeros(0, 2, device=device)])


@pytest.mark.parametrize("dim", [4, 3, 1])
def test_rows_past_two_to_the_31_elements_are_copied(
    device: torch.device, huge: Callable[[int, torch.dtype], torch.Tensor], dim: int
) -> None:
    rows = (1 << 33) // 4 // dim + 1000  # past 2^33 bytes and, as words, past 2^31
    table = huge(rows * dim, torch.float32).view(rows, dim)
    ids = torch.tensor([rows - 1, 0, rows // 2 + 7, rows - 1, rows], device=device)
    values = torch.arange(4.0 * dim, device=device).reshape(4, dim) + 1
    for i in range(3):
        table[ids[i]] = values[i]
    out = torch.full((5, dim), -7.0, device=device)
    triton.gather(table, ids, out)
    assert torch.equal(out, torch.cat([values[:3], values[:1], torch.full_like(values[:1], -7)]))
    triton.scatter(out[:3] * 2, ids[:3], table)
    assert torch.equal(table[ids[:3]], values[:3] * 2)
