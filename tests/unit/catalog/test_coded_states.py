"""Second moments in eight bits: what is stored as codes, what is not, and what reads it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from recpoint.catalog.check.check import check
from recpoint.catalog.persist.persist import persist_job
from recpoint.catalog.restore.chunks import StoreChunks, read_rows
from recpoint.catalog.restore.coded_state import CodedState
from recpoint.catalog.restore.placement import TablePart
from recpoint.catalog.restore.restore import restore_parts
from recpoint.catalog.run.run import Run
from recpoint.format.chunk import Section
from recpoint.format.manifest import ChunkEntry, Manifest
from recpoint.format.row_state import to_bfloat16
from recpoint.kernels import moments
from tests.catalog_builder import Table
from tests.consolidation import chain_of, merge
from tests.job_builder import Links, stage
from tests.persisted import restored
from tests.validated_run import at, rewrite

NAN, INF = float("nan"), float("inf")


def coded(state: Tensor) -> Tensor:
    """What a restore finds of a state that is stored as codes."""
    codes, grids, refused = moments.encode(state.reshape(len(state), -1))
    assert not bool(refused.any())
    return moments.decode(codes, grids).view(state.shape)


def table_of(rows: int, *, bits: int | None = None) -> Table:
    """A table with Adam's states, of which the second of several values is a second moment."""
    generator = torch.Generator().manual_seed(rows)
    squares = torch.rand(rows, 3, 2, generator=generator) ** 4
    squares[1] = 0.0
    squares[2, 0, 0] = 1e-42
    states = (
        torch.randn(rows, 6, generator=generator),
        squares,
        torch.rand(rows, generator=generator),
        torch.rand(rows, 1, generator=generator),
        torch.rand(rows, 6, generator=generator, dtype=torch.float64),
    )
    values = torch.randn(rows, 6, generator=generator)
    return Table("t", values, states, bits=bits, state_bits=8, second_moments=(1, 2, 3, 4))


def expected(table: Table) -> tuple[Tensor, ...]:
    first, second, *others = table.states
    return (to_bfloat16(first).float(), coded(second), *others)


def same(state: Tensor | None, expected_state: Tensor) -> bool:
    """Bit for bit."""
    assert state is not None
    return torch.equal(
        state.contiguous().view(torch.uint8), expected_state.contiguous().view(torch.uint8)
    )


def require_states(run: Run, expected_states: tuple[Tensor, ...]) -> None:
    restored_states = restored(run).tables["t"].row_states
    assert [same(*pair) for pair in zip(restored_states, expected_states, strict=True)] == [
        True
    ] * len(expected_states)


def row_chunks(manifest: Manifest) -> list[ChunkEntry]:
    return [entry for entry in manifest.chunks if entry.content == "rows"]


def forms(run: Run, manifest: Manifest, state: int) -> list[str]:
    """How each chunk of a checkpoint stores a state."""
    stored = [read_rows(StoreChunks(run.store), manifest, e) for e in row_chunks(manifest)]
    states = [rows.row_states[state] for rows in stored]
    return ["codes" if isinstance(s, CodedState) else str(s.dtype)[6:] for s in states]


@pytest.mark.parametrize("bits", [None, 4])
def test_second_moments_are_stored_as_codes(run: Run, tmp_path: Path, bits: int | None) -> None:
    table, links = table_of(90, bits=bits), Links()
    table.values[5, 2] = NAN
    dirty = torch.tensor([0, 1, 2, 5, 40, 89])
    for step, ids in ((1, None), (2, dirty)):
        path = stage(
            run, tmp_path / "s", [table], step=step, generation=1, links=links,
            dirty=None if ids is None else [ids], samples=90,
        )  # fmt: skip
        assert persist_job(path).error == ""
        table.states[1][dirty] *= 1.5
        assert set(forms(run, run.manifest(step, 1), 1)) == {"codes"}
        assert set(forms(run, run.manifest(step, 1), 0)) == {"bfloat16"}
        assert run.manifest(step, 1).state_bits == 8
    table.states[1][dirty] /= 1.5
    require_states(run, expected(table))
    assert check(run, level="full").ok
    assert at(run, 2, "full").result == "passed"


