"""Tensors in, tensors out: the operations on embedding rows. Only `row_blocks` does I/O.

One folder for each operation: `reference.py` says what is right, `native.cpp` (called by `cpu.py`)
and `triton.py` are fast and give the same bits, and the folder's functions choose between them by
the tensors' device. `native/` has what all `native.cpp` files share: threads, the choice of an
instruction set, and the way in from Python.
Triton is imported on the first call with a tensor on a GPU, never before.
"""

from __future__ import annotations

from recpoint.kernels import (
    allocation,
    bit_packing,
    copy_ahead,
    dirty_bitmap,
    dirty_rows,
    erasure,
    first_values,
    key_map,
    key_order,
    key_sketch,
    lookup_counts,
    moments,
    quantize,
    residuals,
    row_blocks,
    row_digest,
    row_gather,
    row_map,
    row_set,
    slot_map,
)

__all__ = [
    "allocation",
    "bit_packing",
    "copy_ahead",
    "dirty_bitmap",
    "dirty_rows",
    "erasure",
    "first_values",
    "key_map",
    "key_order",
    "key_sketch",
    "lookup_counts",
    "moments",
    "quantize",
    "residuals",
    "row_blocks",
    "row_digest",
    "row_gather",
    "row_map",
    "row_set",
    "slot_map",
]
