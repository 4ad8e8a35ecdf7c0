"""Compiling the CPU kernels ahead of the first use."""

from __future__ import annotations

import torch

from recpoint.kernels import (
    bit_packing,
    dirty_bitmap,
    dirty_rows,
    quantize,
    row_digest,
    row_gather,
    row_set,
    threads,
)

__all__ = ["warm_up"]


def warm_up() -> None:
    """Compile every CPU kernel, or load it from numba's cache; later calls cost microseconds.

    Called when a Checkpointer is built, and never in a stall. The first time on a machine, and
    after each update, it takes some 15 s of a core, which the log says before.
    """
    rows = 70
    bitmap, other = dirty_bitmap.new(rows), dirty_bitmap.new(rows)
    ids = torch.tensor([1, 2, 5, 64, 69], device="cpu")
    dirty_bitmap.mark(bitmap, ids, rows=rows)
    dirty_bitmap.mark(bitmap, ids.to(torch.int32), rows=rows)
    dirty_bitmap.merge(other, bitmap)
    dirty_bitmap.swap(bitmap, other)
    dirty_bitmap.clear(other)
    dirty_bitmap.mark_all(other, rows=rows)
    dirty_bitmap.mark_new(other, ids, rows=rows)
    dirty_bitmap.mark_nonzero(
        other, torch.zeros(rows, dtype=torch.float32, device="cpu"), rows=rows
    )
    dirty_bitmap.count(bitmap)
    found = dirty_bitmap.collect(bitmap, rows=rows)

    table = torch.linspace(-1.0, 1.0, rows * 3, dtype=torch.float32, device="cpu").reshape(rows, 3)
    part = torch.empty(found.numel(), 3, dtype=torch.float32, device="cpu")
    row_gather.gather(table, found, part)
    row_gather.scatter(part, found, table)
    row_gather.move(part, torch.arange(found.numel(), device="cpu"), table, found)
    to = dirty_rows.into(torch.empty_like(found), (table, torch.empty_like(part)))
    dirty_rows.count([bitmap], rows=[rows]).copy([to])
    threads.prepare()

    row_digest.digest(torch.zeros(2, 2, dtype=torch.float32, device="cpu"), found[:2])
    row_digest.digest(part, 0)
    row_digest.digest_each(torch.zeros(2, 2, dtype=torch.float32, device="cpu"), found[:2])
    row_digest.digest_each(part, torch.arange(len(part), device="cpu"))

    for bits in bit_packing.BITS:
        packed, scale, offset, _, _ = quantize.quantize_packed(part, bits)
        quantize.dequantize_packed(packed, scale, offset, dim=3, bits=bits)
        bit_packing.pack(bit_packing.unpack(packed, dim=3, bits=bits), bits)
    quantize.quantize_packed(part, 4, quantize.default_method(4))

    # A bitmap, gaps, runs.
    for rows_of in (
        found[:3],
        found * (1 << 33),
        torch.tensor([0, 1, 2, 90, 91, 92], device="cpu"),
    ):
        coded = row_set.encode(rows_of)
        row_set.decode(*coded, count=rows_of.numel(), rows=1 << 40)
