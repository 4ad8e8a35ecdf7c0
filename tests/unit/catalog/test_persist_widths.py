"""Rows of one table in many widths: what the agent chooses, stores, and restores."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from recpoint.catalog.check.check import check
from recpoint.catalog.persist import block_rows, plan, row_widths
from recpoint.catalog.persist.encode import encoded_entries
from recpoint.catalog.persist.persist import PersistJob, persist_job
from recpoint.catalog.persist.spool import empty_spool
from recpoint.catalog.run.run import Run
from recpoint.errors import MalformedObject
from recpoint.format.job import QuantizerName
from recpoint.format.manifest import CODE_BITS, ChunkEntry, Manifest
from recpoint.kernels.allocation import EXACT
from recpoint.kernels.quantize import ASYMMETRIC
from tests.catalog_builder import Table
from tests.job_builder import Links, stage
from tests.mixed_table import a_chunk_for_each_width, decoded, mixed_table, widths_of
from tests.persisted import restored


@pytest.fixture(autouse=True)
def _each_width(monkeypatch: pytest.MonkeyPatch) -> None:
    a_chunk_for_each_width(monkeypatch)


def same(values: Tensor | None, expected: Tensor) -> bool:
    """Bit for bit."""
    assert values is not None
    return torch.equal(values.contiguous().view(torch.uint8), expected.view(torch.uint8))


def rows_by_width(manifest: Manifest) -> dict[int, int]:
    """Rows of the only table by the width of their codes."""
    counts: Counter[int] = Counter()
    for entry in manifest.chunks:
        if entry.scheme is not None:
            bits = EXACT if entry.scheme == "exact" else entry.bits
            assert bits is not None and entry.row_count is not None
            counts[bits] += entry.row_count
    return dict(counts)


def expected_rows(widths: Tensor) -> dict[int, int]:
    numbers, counts = widths.unique(return_counts=True)
    return dict(zip(numbers.tolist(), counts.tolist(), strict=True))


@pytest.mark.parametrize(
    ("form", "chunks"),
    [
        ("F32", "small"),
        ("rounded", "small"),
        *((form, "large") for form in ("F16", "BF16", "F64", "one value", "half")),
    ],
)
def test_each_row_is_stored_in_its_width(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str, chunks: str
) -> None:
    if chunks == "small":
        monkeypatch.setattr(plan, "CHUNK_BYTES", 500)
        monkeypatch.setattr(plan, "GROUP_SPOOL_BYTES", 2_500)
    dtypes = {"F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}
    table = mixed_table(
        dtype=dtypes.get(form, torch.float32),
        state_dtype=torch.bfloat16 if form == "half" else torch.float32,
        element_wise=form != "one value",
        state_bits=16 if form == "rounded" else None,
    )
    if form == "F64":
        table.values[:] = table.values.float().double()
        table.values[7, 0] += 2.0**-40  # F32 has no such value
    widths = widths_of(table)
    links = Links()
    path = stage(run, tmp_path / "s", [table], step=1, generation=1, links=links)
    assert persist_job(path).error == ""
    if form == "F64":
        widths[7] = EXACT
    assert set(widths.tolist()) == {EXACT, *CODE_BITS}
    manifest = run.manifest(1, 1)
    assert rows_by_width(manifest) == expected_rows(widths)
    assert [(q.method, q.bins, q.refits) for q in manifest.quantizers] == [("refit", 0, 2)]
    assert (len(manifest.chunks) > 30) == (chunks == "small")

    changed = torch.arange(5, table.rows, 3)
    table.values[changed] = table.values[changed] * 0.5
    table.states[1][changed] *= 3
    dirty: list[Tensor | None] = [changed]
    stage(run, tmp_path / "s", [table], step=2, generation=1, links=links, dirty=dirty, slot=1)
    job = path.parent / path.name.replace("-000000000001", "-000000000002")
    assert persist_job(job).error == ""
    newer = widths_of(table)
    if form == "F64":
        newer[7] = EXACT
    assert rows_by_width(run.manifest(2, 1)) == expected_rows(newer[changed])
    widths[changed] = newer[changed]
    target = restored(run).tables["items"]
    expected = decoded(table.values, widths)
    nan = expected.isnan()
    assert torch.equal(target.values.isnan(), nan)
    assert same(target.values.nan_to_num(), expected.nan_to_num())
    assert same(target.row_states[0], table.states[0])
    if form != "rounded":
        assert same(target.row_states[1], table.states[1])
    assert check(run, level="full").ok


@pytest.mark.parametrize("quantizer", ["asymmetric", "symmetric", "greedy", "refit"])
def test_widths_do_not_depend_on_the_quantizer(
    run: Run, tmp_path: Path, quantizer: QuantizerName
) -> None:
    table = replace(mixed_table(), quantizer=quantizer)
    path = stage(run, tmp_path / "s", [table], step=1, generation=1)
    assert persist_job(path).error == ""
    manifest = run.manifest(1, 1)
    assert rows_by_width(manifest) == expected_rows(widths_of(table))
    assert [q.method for q in manifest.quantizers] == [quantizer]
    plain = decoded(table.values, widths_of(table), ASYMMETRIC)
    stored = restored(run).tables["items"].values
    of_stored, of_plain = (
        float((values - table.values).nan_to_num().square().sum()) for values in (stored, plain)
    )
    if quantizer == "asymmetric":
        assert same(stored.nan_to_num(), plain.nan_to_num())
    else:
        assert of_stored > of_plain if quantizer == "symmetric" else of_stored < of_plain


def _encoded(path: Path, *groups: int) -> list[ChunkEntry]:
    """The chunks of some groups of a job, which a process that is then killed has begun."""
    job = PersistJob.open(path)
    entries = []
    for group in job.groups:
        if not groups or group.index in groups:
            job.quantize(group)
            job.encode(group)
            entries += encoded_entries(job.staged, group)
    return entries


@pytest.mark.parametrize("threads", [1, 3])
def test_an_agent_that_starts_over_writes_the_same(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    monkeypatch.setattr(plan, "GROUP_SPOOL_BYTES", 2_500)
    path = stage(run, tmp_path / "s", [mixed_table()], step=1, generation=1)
    whole = _encoded(path)
    assert len(whole) > 30
    empty_spool(PersistJob.open(path).staged)
    thread_count = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert _encoded(path, 1, 2) == [entry for entry in whole if entry in _encoded(path, 1, 2)]
        assert _encoded(path) == whole
    finally:
        torch.set_num_threads(thread_count)


def test_numbers_of_chunks_are_not_shared(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All rows of a block may be of one form, whichever it is."""
    monkeypatch.setattr(plan, "CHUNK_BYTES", 700)
    monkeypatch.setattr(plan, "GROUP_SPOOL_BYTES", 2_000)
    job = PersistJob.open(stage(run, tmp_path / "s", [mixed_table()], step=1, generation=1))
    (table,) = job.job.tables
    numbers = plan.chunk_numbers(table)
    assert len(numbers) == len(plan.stored_forms(table)) == 2 * len(CODE_BITS) + 1
    rows = plan.rows_of_block(table)
    end = 0
    for form, of_form in zip(plan.stored_forms(table), numbers, strict=True):
        assert of_form.start == end
        assert plan.rows_of_chunk(table, form) * len(of_form) >= rows
        end = of_form.stop
    blocks = [b for g in job.groups for b in g.blocks if isinstance(b, plan.RowBlock)]
    assert [block.number for block in blocks] == [place * end for place in range(len(blocks))]
    monkeypatch.setattr(plan, "MAX_CHUNK", len(blocks) * end - 2)
    with pytest.raises(MalformedObject, match=f"400 rows .* {len(blocks) * end} chunks"):
        plan.plan_groups(job.staged)


