"""Rows stored as residuals come back as base row plus residual, whatever way leads to them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from recpoint import Follower, restore_parts
from recpoint.catalog.check.check import check
from recpoint.catalog.check.rows import DecodedRows, TrainedRows, compare
from recpoint.catalog.consolidate.plan import plan_consolidation
from recpoint.catalog.restore.base_rows import BaseRows, base_entries
from recpoint.catalog.restore.chunks import StoreChunks, read_rows
from recpoint.catalog.restore.placement import PartsTarget, TablePart
from recpoint.catalog.restore.restore import MemoryTarget, TableTarget, restore
from recpoint.catalog.retention.keep import needed_manifests
from recpoint.catalog.run.chain import resolve_chain
from recpoint.catalog.run.facts import gather
from recpoint.catalog.run.run import Run
from recpoint.errors import MalformedObject, MissingLink
from recpoint.format.manifest import Manifest
from recpoint.format.naming import MANIFEST_KEY
from recpoint.kernels import dirty_bitmap, quantize
from tests.catalog_builder import Table, build, new_run, publish
from tests.consolidation import chain_of, merge, name_of, require_same, restored
from tests.followed_run import Trainer, require

ROWS, DIM = 50, 6


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run = new_run(tmp_path)
    run.claim(None)
    return run


def table_of(dtype: torch.dtype = torch.float32, *, seed: int = 0) -> Table:
    random = torch.Generator().manual_seed(seed)
    values = torch.randn(ROWS, DIM, generator=random).to(dtype)
    values[3, 1] = torch.inf  # exact in the full
    return Table("items", values, (torch.rand(ROWS, generator=random),), bits=4)


def moved(table: Table, ids: Tensor, seed: int) -> None:
    """Change rows a little, as training does."""
    random = torch.Generator().manual_seed(seed)
    table.values[ids] += (0.05 * torch.randn(len(ids), DIM, generator=random)).to(table.values)
    table.states[0][ids] += 1


def expected_rows(table: Table, ids: Tensor, bits: int) -> Tensor:
    """Return what §3.7 says that the residuals of rows decode to."""
    assert table.base is not None
    base = table.base[ids].float()
    stored = quantize.quantize_packed(table.values[ids].float() - base, bits)
    residuals = quantize.dequantize_packed(*stored[:3], dim=DIM, bits=bits)
    exact = stored.exact[:, None]
    return torch.where(exact, table.values[ids], (base + residuals).to(table.values.dtype))


class Chain:
    """A full and increments of residuals; and the rows that a restore of each has to give."""

    def __init__(self, run: Run, table: Table, *, links: int = 3) -> None:
        self.run, self.table = run, table
        full = build(run, [table], step=10, generation=1, state={"step": 10})
        self.made = [publish(run, full)]
        table.base = restored(run, self.made[0])[0].tables["items"].values.clone()
        self.rows = [table.base.clone()]
        for number in range(1, links + 1):
            self.add(number)

    def add(self, number: int, *, bits: int = 3) -> None:
        ids = torch.arange(number % 4, ROWS, 2)[number:]
        moved(self.table, ids, seed=number)
        self.table.bits = bits
        step = 10 * (number + 1)
        increment = build(
            self.run,
            [self.table],
            step=step,
            generation=1,
            parent=self.made[-1],
            dirty=[ids],
            state={"step": step},
        )
        self.made.append(publish(self.run, increment))
        rows = self.rows[-1].clone()
        is_plain = self.table.base is None
        rows[ids] = (
            restored(self.run, self.made[-1])[0].tables["items"].values[ids]
            if is_plain
            else expected_rows(self.table, ids, bits)
        )
        self.rows.append(rows)


def require_rows(run: Run, manifest: Manifest, rows: Tensor) -> None:
    values = restored(run, manifest)[0].tables["items"].values
    assert torch.equal(values.view(torch.uint8), rows.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_each_checkpoint_has_base_rows_plus_its_newest_residuals(
    run: Run, dtype: torch.dtype
) -> None:
    chain = Chain(run, table_of(dtype))
    assert {chunk.scheme for chunk in chain.made[1].chunks} == {None, "residual", "exact"}
    for manifest, rows in zip(chain.made, chain.rows, strict=True):
        require_rows(run, manifest, rows)
    states = restored(run, chain.made[-1])[0].tables["items"].row_states
    assert states[0] is not None and torch.equal(states[0], chain.table.states[0])


@pytest.mark.parametrize("wanted", [range(0, 1), range(7, 33), range(49, 50), range(12, 12)])
def test_a_range_of_rows(run: Run, wanted: range) -> None:
    chain = Chain(run, table_of())

    class Range(MemoryTarget):
        def begin(self, manifest: Manifest) -> Sequence[TableTarget]:
            self.values = torch.full((len(wanted), DIM), -7.0)
            return [TableTarget(values=self.values, row_states=(None,), first_row=wanted.start)]

        def finish(self, manifest: Manifest, state: dict[int, object]) -> None:
            pass

    target = Range()
    restore(run, target)
    assert torch.equal(target.values, chain.rows[-1][wanted.start : wanted.stop])


def test_columns_of_pieces_in_memory_that_is_not_contiguous(run: Run) -> None:
    whole = table_of()
    pieces = whole.cut([2])
    full = publish(run, build(run, pieces, step=10, generation=1))
    for piece in pieces:
        assert piece.columns is not None
        piece.base = torch.empty(ROWS, piece.dim)
        part = TablePart(table="items", values=piece.base, first_column=piece.columns.first)
        restore(run, PartsTarget([part]))
        piece.values += 0.03 * torch.randn(ROWS, piece.dim)
    publish(
        run, build(run, pieces, step=20, generation=1, parent=full, dirty=[torch.arange(ROWS)] * 2)
    )
    expected = torch.cat([_of_piece(piece) for piece in pieces], dim=1)
    values = torch.zeros(9, 8)
    part = TablePart(table="items", values=values[:, 1:5], first_row=20, first_column=1)
    restore(run, PartsTarget([part]))
    assert torch.equal(values[:, 1:5], expected[20:29, 1:5])


def _of_piece(piece: Table) -> Tensor:
    assert piece.base is not None and piece.bits is not None
    stored = quantize.quantize_packed(piece.values - piece.base, piece.bits)
    residuals = quantize.dequantize_packed(*stored[:3], dim=piece.dim, bits=piece.bits)
    return torch.where(stored.exact[:, None], piece.values, piece.base + residuals)


def test_increments_merge_without_loss_and_never_into_a_full(run: Run) -> None:
    chain = Chain(run, table_of(), links=4)
    newest = chain.made[-1]
    state_before = restored(run, newest)[0]
    assert merge(run, newest, 2).key.endswith("-after-000000000030.json")
    require_same(restored(run, newest)[0], state_before)
    assert merge(run, newest).key.endswith("-after-000000000010.json")  # asks for the most
    full, increment = chain_of(run, newest)
    assert increment.base == increment.parent == full.ref == chain.made[0].ref
    require_same(restored(run, newest)[0], state_before)
    plan = plan_consolidation(run, name_of(newest))
    assert not plan.needed and "residuals" in plan.reason
    chain.add(5)  # the trainer knows nothing of merges
    require_rows(run, chain.made[-1], chain.rows[-1])


class Beside:
    """A chain that goes through a consolidated full, with residuals to the base before it."""

    def __init__(self, run: Run) -> None:
        self.chain = Chain(run, table_of(), links=0)
        base, self.chain.table.base = self.chain.table.base, None
        self.chain.add(1, bits=4)
        merge(run, self.chain.made[-1])
        self.chain.table.base = base
        self.chain.add(2)
        self.newest = self.chain.made[-1]


def test_a_base_beside_the_chain_is_read(run: Run) -> None:
    made = Beside(run)
    resolved = resolve_chain(run, name_of(made.newest))
    assert [manifest.kind for manifest in resolved.manifests] == ["full", "increment"]
    assert resolved.manifests[0].step == 20 and resolved.beside == made.chain.made[0]
    require_rows(run, made.newest, made.chain.rows[-1])


def test_a_base_beside_the_chain_is_kept(run: Run) -> None:
    made = Beside(run)
    keys = [MANIFEST_KEY.of(manifest.step, 1) for manifest in made.chain.made]
    doomed = frozenset(keys[:2])  # base and first increment, whose full is enough
    needed = needed_manifests(gather(run), doomed)
    assert list(needed) == [keys[0]]


def test_a_base_that_is_gone_is_named(run: Run) -> None:
    made = Beside(run)
    run.store.delete(MANIFEST_KEY.of(10, 1))
    with pytest.raises(MissingLink, match=r"000000000010-00000001.*\n*.*residuals"):
        resolve_chain(run, name_of(made.newest))
    assert any("000000000010" in str(finding) for finding in check(run).findings)
    # A restore goes back to the newest checkpoint that is whole.
    target = MemoryTarget()
    assert restore(run, target).restored.step == 20


def test_a_damaged_chunk_of_the_base_is_found(run: Run) -> None:
    made = Beside(run)
    entry = next(chunk for chunk in made.chain.made[0].chunks if chunk.table == 0)
    run.store.delete(entry.key)
    findings = check(run).findings
    assert any(entry.key in str(finding) for finding in findings)
    assert restore(run, MemoryTarget()).restored.step == 20


def test_a_full_that_lacks_the_row(run: Run) -> None:
    chain = Chain(run, table_of())
    base, source = chain.made[0], StoreChunks(run.store)
    rows = BaseRows(base, 0, range(ROWS))
    entries = base_entries(base, 0, range(ROWS))
    for entry in entries[:-1]:
        rows.add(read_rows(source, base, entry))
    with pytest.raises(MalformedObject, match="row that a residual"):
        rows.values_of(torch.arange(ROWS))


def test_a_follower_reads_the_base_with_each_update(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    run.claim(None)
    trainer = Trainer(run, [table_of()])
    trainer.commit(10)
    trainer.tables[0].base = trainer.at[10][0].clone()
    for quantized in (False, True):
        follower = Follower(run.url, quantized=quantized)
        assert follower.poll()
        for _ in range(3):
            step = trainer.made[-1].step + 10
            trainer.commit(step)
            assert follower.poll()
            require(follower, trainer, step)
        assert follower.status.fulls_applied == 1


@pytest.mark.parametrize("quantized", [False, True], ids=["decoded", "codes"])
@pytest.mark.parametrize("from_base", [False, True], ids=["on the newest", "on the full"])
def test_a_request_keeps_its_version_while_residuals_make_the_next(
    tmp_path: Path, quantized: bool, from_base: bool
) -> None:
    """A follower has two versions: residuals go into the copy that requests do not read."""
    run = new_run(tmp_path)
    run.claim(None)
    trainer = Trainer(run, [table_of()])
    full = trainer.commit(10)
    trainer.tables[0].base = trainer.at[10][0].clone()
    follower = Follower(run.url, quantized=quantized, reader_wait_seconds=0.0)
    ids = torch.arange(ROWS)
    assert follower.poll()
    for step in (20, 30, 40):
        with follower.reading() as version:
            served = version.lookup("items", ids).clone()
            trainer.commit(step, parent=full if from_base else None)
            assert follower.poll()
            assert version.step == step - 10
            assert torch.equal(version.lookup("items", ids), served)
        require(follower, trainer, step)


def test_parts_of_a_table_have_the_sums(run: Run) -> None:
    chain = Chain(run, table_of())
    for first, count in ((0, ROWS), (13, 21), (ROWS - 1, 1)):
        sums, values = torch.zeros(count), torch.full((count, DIM - 2), -7.0)
        part = TablePart(
            table="items",
            values=values,
            first_row=first,
            first_column=1,
        )
        restore_parts(run.url, [part])
        assert torch.equal(values, chain.rows[-1][first : first + count, 1 : DIM - 1])
        changed = dirty_bitmap.new(count)
        whole = torch.full((count, DIM), -7.0)
        states = {"state0": sums}
        part = TablePart(
            table="items", values=whole, row_states=states, first_row=first, changed=changed
        )
        restore_parts(run.url, [part])
        assert torch.equal(whole, chain.rows[-1][first : first + count])
        assert torch.equal(sums, chain.table.states[0][first : first + count])
        marked = dirty_bitmap.collect(changed, rows=count) + first
        moved_rows = (chain.rows[-1] != chain.rows[0]).any(dim=1).nonzero().flatten()
        assert set(marked.tolist()) >= set(moved_rows.tolist()) & set(range(first, first + count))


@pytest.mark.parametrize(("dtype", "kind"), [("F64", "increment"), ("F32", "full")])
def test_residuals_that_no_reader_may_meet(run: Run, dtype: str, kind: str) -> None:
    chain = Chain(run, table_of(), links=1)
    fields = chain.made[1].model_dump()
    if kind == "full":
        fields |= {"kind": "full", "base": None, "parent": None, "chain_length": 1}
    fields["tables"][0]["dtype"] = dtype
    with pytest.raises(ValidationError, match="residuals"):
        Manifest.model_validate(fields)


def decoded_of(rows: Tensor, base: Tensor, bits: int) -> DecodedRows:
    stored = quantize.quantize_packed(rows - base, bits)
    values = base + quantize.dequantize_packed(*stored[:3], dim=DIM, bits=bits)
    return DecodedRows(
        values=values,
        row_states=(),
        bits=bits,
        scale=stored.scale,
        offset=stored.offset,
        symmetric=False,
        narrow=(),
        base=base,
    )


def test_the_bound_of_a_residual_is_that_of_its_own_scale() -> None:
    random = torch.Generator().manual_seed(1)
    base = torch.randn(40, DIM, generator=random)
    rows = base + 0.01 * torch.randn(40, DIM, generator=random)
    rows[7] = base[7]  # a residual of zeros
    spec = Table("items", rows).spec
    comparison = compare(spec, TrainedRows(rows, ()), decoded_of(rows, base, 3))
    assert comparison.differences == [] and 0.5 < comparison.worst <= 1
    # A code that is off by one exceeds the bound, although it is small beside the row's range.
    wrong = decoded_of(rows, base, 3)
    assert wrong.scale is not None
    wrong.values[5, 2] += 1.01 * wrong.scale[5]
    assert [d.position for d in compare(spec, TrainedRows(rows, ()), wrong).differences] == [5]
    wrong = decoded_of(rows, base, 3)
    wrong.values[7, 0] = wrong.values[7, 0].nextafter(torch.tensor(9.0))
    assert [d.position for d in compare(spec, TrainedRows(rows, ()), wrong).differences] == [7]
