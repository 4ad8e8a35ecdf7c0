"""Chosen rows of a chunk end up in their places, whatever they are stored as."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from recpoint.catalog.restore import placement
from recpoint.catalog.restore.chunks import StoredRows
from recpoint.catalog.restore.coded_state import CodedState, state_values
from recpoint.catalog.restore.placement import place
from recpoint.catalog.restore.target import TableTarget
from recpoint.kernels import moments, quantize

ROWS, N, DIM = 50, 20, 6


def stored(rows: range | Tensor, *, bits: int | None, dtype: torch.dtype) -> StoredRows:
    values = torch.randn(N, DIM)
    coded = moments.encode(torch.rand(N, DIM))
    states = (
        torch.randn(N, DIM).to(torch.bfloat16),
        torch.rand(N),
        CodedState(codes=coded.codes, grids=coded.grids),
    )
    none = torch.empty(0)
    if bits is None:
        exact = values.to(dtype)
        width = 8 * exact.element_size()
        return StoredRows(
            rows=rows, scheme="exact", bits=width, values=exact, scale=none, offset=none,
            row_states=states,
        )  # fmt: skip
    packed = quantize.quantize_packed(values, bits)
    return StoredRows(
        rows=rows, scheme="asymmetric", bits=bits, values=packed.packed, scale=packed.scale,
        offset=packed.offset, row_states=states,
    )  # fmt: skip


def expected_values(chunk: StoredRows, dtype: torch.dtype) -> Tensor:
    if chunk.scheme == "exact":
        return chunk.values
    codes = chunk.values, chunk.scale, chunk.offset
    return quantize.dequantize_packed(*codes, dim=DIM, bits=chunk.bits).to(dtype)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("bits", [None, 3, 8])
@pytest.mark.parametrize("spread", [False, True])
@pytest.mark.parametrize("chosen", [None, [], [0, 3, 4, 19]])
def test_rows_and_states(
    bits: int | None,
    dtype: torch.dtype,
    spread: bool,
    chosen: list[int] | None,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    monkeypatch.setattr(placement, "_PASS_BYTES", 40)  # several passes for so few rows
    ids = torch.randperm(ROWS)[:N].sort().values if spread else torch.arange(7, 7 + N)
    chunk = stored(ids if spread else range(7, 7 + N), bits=bits, dtype=dtype)
    target = TableTarget(
        values=torch.full((ROWS, DIM), 9.0, dtype=dtype, device=device),
        row_states=(
            torch.full((ROWS, DIM), 9.0, device=device),
            torch.full((ROWS,), 9.0, device=device),
            torch.full((ROWS, DIM), 9.0, device=device),
        ),
    )
    positions = None if chosen is None else torch.tensor(chosen, dtype=torch.int64)
    place(chunk, positions, target)
    picked = torch.arange(N) if positions is None else positions
    for found, source in (
        (target.values, expected_values(chunk, dtype)),
        *zip(target.row_states, map(state_values, chunk.row_states), strict=True),
    ):
        assert found is not None
        expected = torch.full_like(found, 9.0, device="cpu")
        expected[ids[picked]] = source[picked].to(expected.dtype)
        assert torch.equal(found.cpu(), expected)


def test_a_state_that_is_not_wanted_is_left_out() -> None:
    chunk = stored(range(N), bits=4, dtype=torch.float32)
    target = TableTarget(
        values=torch.zeros(ROWS, DIM), row_states=(None, state := torch.zeros(ROWS), None)
    )
    place(chunk, torch.tensor([2]), target)
    assert state.count_nonzero() == 1 and state[2] == state_values(chunk.row_states[1])[2]