def test_few_rows_of_a_width_are_stored_in_more_bits(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_widths, "_CHUNK_COST_BYTES", 4096)
    table = mixed_table(rows=300)
    path = stage(run, tmp_path / "s", [table], step=1, generation=1)
    assert persist_job(path).error == ""
    widths = widths_of(table)
    exact = int((widths == EXACT).sum())
    assert rows_by_width(run.manifest(1, 1)) == {8: 300 - exact, EXACT: exact}
    widths[widths != EXACT] = 8
    restored_rows = restored(run).tables["items"].values
    assert same(restored_rows.nan_to_num(), decoded(table.values, widths).nan_to_num())


@pytest.mark.parametrize(("cost", "widths"), [(0, 6), (20, 5), (4096, 1)])
def test_the_rows_that_are_read_at_once_change_nothing(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cost: int, widths: int
) -> None:
    """Of several passes, rows of too few are written in the next wider width at the end."""
    monkeypatch.setattr(row_widths, "_CHUNK_COST_BYTES", cost)
    path = stage(run, tmp_path / "s", [mixed_table()], step=1, generation=1)
    whole = _encoded(path)
    assert len({entry.bits for entry in whole if entry.scheme == "asymmetric"}) == widths
    empty_spool(PersistJob.open(path).staged)
    monkeypatch.setattr(block_rows, "_PASS_BYTES", 7 * 6 * 4)  # seven rows
    assert _encoded(path) == whole


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        (torch.tensor([4.0, -1.0, float("nan")]), [2.0, 0.0, float("nan")]),
        (torch.tensor([[1.0, 2.0, 6.0], [-3.0, 3.0, float("inf")]]), [1.5, float("inf")]),
        (torch.full((2, 5), 3e38), [1.5e38, 1.5e38]),
        (torch.tensor([[[2.0], [4.0]]], dtype=torch.float16), [1.5]),
        (torch.tensor([[1e300, 1e300]], dtype=torch.float64), [float("inf")]),
    ],
    ids=["one value", "several", "sums beyond f32", "half", "beyond f32"],
)
def test_importance(states: Tensor, expected: list[float]) -> None:
    copy = states.clone()
    importances = row_widths.importance(states, 0.5)
    assert torch.allclose(importances, torch.tensor(expected), equal_nan=True)
    assert importances.dtype == torch.float32 and same(states, copy)


