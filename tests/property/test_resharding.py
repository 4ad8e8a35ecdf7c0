"""Whatever sharding a table is stored in, any part of it restores with the bits that are there."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recpoint.catalog.restore.placement import PartsTarget
from recpoint.catalog.restore.restore import MemoryTarget, restore
from recpoint.format.manifest import Manifest
from recpoint.kernels import quantize
from tests.catalog_builder import Table, build, new_run, publish
from tests.consolidation import merge
from tests.example_counts import examples
from tests.resharding import empty_part, rank_of_rows

DTYPES = st.sampled_from([torch.float32, torch.float32, torch.bfloat16, torch.float64])


def edges(draw: st.DrawFn, size: int, most: int = 3) -> list[int]:
    """Where something of so many rows or columns is cut."""
    if size < 2:
        return []
    return sorted(draw(st.sets(st.integers(1, size - 1), max_size=most)))


@st.composite
def sharded_tables(draw: st.DrawFn) -> tuple[list[Table], list[Table], list[torch.Tensor]]:
    """Whole tables; their pieces, in any order; for each piece which rank stores each row."""
    seed = draw(st.integers(0, 1000))
    generator = torch.Generator().manual_seed(seed)
    tables: list[Table] = []
    pieces: list[tuple[Table, torch.Tensor]] = []
    for number in range(draw(st.integers(1, 2))):
        rows, dim = draw(st.integers(1, 40)), draw(st.integers(1, 9))
        dtype = draw(DTYPES)
        values = torch.randn(rows, dim, generator=generator).to(dtype)
        if draw(st.booleans()):
            values[rows // 2, dim // 2] = float("nan")  # stored exactly among quantized rows
        table = Table(
            f"table{number}",
            values,
            (
                torch.rand(rows, dim, generator=generator),
                torch.rand(rows, generator=generator).to(torch.float64),
                torch.randint(0, 9, (rows, dim + 1), generator=generator),
            ),
            bits=draw(st.sampled_from([None, 2, 8])) if dtype != torch.float64 else None,
        )
        tables.append(table)
        for piece in table.cut(edges(draw, dim)):
            owners = rank_of_rows(rows, edges(draw, rows))
            shift = draw(st.integers(0, 3))
            pieces.append((piece, (owners + shift) % 4))
    order = draw(st.permutations(range(len(pieces))))
    return tables, [pieces[i][0] for i in order], [pieces[i][1] for i in order]


def train(pieces: list[Table], generator: torch.Generator) -> list[torch.Tensor]:
    """Change rows of each piece, not the same of all."""
    changed = []
    for piece in pieces:
        ids = (torch.rand(piece.rows, generator=generator) < 0.3).nonzero().flatten()
        for tensor in (piece.values, piece.states[0]):
            shape = (ids.numel(), *tensor.shape[1:])
            tensor[ids] = torch.randn(shape, generator=generator).to(tensor.dtype)
        changed.append(ids)
    return changed


def as_stored(piece: Table) -> torch.Tensor:
    """The values of a piece once they have been quantized."""
    if piece.bits is None:
        return piece.values
    packed = quantize.quantize_packed(piece.values.float(), piece.bits)
    decoded = quantize.dequantize_packed(
        packed.packed, packed.scale, packed.offset, dim=piece.dim, bits=piece.bits
    ).to(piece.values.dtype)
    decoded[packed.exact] = piece.values[packed.exact]
    return decoded


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    ours, theirs = one.contiguous(), other.contiguous()
    return ours.shape == theirs.shape and torch.equal(
        ours.view(torch.uint8), theirs.view(torch.uint8)
    )


def expected_of(name: str, pieces: list[Table]) -> tuple[torch.Tensor, ...]:
    """The whole table as it is stored: values, the cut state, the two of whole rows."""
    found = [piece for piece in pieces if piece.name == name]
    found.sort(key=lambda piece: 0 if piece.columns is None else piece.columns.first)
    values = torch.cat([as_stored(piece) for piece in found], dim=1)
    cut = torch.cat([piece.states[0] for piece in found], dim=1)
    return values, cut, found[0].states[1], found[0].states[2]


STATES = ("state0", "state1", "state2")


@settings(deadline=None, max_examples=examples(25))
@given(st.data())
def test_any_part_of_any_sharding(data: Any) -> None:
    tables, pieces, owners = data.draw(sharded_tables())
    generator = torch.Generator().manual_seed(1)
    with tempfile.TemporaryDirectory() as directory:
        run = new_run(Path(directory))
        run.claim(None)
        parent: Manifest | None = None
        for step in range(1, data.draw(st.integers(2, 5))):
            dirty = train(pieces, generator) if parent else None
            made = build(
                run,
                pieces,
                step=step,
                generation=1,
                parent=parent,
                dirty=dirty,
                ranks=4,
                owners=owners,
                rows_per_chunk=7,
            )
            parent = publish(run, made)
        if parent is not None and parent.chain_length > 1:
            links = data.draw(st.sampled_from(["as they are", None, 2]))
            if links != "as they are":
                merge(run, parent, links if parent.chain_length > 2 else None)
        expected = {table.name: expected_of(table.name, pieces) for table in tables}
        parts = []
        for table in tables:
            for _ in range(data.draw(st.integers(1, 3))):
                first_row = data.draw(st.integers(0, table.rows))
                first_column = data.draw(st.integers(0, table.dim - 1))
                parts.append(
                    empty_part(
                        table,
                        range(first_row, data.draw(st.integers(first_row, table.rows))),
                        range(first_column, data.draw(st.integers(first_column + 1, table.dim))),
                        states=data.draw(st.sets(st.sampled_from(STATES))),
                        padding=data.draw(st.integers(0, 2)),
                    )
                )
        restore(run, PartsTarget(parts), threads=2)
        for part in parts:
            rows = slice(part.first_row, part.first_row + len(part.values))
            columns = slice(part.columns.start, part.columns.stop)
            values, cut, *others = expected[part.table]
            assert same_bits(part.values, values[rows, columns])
            for name, state in part.row_states.items():
                if name == "state0":
                    assert same_bits(state, cut[rows, columns])
                else:
                    assert same_bits(state, others[int(name[-1]) - 1][rows])
        memory = MemoryTarget()
        restore(run, memory, threads=2)
        assert memory.tables.keys() == expected.keys()
        for name, whole in expected.items():
            found = memory.tables[name]
            for one, other in zip((found.values, *found.row_states), whole, strict=True):
                assert one is not None and same_bits(one, other)
