"""Makes shards and parts of tables in any shape, for tests of restores into other shards."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from recpoint.catalog.restore.placement import TablePart
from tests.catalog_builder import Table

__all__ = ["empty_part", "rank_of_rows"]


def empty_part(
    table: Table, rows: range, columns: range, *, states: Sequence[str] = (), padding: int = 0
) -> TablePart:
    """Return a part of a table in poisoned memory; each row has `padding` additional columns."""

    def poisoned(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        wide = torch.full((*shape[:-1], shape[-1] + padding), 77, dtype=dtype)
        return wide[..., : shape[-1]]

    specs = {state.name: state for state in table.spec.row_states}
    tensors = dict(zip(specs, table.states, strict=True))
    row_states = {}
    for name in states:
        dtype = tensors[name].dtype
        if specs[name].shape == (table.dim,):
            row_states[name] = poisoned((len(rows), len(columns)), dtype)
        else:
            row_states[name] = torch.full((len(rows), *specs[name].shape), 77, dtype=dtype)
    return TablePart(
        table=table.name,
        values=poisoned((len(rows), len(columns)), table.values.dtype),
        row_states=row_states,
        first_row=rows.start,
        first_column=columns.start,
    )


def rank_of_rows(rows: int, edges: Sequence[int]) -> Tensor:
    """Return the rank that stores each row, int64 [rows], if the ranks' rows end at `edges`."""
    return torch.bucketize(
        torch.arange(rows), torch.tensor([*edges], dtype=torch.int64), right=True
    )