@pytest.mark.parametrize("shape", [(0,), (0, 4)])
def test_importance_of_no_rows(shape: tuple[int, ...]) -> None:
    assert row_widths.importance(torch.empty(shape), 0.5).shape == (0,)


def test_importance_of_counts_goes_by_what_their_codes_stand_for() -> None:
    codes = torch.tensor([0, 3, 16, 255], dtype=torch.uint8)
    assert row_widths.importance(codes, 0.5).tolist() == [0.0, 1.5, 8.0, 0.5 * 15 * 2**30]


def test_importance_leaves_out_the_value_that_a_state_began_with() -> None:
    states = torch.tensor([[0.5, 0.5], [0.75, 0.25], [1.0, 1.5]])
    assert row_widths.importance(states, 0.5, 0.5).tolist() == [0.0, 0.0625, 0.375]


def test_the_agent_takes_the_first_value_of_a_state_off(run: Run, tmp_path: Path) -> None:
    table = mixed_table()
    table.states[1][:] += 64.0
    assert table.allocation is not None
    allocation = table.allocation.model_copy(update={"initial": (64.0).hex()})
    begun = replace(table, allocation=allocation)
    path = stage(run, tmp_path / "s", [begun], step=1, generation=1)
    assert persist_job(path).error == ""
    assert rows_by_width(run.manifest(1, 1)) == expected_rows(widths_of(begun))
    assert expected_rows(widths_of(begun)) != expected_rows(widths_of(table))


def test_a_row_whose_importance_is_not_known_is_exact(run: Run, tmp_path: Path) -> None:
    table = mixed_table()
    table.states[1][:] = float("nan")
    path = stage(run, tmp_path / "s", [table], step=1, generation=1)
    assert persist_job(path).error == ""
    assert rows_by_width(run.manifest(1, 1)) == {EXACT: 400}


def test_a_table_without_rows_to_store(run: Run, tmp_path: Path) -> None:
    links, table = Links(), mixed_table()
    none: list[Tensor | None] = [torch.empty(0, dtype=torch.int64)]
    for step, dirty in ((1, None), (2, none)):
        path = stage(
            run, tmp_path / "s", [table], step=step, generation=1, links=links, dirty=dirty
        )
        assert persist_job(path).error == ""
    assert rows_by_width(run.manifest(2, 1)) == {}


def test_tables_of_one_width_beside_it_are_stored_as_without_it(run: Run, tmp_path: Path) -> None:
    beside = [
        Table("exact", torch.randn(30, 4)),
        Table("four", torch.randn(90, 4), bits=4),
    ]
    entries = []
    for step, tables in ((1, [*beside]), (2, [*beside, mixed_table()])):
        path = stage(run, tmp_path / "s", tables, step=step, generation=1, attempt="ab" * 16)
        entries.append(_encoded(path))
    sizes = [
        [(entry.table, entry.bits, entry.bytes) for entry in of_job if entry.table in (0, 1)]
        for of_job in entries
    ]
    assert sizes[0] == sizes[1] and len(sizes[0]) == 2
