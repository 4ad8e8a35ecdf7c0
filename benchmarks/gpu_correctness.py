"""Compares every Triton kernel with its reference on fresh random inputs, before any figure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from benchmarks.gpu_kernels import load

__all__ = ["BITS", "check"]

#: The widths of codes. Not imported: the module that has them needs the compiled kernels.
BITS: Final = (2, 3, 4, 5, 6, 8)


def check(device: torch.device, *, rows: int, seed: int) -> int:
    """Compare all kernels; return the number of compared results.

    Args:
        device: where the Triton kernels run.
        rows: rows of the largest table; the others are smaller.
        seed: of the inputs.

    Raises:
        RuntimeError: a result differs; the message names the operation and its arguments.
    """
    generator = torch.Generator().manual_seed(seed)
    kernels = load()
    checks: list[Callable[..., int]] = [_bitmaps, _gathers, _packing, _quantizers]
    return sum(part(kernels, device, rows, generator) for part in checks)


def _require(name: str, results: Sequence[Any], expected: Sequence[Any]) -> int:
    for number, (got, right) in enumerate(zip(results, expected, strict=True)):
        if isinstance(got, Tensor):
            is_same = got.shape == right.shape and torch.equal(_bytes(got), _bytes(right))
        else:
            is_same = got == right
        if not is_same:
            raise RuntimeError(
                f"{name}: result {number} differs from the reference, so no figure of this kernel "
                "means anything. Next: run `pytest tests/gpu` on this machine"
            )
    return len(expected)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.cpu().contiguous().reshape(-1).view(torch.uint8)


def _ids(rows: int, count: int, generator: torch.Generator) -> Tensor:
    """Draw skewed ids, with duplicates, unsorted."""
    return (
        (torch.rand(count, generator=generator).pow(3) * rows).to(torch.int64).clamp(max=rows - 1)
    )


def _bitmaps(kernels: Any, device: torch.device, rows: int, generator: torch.Generator) -> int:
    reference, triton = kernels["dirty_bitmap"]
    lengths = [rows, 1, 33, rows // 2 + 5, 64, rows // 3 + 1]
    expected = [torch.zeros((length + 31) // 32, dtype=torch.int32) for length in lengths]
    bitmaps = [bitmap.to(device, copy=True) for bitmap in expected]
    compared = 0
    for turn in range(2):
        ids = [_ids(length, length // 4 + 1, generator) for length in lengths]
        ids = [row_ids.int() if (turn + k) % 2 else row_ids for k, row_ids in enumerate(ids)]
        triton.mark_many(bitmaps, [row_ids.to(device) for row_ids in ids], rows=lengths)
        for bitmap, table_ids, length in zip(expected, ids, lengths, strict=True):
            reference.mark(bitmap, table_ids, rows=length)
        compared += _require("mark_many", bitmaps, expected)
    counted = [reference.count(bitmap) for bitmap in expected]
    compared += _require("count", [triton.count(bitmap) for bitmap in bitmaps], counted)
    collected = triton.collect_many(bitmaps, rows=lengths)
    compared += _require("collect_many", collected, reference.collect_many(expected, rows=lengths))
    counts = [0, 1, 40, lengths[3] // 2, 3, lengths[5] // 4]
    drawn = [_ids(length, n, generator) for length, n in zip(lengths, counts, strict=True)]
    features, offsets = torch.cat(drawn), torch.tensor([0, *counts]).cumsum(0)
    bags = [(n, n + 1) for n in range(len(lengths))]
    triton.mark_features(bitmaps, features.to(device), offsets.to(device), bags, rows=lengths)
    reference.mark_features(expected, features, offsets, bags, rows=lengths)
    compared += _require("mark_features", bitmaps, expected)
    row_ids = _ids(lengths[3], lengths[3] // 3, generator)
    triton.mark(bitmaps[3], row_ids.to(device), rows=lengths[3])
    reference.mark(expected[3], row_ids, rows=lengths[3])
    other_bitmaps = [torch.flip(bitmap, [0]) for bitmap in expected[:1]]
    other_bitmaps[0][-1] = 0  # bits past the last row stay zero
    triton.merge(bitmaps[0], other_bitmaps[0].to(device))
    reference.merge(expected[0], other_bitmaps[0])
    compared += _require("mark and merge", bitmaps, expected)
    for bitmap, copy in zip(expected, bitmaps, strict=True):
        reference.clear(bitmap)
        triton.clear(copy)
    return compared + _require("clear", bitmaps, expected)


def _gathers(kernels: Any, device: torch.device, rows: int, generator: torch.Generator) -> int:
    reference, triton = kernels["row_gather"]
    shapes = [(64,), (), (13,), (16,), (8, 3), (3,)]
    dtypes = [torch.float32, torch.float32, torch.float16, torch.bfloat16, torch.float64]
    dtypes.append(torch.uint8)
    sources = [
        (torch.rand(rows // 8 + 1, *shape, generator=generator) * 200).to(dtype)
        for shape, dtype in zip(shapes, dtypes, strict=True)
    ]
    ids = [_ids(len(source), rows // 16 + k, generator) for k, source in enumerate(sources)]
    expected = [source[row_ids] for source, row_ids in zip(sources, ids, strict=True)]
    reference.gather(sources[0], ids[0][:50], expected[0][:50])
    outs = [torch.full_like(part, 7, device=device) for part in expected]
    on_device = [source.to(device) for source in sources]
    triton.gather_many(on_device, [row_ids.to(device) for row_ids in ids], outs)
    compared = _require("gather_many", outs, expected)
    places = torch.randperm(len(sources[2]), generator=generator)[: len(outs[2]) // 2]
    triton.scatter(outs[2][: len(places)], places.to(device), on_device[2])
    sources[2][places] = expected[2][: len(places)]
    return compared + _require("scatter", on_device, sources)


def _packing(kernels: Any, device: torch.device, rows: int, generator: torch.Generator) -> int:
    reference, triton = kernels["bit_packing"]
    compared = 0
    for bits in BITS:
        for dim in (13, 64):
            codes = torch.randint(
                0, 256, (rows // 64 + 3, dim), generator=generator, dtype=torch.uint8
            )
            packed = triton.pack(codes.to(device), bits)
            unpacked = triton.unpack(packed, dim=dim, bits=bits)
            expected = reference.pack(codes, bits)
            compared += _require(
                f"pack and unpack, {bits} bits of dim {dim}",
                [packed, unpacked],
                [expected, reference.unpack(expected, dim=dim, bits=bits)],
            )
    return compared


def _rows(count: int, dim: int, generator: torch.Generator) -> Tensor:
    """Draw rows of all magnitudes, some constant, some not finite."""
    table = torch.randn(count, dim, generator=generator)
    table *= torch.logspace(-42, 38, count)[torch.randperm(count, generator=generator)][:, None]
    table[::11] = torch.randn(len(table[::11]), dim, generator=generator) * 0.05
    table[3::97] = 0.25
    table[5::101, -1] = float("nan")
    table[7::103, 0] = float("-inf")
    return table


def _quantizers(kernels: Any, device: torch.device, rows: int, generator: torch.Generator) -> int:
    from recpoint.kernels.quantize.method import ASYMMETRIC, SYMMETRIC, Method, default_method

    greedy = Method(name="greedy", bins=20, ratio_permille=500)
    reference, triton = kernels["quantize"]
    compared = 0
    for dim in (64, 13):
        table = _rows(rows // 16 + 40, dim, generator)
        on_device = table.to(device)
        ids = _ids(len(table), len(table) // 2 + 1, generator)
        for bits in BITS:
            methods = [(ASYMMETRIC, True), (ASYMMETRIC, False), (SYMMETRIC, True)]
            if bits < 8:
                methods += [(greedy, True), (default_method(bits), True)]
            for method, half in methods:
                if dim == 13 and (method, half) != (ASYMMETRIC, True):
                    continue
                name = f"quantize_rows, {method.name}, {bits} bits of dim {dim}, half {half}"
                expected = reference.quantize_packed(table[ids], bits, method, half_parameters=half)
                quantized = triton.quantize_rows(
                    on_device, ids.to(device), bits, method, half_parameters=half
                )
                compared += _require(name, quantized, expected)
            decoded = triton.dequantize_packed(*quantized[:3], dim=dim, bits=bits)
            expected_rows = reference.dequantize_packed(*expected[:3], dim=dim, bits=bits)
            compared += _require(
                f"dequantize_packed, {bits} bits of dim {dim}", [decoded], [expected_rows]
            )
    return compared
