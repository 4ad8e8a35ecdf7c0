"""A persist without orchestration: what was staged is what a restore finds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from recpoint.catalog.check.check import check
from recpoint.catalog.persist import persist, plan
from recpoint.catalog.persist.quantizer_choice import _sample, choose_quantizer
from recpoint.catalog.restore.chunks import StoreChunks, read_chunk
from recpoint.catalog.restore.restore import MemoryTarget
from recpoint.catalog.run.run import Run
from recpoint.catalog.staging import job_files
from recpoint.catalog.store.store import open_store
from recpoint.format.job import QUANTIZERS, QuantizerName
from recpoint.format.row_state import to_bfloat16
from recpoint.kernels import quantize
from recpoint.kernels.bit_packing import BITS
from recpoint.kernels.implementation import on_cpu
from recpoint.kernels.quantize import ASYMMETRIC, SYMMETRIC, Method
from recpoint.kernels.quantize.choice import SAMPLE_ROWS, choose, drawn
from tests.catalog_builder import Table, tables
from tests.job_builder import Links, stage
from tests.persisted import restored


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several chunks and groups out of small jobs."""
    monkeypatch.setattr(plan, "CHUNK_BYTES", 400)
    monkeypatch.setattr(plan, "GROUP_BYTES", 900)


def same(found: Tensor, expected: Tensor) -> bool:
    """Bit for bit, NaN payloads and signs of zeros included."""
    return found.dtype == expected.dtype and torch.equal(
        found.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8)
    )


def same_tables(target: MemoryTarget, expected: Sequence[Table]) -> bool:
    return all(
        same(target.tables[table.name].values, table.values)
        and all(
            found is not None and same(found, state)
            for found, state in zip(target.tables[table.name].row_states, table.states, strict=True)
        )
        for table in expected
    )


def decoded(values: Tensor, bits: int, method: Method = ASYMMETRIC) -> Tensor:
    """What a restore finds of f32 rows [n, dim], all of them quantizable."""
    quantized = quantize.quantize(values, bits, method, half_parameters=True)
    assert not quantized.exact.any()
    return quantize.dequantize(quantized.codes, quantized.scale, quantized.offset)


def parameters_of(run: Run, step: int) -> dict[str, int]:
    """Quantized rows of a checkpoint by the dtype of their parameters."""
    manifest = run.manifest(step, 1)
    rows = {"F16": 0, "F32": 0}
    for entry in manifest.chunks:
        if entry.scheme == "asymmetric":
            scale = read_chunk(StoreChunks(run.store), manifest, entry).sections["scale"]
            rows[scale.dtype] += entry.row_count or 0
    return rows


