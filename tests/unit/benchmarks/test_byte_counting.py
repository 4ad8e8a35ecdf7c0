"""What the benchmarks of policies and bytes count with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import stored_sizes
from benchmarks.byte_sources import RowForms
from benchmarks.coded_chain import Rule, TableCopy, chain_rows
from benchmarks.dirty_trace import fleet_masks, replay, rows_since
from benchmarks.measured_mix import drawn_forms
from benchmarks.row_wise import RowWiseAdagrad
from benchmarks.stored_sizes import EXACT, NARROW, WIDE, MergedFull, check, form_of, stored_parts
from recpoint import Consecutive, Continuous, OneShot
from recpoint.catalog.consolidate import moves
from recpoint.catalog.consolidate.consolidate import consolidate
from recpoint.catalog.consolidate.plan import plan_consolidation
from recpoint.catalog.persist import plan as persist_plan
from recpoint.catalog.persist.persist import persist_job
from recpoint.catalog.persist.row_widths import importance
from recpoint.catalog.staging.job_files import read_job
from recpoint.format.job import Job
from recpoint.format.manifest import Manifest, StateBits
from recpoint.format.naming import ManifestName
from recpoint.kernels.bit_packing import BITS
from recpoint.trainer_plugin.policy import Policy
from tests.catalog_builder import Table, new_run
from tests.job_builder import Links, stage
from tests.mixed_table import PRICE, SCALE, a_chunk_for_each_width, mixed_table


def sizes(since: int | None, to: int) -> int:
    """A full is 100; each interval changes 30, and a tenth of that again each further one."""
    return 100 if since is None else 27 + 3 * (to - since)


@pytest.mark.parametrize(
    ("policy", "written", "kept"),
    [
        (OneShot(), [100, 30, 33, 36], [100, 130, 133, 136]),
        (Consecutive(), [100, 30, 30, 30], [100, 130, 160, 190]),
        (Consecutive(full_every=2), [100, 30, 100, 30], [100, 130, 100, 130]),
        (OneShot(full_every=1), [100, 100, 100, 100], [100, 100, 100, 100]),
    ],
)
def test_a_replay_writes_and_keeps_what_the_policy_says(
    policy: Policy, written: list[int], kept: list[int]
) -> None:
    taken = replay(policy, 4, sizes)
    assert [t.written for t in taken] == written
    assert [t.kept for t in taken] == kept
    assert [t.there for t in taken] == [a + b for a, b in zip([0, *kept], written, strict=False)]
    assert [t.kind == "full" for t in taken] == [size == 100 for size in written]


def test_a_merged_chain_is_one_full() -> None:
    taken = replay(Continuous(), 6, sizes, consolidate_every=2)
    assert [t.written for t in taken] == [100, 30, 30, 30, 30, 30]
    assert [t.kept for t in taken] == [100, 130, 100, 130, 100, 130]
    assert [t.merged for t in taken] == [(0, 0), (0, 0), (160, 100), (0, 0), (160, 100), (0, 0)]
    # The full that comes of a merge is there before its chain is deleted.
    assert [t.there for t in taken] == [100, 130, 260, 130, 260, 130]


def test_the_trace_has_its_curve() -> None:
    masks = fleet_masks(50_000, 8, seed=3)
    found = [rows_since(masks, 0, to).mean() for to in range(1, 8)]
    assert found == pytest.approx([0.260, 0.319, 0.360, 0.391, 0.417, 0.439, 0.459], abs=0.01)
    assert not rows_since(masks, 5, 5).any()


def rows_of_all_forms() -> torch.Tensor:
    rows = 0.05 * torch.randn(400, 12, generator=torch.Generator().manual_seed(1))
    rows[5:60:7] *= 1e6  # beyond binary16
    rows[100:130, 3] = float("nan")
    return rows


@pytest.mark.parametrize("bits", [*BITS, None])
@pytest.mark.parametrize(("state_bits", "state_bytes"), [(16, 2 * 12), (8, 12 + 2)])
def test_what_is_counted_is_what_an_agent_stores(
    tmp_path: Path, bits: int | None, state_bits: StateBits, state_bytes: int
) -> None:
    values = rows_of_all_forms()
    states = (torch.rand(400), torch.rand(400, 12))
    moments = (1,) if state_bits == 8 else None
    table = Table("t", values, states, bits=bits, state_bits=state_bits, second_moments=moments)
    other = Table("u", torch.randn(30, 4))
    ids = torch.nonzero(torch.arange(400) % 3 != 0).flatten()
    form = np.zeros(400, np.uint8) if bits is None else form_of(values, bits)
    if bits is not None:
        assert set(form.tolist()) == {NARROW, WIDE, EXACT}
    job, manifest = persisted(tmp_path, [table, other], ids)
    rows = [ids.numpy(), np.arange(0)]
    check(job, manifest, rows, [form, np.zeros(30, np.uint8)])
    parts = stored_parts(job, manifest, rows, [form, np.zeros(30, np.uint8)])
    assert parts.total() - parts["manifest"] == manifest.stored_bytes
    assert parts["row state"] == len(ids) * (4 + state_bytes)


@pytest.mark.parametrize("residual", [False, True])
def test_rows_with_widths_of_their_own_are_counted(
    tmp_path: Path, residual: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_chunk_for_each_width(monkeypatch)
    table = replace(mixed_table(), residual=residual)
    ids = torch.nonzero(torch.arange(table.rows) % 3 != 0).flatten()
    job, manifest = persisted(tmp_path, [table], ids)
    copy = TableCopy(table.values, importance(table.states[1], SCALE))
    chain = chain_rows(copy, copy, ids, ids, Rule(price=PRICE, residual=residual), seed=2)
    form = np.zeros(table.rows, np.uint8)
    form[ids.numpy()] = chain.increment_forms
    # What the full's fitted codes leave of a row is worth the fewest bits, or is stored exactly.
    assert len(set(chain.increment_forms.tolist())) >= (2 if residual else 5)
    check(job, manifest, [ids.numpy()], [form])


def test_increments_have_the_forms_of_the_nearest_share() -> None:
    full, few, many = ((np.full(3, form, np.uint8),) for form in (1, 2, 3))
    forms = RowForms(full, ((0.25, few), (0.5, many)))
    assert [forms.of_increment(share)[0][0] for share in (0.1, 0.37, 0.38, 0.9)] == [2, 2, 3, 3]
    assert RowForms(full).of_increment(0.4)[0][0] == 1


def test_forms_are_drawn_with_their_shares() -> None:
    shares = np.array([0.25, 0.0, 0.7, 0.0, 0.05, *[0.0] * 8])
    drawn = drawn_forms(shares, 100_000, seed=1)
    assert np.bincount(drawn, minlength=13) / 1e5 == pytest.approx(shares, abs=0.005)
    assert set(drawn.tolist()) == {0, 2, 4}


def test_a_count_of_other_rows_is_refused(tmp_path: Path) -> None:
    table = Table("t", torch.randn(40, 4), bits=4)
    ids = torch.arange(0, 40, 3)
    job, manifest = persisted(tmp_path, [table], ids)
    with pytest.raises(RuntimeError, match="counted"):
        check(job, manifest, [ids.numpy()], [np.full(40, WIDE, np.uint8)])


@pytest.mark.parametrize("bits", [2, 8, None])
def test_a_full_merged_again_and_again_is_counted(
    tmp_path: Path, bits: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks so small that rows of several checkpoints share some and fill others."""
    for module in (stored_sizes, persist_plan, moves):
        monkeypatch.setattr(module, "CHUNK_BYTES", 2500)
    table = Table("t", rows_of_all_forms(), (torch.rand(400),), bits=bits)
    form = np.zeros(400, np.uint8) if bits is None else form_of(table.values, bits)
    run, staging, links = new_run(tmp_path / "run"), tmp_path / "staging", Links()
    run.claim(None)
    persist_job(stage(run, staging, [table], step=1, generation=1, links=links))
    counted: MergedFull | None = None
    for step, every in ((2, 3), (3, 5), (4, 2)):
        ids = torch.arange(step, 400, every)
        path = stage(run, staging, [table], step=step, generation=1, links=links, dirty=[ids])
        job = read_job(path)
        persist_job(path)
        plan = plan_consolidation(run, ManifestName(step, 1))
        assert plan.links_before == 2
        consolidate(run, plan)
        merged = run.read_manifest(plan.target)
        counted = counted or MergedFull(job, merged, [form])
        total = counted.merge([[ids.numpy()]])
        assert counted.chunk_bytes == sorted((e.content, e.bytes) for e in merged.chunks)
        assert total.total() - total["manifest"] == merged.stored_bytes
        assert len(merged.chunks) > 4


