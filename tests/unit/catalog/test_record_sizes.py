"""Sizes of records are known before a checkpoint is staged, and the agent finds the same."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from recpoint.catalog.persist import plan
from recpoint.catalog.persist.persist import PersistJob, drive, persist_job
from recpoint.catalog.persist.plan import tensor_chunks
from recpoint.catalog.persist.record_sizes import PartSizes, part_sizes
from recpoint.catalog.run.run import Run
from recpoint.format import paging, records
from recpoint.format.naming import attempt_prefix
from recpoint.format.records import pack_record
from tests.catalog_builder import Table
from tests.job_builder import Links, stage
from tests.small_pages import small_pages

#: Beside the tables and the chunks, a manifest has about as many bytes.
OTHER_BYTES = 1_100
#: The same of a job file.
OTHER_JOB_BYTES = 780


def sizes_of(job: PersistJob) -> PartSizes:
    """What is estimated of a staged job, from what its trainer knew before it staged it."""
    segments = {segment.name: segment for segment in job.job.segments}
    tensors = [segments[name].bytes for name in segments if name.startswith(("tree", "tensor"))]
    return part_sizes(job.job.tables, part=job.job.rank, state_bytes=tensors)


def trained(tables: int, rows: int, dim: int, **how: object) -> list[Table]:
    """Tables of random rows, with a row state of one value a row."""
    return [
        Table(f"embeddings.table{n}.weight", torch.randn(rows, dim), **how)  # type: ignore[arg-type]
        for n in range(tables)
    ]


@pytest.mark.parametrize("increment", [False, True], ids=["full", "increment"])
@pytest.mark.parametrize(
    ("tables", "rows", "chunk_bytes"), [(120, 3, plan.CHUNK_BYTES), (2, 6_000, 2_000)]
)
def test_the_estimate_of_exact_rows_is_what_is_stored(
    run: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tables: int,
    rows: int,
    chunk_bytes: int,
    increment: bool,
) -> None:
    monkeypatch.setattr(plan, "CHUNK_BYTES", chunk_bytes)
    links = Links()
    take = partial(
        stage,
        run,
        tmp_path / "s",
        trained(tables, rows, 8),
        generation=1,
        links=links,
        state={"dense": torch.zeros(1_500), "bias": torch.zeros(3)},
        samples=2,
    )
    path, step = take(step=1), 1
    if increment:
        persist_job(path)
        path, step = take(step=2, dirty=[torch.arange(0, rows, 2)] * tables), 2
    job = PersistJob.open(path)
    sizes, job_bytes = sizes_of(job), len(path.read_bytes()) - OTHER_JOB_BYTES
    assert persist_job(path).result == "committed"
    manifest = run.manifest(step, 1)
    stored_bytes = len(pack_record(manifest)) - OTHER_BYTES
    assert sizes.chunks == len(manifest.chunks)
    assert sizes.manifest_bytes == pytest.approx(stored_bytes, rel=0.02)
    assert sizes.job_bytes == pytest.approx(job_bytes, rel=0.15)


def test_an_estimate_of_quantized_rows_is_no_more_than_what_is_stored(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "CHUNK_BYTES", 900)
    path = stage(run, tmp_path / "s", trained(3, 900, 8, bits=4), step=1, generation=1, samples=2)
    sizes = sizes_of(PersistJob.open(path))
    assert persist_job(path).result == "committed"
    manifest = run.manifest(1, 1)
    assert len(manifest.chunks) / 3 < sizes.chunks <= len(manifest.chunks)
    assert sizes.manifest_bytes < len(pack_record(manifest))


def test_the_agent_rejects_a_large_job_before_it_uploads(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "CHUNK_BYTES", 2_000)
    job = PersistJob.open(stage(run, tmp_path / "s", trained(1, 6_000, 8), step=2, generation=1))
    monkeypatch.setattr(records, "MAX_RECORD_BYTES", sizes_of(job).manifest_bytes - 1)
    outcome = drive(job).outcome
    assert (outcome.result, outcome.error_type) == ("rejected", "RecordTooLarge")
    assert not any(run.store.list(attempt_prefix(2, 1, job.job.attempt)))


def test_a_manifest_that_fits_in_pages_is_committed(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "CHUNK_BYTES", 2_000)
    job = PersistJob.open(stage(run, tmp_path / "s", trained(1, 6_000, 8), step=2, generation=1))
    small_pages(monkeypatch, chunks=16)
    monkeypatch.setattr(paging, "ONE_RECORD_CHUNKS", 16)
    # The test before this one has the same job rejected, whose manifest is one record.
    monkeypatch.setattr(records, "MAX_RECORD_BYTES", sizes_of(job).manifest_bytes - 1)
    assert drive(job).outcome.result == "committed"
    manifest = run.manifest(2, 1)
    assert len(manifest.chunks) > 64 and len(manifest.pages) > 4


@pytest.mark.parametrize(
    ("entries_bytes", "tables_bytes", "fits"),
    [
        (1_000_000, 63 << 20, True),  # one record
        (1_000_000, 64 << 20, False),
        (70 << 20, 20_000, True),  # 240,640 chunks of 1,024 ranks, in pages
        ((1 << 30) - 20_000, 20_000, True),
        (1 << 30, 20_000, False),
        (200 << 20, 64 << 20, False),  # the root alone is too large
    ],
)
def test_what_a_manifest_may_take(entries_bytes: int, tables_bytes: int, fits: bool) -> None:
    assert paging.manifest_fits(entries_bytes, tables_bytes) is fits


def test_tensors_fill_chunks_as_the_plan_has_them_do(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "CHUNK_BYTES", 400)
    tensors = [torch.zeros(size) for size in (90, 20, 350, 1, 0, 100)]
    state = {str(n): tensor for n, tensor in enumerate(tensors)}
    path = stage(run, tmp_path / "s", [], step=1, generation=1, state=state)
    job = PersistJob.open(path)
    segments = {segment.name: segment.bytes for segment in job.job.segments}
    sizes = [segments["tree"], *(segments[f"tensor.{n}"] for n in range(len(tensors)))]
    assert tensor_chunks(sizes) == sum(len(group.blocks) for group in job.groups)
    assert tensor_chunks([]) == 0