def train_and_persist(run: Run, staging: Path, trained: list[Table], *, checkpoints: int) -> int:
    """A full and increments after it; the step of the last."""
    links, generator = Links(), torch.Generator().manual_seed(7)
    dirty: list[Tensor | None] | None = None
    for step in range(1, checkpoints + 1):
        if step > 1:
            dirty = []
            for table in trained:
                ids = torch.randperm(table.rows, generator=generator)[: 1 + table.rows // 3]
                dirty.append(ids.sort().values)
                table.train(ids, generator)
        path = stage(
            run,
            staging,
            trained,
            step=step,
            generation=1,
            links=links,
            dirty=dirty,
            state={"step": step, "dense": torch.full((300,), float(step)), "none": None},
            slot=step % 2,
        )
        outcome = persist.persist_job(path)
        assert (outcome.result, outcome.error) == ("committed", "")
        assert not path.exists()
        assert job_files.read_outcome(path.parent.parent / "outcomes" / path.name) == outcome
    return checkpoints


@pytest.mark.parametrize("chunks", ["small", "large"])
def test_a_lossless_chain_comes_back_bit_for_bit(
    run: Run, tmp_path: Path, chunks: str, request: pytest.FixtureRequest
) -> None:
    if chunks == "small":
        request.getfixturevalue("small_chunks")
    trained = tables()
    step = train_and_persist(run, tmp_path / "staging", trained, checkpoints=3)
    target = restored(run)
    assert same_tables(target, trained)
    state = target.state[0]
    assert isinstance(state, dict) and state["step"] == step
    assert same(state["dense"], torch.full((300,), float(step)))
    assert check(run, level="full").ok


@pytest.mark.parametrize("quantizer", QUANTIZERS)
@pytest.mark.parametrize("bits", BITS)
def test_a_table_of_nothing_but_nan_can_be_chosen_for(
    run: Run, tmp_path: Path, bits: int, quantizer: QuantizerName
) -> None:
    table = Table("t", torch.full((9, 5), float("nan")), bits=bits, quantizer=quantizer)
    persist.persist_job(stage(run, tmp_path / "s", [table], step=1, generation=1))
    assert same(restored(run).tables["t"].values, table.values)


@pytest.mark.parametrize("bits", BITS)
def test_quantized_rows_come_back_as_the_kernel_says(
    run: Run, tmp_path: Path, bits: int, small_chunks: None
) -> None:
    trained = tables(bits=bits, rows=100, dim=5)
    train_and_persist(run, tmp_path / "staging", trained, checkpoints=3)
    target = restored(run)
    assert same(target.tables["items"].values, decoded(trained[0].values, bits))
    for found, state in zip(target.tables["items"].row_states, trained[0].states, strict=True):
        assert found is not None and same(found, state)
    assert check(run, level="full").ok


@pytest.mark.parametrize("all_rows", [True, False])
def test_rows_that_cannot_be_quantized_come_back_bit_for_bit(
    run: Run, tmp_path: Path, small_chunks: None, all_rows: bool
) -> None:
    table = tables(bits=4, rows=120, dim=6)[0]
    refused = [0, 7, 8, 9, 40, 119]
    table.values[0, 1] = float("nan")
    table.values[7] = float("inf")
    table.values[8] = torch.tensor([0.0, -0.0] * 3)
    table.values[9, :2] = torch.tensor([3e38, -3e38])
    table.values[40] = torch.tensor([-float("nan")] * 6)
    table.values[119, 5] = -float("inf")
    stored = torch.arange(120)
    links = Links()
    path = stage(run, tmp_path / "staging", [table], step=1, generation=1, links=links)
    assert persist.persist_job(path).result == "committed"
    if not all_rows:
        stored = torch.tensor([0, 1, 7, 8, 9, 30, 40, 41, 119])
        path = stage(
            run,
            tmp_path / "staging",
            [table],
            step=2,
            generation=1,
            links=links,
            dirty=[stored],
        )
        assert persist.persist_job(path).result == "committed"
    target = restored(run).tables["items"]
    assert same(target.values[refused], table.values[refused])
    kept = torch.ones(120, dtype=torch.bool)
    kept[refused] = False
    assert same(target.values[kept], decoded(table.values[kept], 4))
    for found, state in zip(target.row_states, table.states, strict=True):
        assert found is not None and same(found, state)
    manifest = run.manifest(2 if not all_rows else 1, 1)
    exact = sum(c.row_count or 0 for c in manifest.chunks if c.scheme == "exact")
    assert exact == len(refused)


@pytest.mark.parametrize("all_rows", [True, False])
def test_rows_whose_parameters_need_binary32_lie_beside_the_others(
    run: Run, tmp_path: Path, small_chunks: None, all_rows: bool
) -> None:
    table = tables(bits=4, rows=120, dim=6)[0]
    table.values[5] = 0.1  # constant, and no value of binary16
    table.values[6] = 0.0
    table.values[7] += 3e5
    table.values[60] *= 1e-6
    table.values[61, 1] = float("nan")
    table.values[119] += 1000.0
    wide = {5, 7, 60, 119}
    links = Links()
    dirty = None
    path = stage(run, tmp_path / "staging", [table], step=1, generation=1, links=links)
    assert persist.persist_job(path).result == "committed"
    if not all_rows:
        dirty = torch.tensor([4, 5, 6, 60, 61, 119])
        wide = {5, 60, 119}
        path = stage(
            run, tmp_path / "staging", [table], step=2, generation=1, links=links, dirty=[dirty]
        )
        assert persist.persist_job(path).result == "committed"
    stored = 120 if dirty is None else len(dirty)
    found = parameters_of(run, 1 if all_rows else 2)
    assert found == {"F16": stored - len(wide) - 1, "F32": len(wide)}
    target = restored(run).tables["items"]
    kept = torch.arange(120) != 61
    assert same(target.values[kept], decoded(table.values[kept], 4))
    assert same(target.values[61], table.values[61])
    for state, expected in zip(target.row_states, table.states, strict=True):
        assert state is not None and same(state, expected)
    assert check(run, level="full").ok


def test_a_table_that_needs_binary32_throughout(run: Run, tmp_path: Path) -> None:
    values = torch.randn(40, 4, generator=torch.Generator().manual_seed(3)) * 1e-9
    path = stage(run, tmp_path / "staging", [Table("t", values, bits=2)], step=1, generation=1)
    assert persist.persist_job(path).result == "committed"
    assert parameters_of(run, 1) == {"F16": 0, "F32": 40}
    assert same(restored(run).tables["t"].values, decoded(values, 2))


def test_the_manifest_says_how_each_table_was_quantized(
    run: Run, tmp_path: Path, small_chunks: None
) -> None:
    generator = torch.Generator().manual_seed(4)
    trained = [
        Table("exact", torch.randn(30, 4, generator=generator)),
        Table("symmetric", torch.randn(90, 4, generator=generator), bits=4, quantizer="symmetric"),
        Table("plain", torch.randn(90, 4, generator=generator), bits=2, quantizer="asymmetric"),
        Table("auto, 8 bits", torch.randn(90, 4, generator=generator), bits=8, quantizer="auto"),
    ]
    path = stage(run, tmp_path / "staging", trained, step=1, generation=1)
    assert len(persist.PersistJob.open(path).groups) > 2
    assert persist.persist_job(path).result == "committed"
    manifest = run.manifest(1, 1)
    assert [(q.table, q.method, q.sample_rows, q.seed) for q in manifest.quantizers] == [
        (1, "symmetric", 0, 0),
        (2, "asymmetric", 0, 0),
        (3, "asymmetric", 0, 0),
    ]
    assert manifest.quantized_by == on_cpu()
    target = restored(run)
    for table, method in zip(trained[1:], (SYMMETRIC, ASYMMETRIC, ASYMMETRIC), strict=True):
        expected = decoded(table.values, table.bits or 0, method)
        assert same(target.tables[table.name].values, expected)


@pytest.mark.parametrize("name", ["auto", "greedy", "refit"])
def test_a_choice_is_made_on_a_sample_of_the_staged_rows_and_is_made_again_the_same(
    run: Run, tmp_path: Path, name: QuantizerName
) -> None:
    generator = torch.Generator().manual_seed(5)
    values = torch.randn(6000, 3, generator=generator)
    table = Table("t", values, bits=4, quantizer=name)
    dirty = [torch.arange(0, 6000, 2)]
    links = Links()
    jobs = [
        stage(run, tmp_path / "s", [table], step=1, generation=1, links=links, slot=0),
        stage(run, tmp_path / "s", [table], step=2, generation=1, links=links, slot=1, dirty=dirty),
    ]
    staged_jobs = [persist.PersistJob.open(path).staged for path in jobs]
    samples = [_sample(job, 0, seed=job.job.step) for job in staged_jobs]
    assert same(samples[0], values[drawn(6000, 1)]) and len(samples[0]) == SAMPLE_ROWS
    assert same(samples[1], values[::2])
    first = [choose_quantizer(job, 0) for job in staged_jobs]
    for path in jobs:
        assert persist.persist_job(path).result == "committed"
    for step, (quantizer, method) in enumerate(first, 1):
        assert run.manifest(step, 1).quantizers == (quantizer,)
        assert (quantizer.sample_rows, quantizer.seed) == (len(samples[step - 1]), step)
        named = None if name == "auto" else name
        assert method == choose(samples[step - 1], 4, seed=step, name=named)
        assert method.name == (named or "refit")
    assert same(restored(run).tables["t"].values[1], decoded(values[1:2], 4, first[0][1])[0])


@pytest.mark.parametrize("bits", [None, 4])
def test_rounded_row_states_come_back_within_their_bound_and_the_others_exactly(
    run: Run, tmp_path: Path, small_chunks: None, bits: int | None
) -> None:
    generator = torch.Generator().manual_seed(6)
    moments = torch.rand(70, 4, generator=generator)
    moments[3] = 0.0
    moments[4, 1] = 3.4e38
    table = Table(
        "t",
        torch.randn(70, 4, generator=generator),
        (moments, torch.rand(70, generator=generator), moments.double(), moments[:, :1].clone()),
        bits=bits,
        state_bits=16,
    )
    table.values[5, 2] = float("nan")
    table.values[9] *= 1e-9
    links = Links()
    path = stage(run, tmp_path / "s", [table], step=1, generation=1, links=links)
    assert persist.persist_job(path).result == "committed"
    dirty = torch.tensor([0, 3, 4, 5, 6, 9, 69])
    table.train(dirty[-2:], generator)
    path = stage(run, tmp_path / "s", [table], step=2, generation=1, links=links, dirty=[dirty])
    assert persist.persist_job(path).result == "committed"
    found = restored(run).tables["t"].row_states
    expected = (to_bfloat16(table.states[0]).float(), *table.states[1:])
    for state, wanted in zip(found, expected, strict=True):
        assert state is not None and same(state, wanted)
    assert [run.manifest(step, 1).state_bits for step in (1, 2)] == [16, 16]
    assert check(run, level="full").ok


def test_state_bits_mean_nothing_where_no_state_may_be_rounded(run: Run, tmp_path: Path) -> None:
    table = Table("t", torch.randn(5, 2), (torch.rand(5),), state_bits=16)
    persist.persist_job(stage(run, tmp_path / "s", [table], step=1, generation=1))
    assert run.manifest(1, 1).state_bits is None
    assert same_tables(restored(run), [table])


def test_a_lossless_manifest_names_no_quantizer(run: Run, tmp_path: Path) -> None:
    train_and_persist(run, tmp_path / "staging", tables(), checkpoints=1)
    manifest = run.manifest(1, 1)
    assert (manifest.quantizers, manifest.quantized_by) == ((), "")
    assert manifest.state_bits is None


def test_a_table_of_nothing_but_nan_becomes_exact_chunks_only(
    run: Run, tmp_path: Path, small_chunks: None
) -> None:
    table = Table("t", torch.full((64, 9), float("nan")), bits=2)
    path = stage(run, tmp_path / "staging", [table], step=1, generation=1)
    assert persist.persist_job(path).result == "committed"
    assert same(restored(run).tables["t"].values, table.values)
    schemes = {chunk.scheme for chunk in run.manifest(1, 1).chunks if chunk.content == "rows"}
    assert schemes == {"exact"}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_tables_of_other_dtypes_are_quantized_from_f32(
    run: Run, tmp_path: Path, dtype: torch.dtype
) -> None:
    values = torch.randn(50, 4, generator=torch.Generator().manual_seed(1)).to(dtype)
    values[3] = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64).to(dtype)
    path = stage(run, tmp_path / "staging", [Table("t", values, bits=8)], step=1, generation=1)
    assert persist.persist_job(path).result == "committed"
    found = restored(run).tables["t"].values
    expected = decoded(values.float(), 8).to(dtype)
    if dtype == torch.float64:
        expected[3] = values[3]  # 0.1 is no F32: stored as it is
    assert same(found, expected)