def persisted(tmp_path: Path, tables: list[Table], ids: torch.Tensor) -> tuple[Job, Manifest]:
    """An increment of the rows `ids` of the first table, and of none of the others."""
    run, staging, links = new_run(tmp_path / "run"), tmp_path / "staging", Links()
    run.claim(None)
    persist_job(stage(run, staging, tables, step=1, generation=1, links=links))
    dirty = [ids, *(torch.arange(0) for _ in tables[1:])]
    path = stage(run, staging, tables, step=2, generation=1, links=links, dirty=dirty)
    job = read_job(path)
    outcome = persist_job(path)
    assert outcome.result == "committed", outcome.error
    return job, run.manifest(2, 1)


def test_row_wise_adagrad_moves_the_rows_that_have_a_gradient() -> None:
    weight = torch.nn.Parameter(torch.arange(8.0).reshape(4, 2))
    optimizer = RowWiseAdagrad([weight], lr=0.5, eps=0.0)
    values = torch.tensor([[3.0, 1.0], [0.0, 2.0], [1.0, 1.0]])
    for _ in range(2):
        weight.grad = torch.sparse_coo_tensor(torch.tensor([[2, 0, 2]]), values, (4, 2))
        optimizer.step()
    # Row 2: gradient (4, 2), mean square 10, twice; row 0: (0, 2), mean square 2, twice.
    assert optimizer.state[weight]["sum"].tolist() == [4.0, 0.0, 20.0, 0.0]
    step = 0.5 * (10**-0.5 + 20**-0.5)
    torch.testing.assert_close(weight[2], torch.tensor([4 - 4 * step, 5 - 2 * step]))
    assert weight[1].tolist() == [2.0, 3.0]
    assert weight[3].tolist() == [6.0, 7.0]