@pytest.mark.parametrize("value", [NAN, -NAN, INF, -1e-9, -0.0, 3e38])
def test_a_chunk_with_another_value_keeps_the_state_as_it_is(
    run: Run, tmp_path: Path, value: float
) -> None:
    table, links = table_of(40), Links()
    path = stage(run, tmp_path / "s", [table], step=1, generation=1, links=links, samples=40)
    persist_job(path)
    expected_states = expected(table)
    dirty = torch.tensor([3, 7, 20])
    table.states[1][7, 2, 1] = value
    path = stage(
        run, tmp_path / "s", [table], step=2, generation=1, links=links, dirty=[dirty], samples=40
    )
    assert persist_job(path).error == ""
    assert [forms(run, run.manifest(step, 1), 1) for step in (1, 2)] == [["codes"], ["float32"]]
    expected_states[1][dirty] = table.states[1][dirty]
    require_states(run, expected_states)
    assert at(run, 2, "full").result == "passed"
    merge(run, run.manifest(2, 1))
    (merged,) = chain_of(run, run.manifest(2, 1))
    assert (merged.state_bits, sorted(forms(run, merged, 1))) == (8, ["codes", "float32"])
    require_states(run, expected_states)
    assert at(run, 2, "sample").result == "passed"


def test_nothing_is_coded_where_no_state_is_a_second_moment(run: Run, tmp_path: Path) -> None:
    table = replace(table_of(20), second_moments=None)
    assert persist_job(stage(run, tmp_path / "s", [table], step=1, generation=1)).error == ""
    assert [forms(run, run.manifest(1, 1), state) for state in (0, 1)] == [
        ["bfloat16"],
        ["bfloat16"],
    ]
    assert run.manifest(1, 1).state_bits == 16


def test_a_code_that_is_off_by_one_is_noticed(run: Run, tmp_path: Path) -> None:
    table = table_of(60)
    path = stage(run, tmp_path / "s", [table], step=1, generation=1, samples=60)
    persist_job(path)
    assert at(run, 1, "full").result == "passed"
    (entry,) = row_chunks(run.manifest(1, 1))

    def change(sections: dict[str, Section]) -> None:
        data = sections["state.1"].data
        assert isinstance(data, bytearray)
        data[6 * 30] ^= 1

    rewrite(run, entry, change)
    validated = at(run, 1, "sample")
    assert validated.result == "failed"
    assert [(finding.row, finding.what) for finding in validated.findings] == [
        (30, "row state state1[0]")
    ]


def test_a_consolidation_moves_codes(run: Run, tmp_path: Path) -> None:
    table, links = table_of(64, bits=4), Links()
    generator = torch.Generator().manual_seed(3)
    for step in (1, 2, 3):
        dirty = None
        if step > 1:
            dirty = [torch.randperm(64, generator=generator)[:20].sort().values]
            table.states[1][dirty[0]] = torch.rand(20, 3, 2, generator=generator) ** 9
        path = stage(
            run, tmp_path / "s", [table], step=step, generation=1, links=links, dirty=dirty
        )
        assert persist_job(path).error == ""
    states_before = restored(run).tables["t"].row_states
    merge(run, run.manifest(3, 1))
    (merged,) = chain_of(run, run.manifest(3, 1))
    assert (merged.state_bits, set(forms(run, merged, 1))) == (8, {"codes"})
    require_states(run, tuple(state for state in states_before if state is not None))
    require_states(run, expected(table))


def test_other_columns_and_rows_are_read_of_coded_pieces(run: Run, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(8)
    state = torch.rand(50, 12, generator=generator) ** 6
    whole = Table("t", torch.randn(50, 12, generator=generator), (state,))
    pieces = [replace(p, state_bits=8, second_moments=(0,)) for p in whole.cut([5])]
    assert persist_job(stage(run, tmp_path / "s", pieces, step=1, generation=1)).error == ""
    expected_pieces = torch.cat(
        [coded(state[:, :5].contiguous()), coded(state[:, 5:].contiguous())], dim=1
    )
    require_states(run, (expected_pieces,))
    values, part_state = torch.zeros(30, 7), torch.zeros(30, 7)
    part = TablePart(
        table="t", first_row=11, first_column=2, values=values, row_states={"state0": part_state}
    )
    restore_parts(run.url, [part])
    assert same(part_state, expected_pieces[11:41, 2:9]) and same(values, whole.values[11:41, 2:9])