def test_what_is_persisted_lands_on_s3(s3_run_url: str, tmp_path: Path, small_chunks: None) -> None:
    run = Run.create(open_store(s3_run_url))
    run.claim(None)
    trained = tables()
    train_and_persist(run, tmp_path / "staging", trained, checkpoints=2)
    assert same_tables(restored(run), trained)
    assert not list(run.store.list_unfinished())


def test_chunks_and_groups_keep_to_their_sizes(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "CHUNK_BYTES", 4000)
    monkeypatch.setattr(plan, "GROUP_BYTES", 9000)
    trained = [Table(f"t{bits}", torch.randn(500, 7), bits=bits) for bits in (None, 2, 8)]
    big = torch.randn(3000)
    state = {"big": big, "small": [torch.ones(1)] * 3}
    path = stage(run, tmp_path / "s", trained, step=1, generation=1, state=state)
    groups = persist.PersistJob.open(path).groups
    assert all(group.staged_bytes <= 9000 for group in groups) and len(groups) > 4
    assert persist.persist_job(path).result == "committed"
    header_bytes = 1500
    manifest = run.manifest(1, 1)
    assert max(chunk.bytes for chunk in manifest.chunks) <= 4000 + header_bytes
    target = restored(run)
    found = target.state[0]
    assert isinstance(found, dict) and same(found["big"], big)
    assert not (path.parent.parent / "spool" / path.stem).exists()
