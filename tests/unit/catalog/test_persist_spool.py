"""What a persist leaves in the spool: bounded by the plan, and nothing that chunks depend on."""

from __future__ import annotations

import json
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from recpoint.catalog.persist import plan, spool
from recpoint.catalog.persist.encode import encoded_entries
from recpoint.catalog.persist.persist import PersistJob, persist_job
from recpoint.catalog.persist.spool import empty_spool, result_path
from recpoint.catalog.run.run import Run
from recpoint.catalog.staging.area import StagedRun
from recpoint.catalog.store import durable
from recpoint.catalog.store.store import open_store
from recpoint.errors import StagingFull
from recpoint.format.job import Allocation
from recpoint.format.manifest import ChunkEntry
from tests.catalog_builder import Table, new_run
from tests.job_builder import stage
from tests.mixed_table import a_chunk_for_each_width

_ROWS = 60_000
_MIXED = Allocation(price=(2.0**-20).hex(), state=0, scale=(0.5).hex())


def _job(
    run: Run, tmp_path: Path, bits: int, dirty: bool, rounded: bool, mixed: bool = False
) -> Path:
    generator = torch.Generator().manual_seed(bits)
    values = torch.randn(_ROWS, 8, generator=generator)
    kinds = torch.rand(_ROWS, generator=generator)
    values[kinds < 0.5] = values[kinds < 0.5] * 1e-3 + 1000  # binary16 has no such offset
    values[kinds < 0.05, 0] = float("nan")  # no code is one
    states = (torch.rand(_ROWS, 8, generator=generator), torch.rand(_ROWS, generator=generator))
    if mixed:
        states = ((10 ** (kinds * 9 - 6))[:, None] * states[0], states[1])
    table = Table(
        "t",
        values,
        states,
        bits=bits,
        state_bits=16 if rounded else None,
        allocation=_MIXED if mixed else None,
    )
    ids = torch.nonzero(torch.rand(_ROWS, generator=generator) < 0.7).flatten() if dirty else None
    return stage(run, tmp_path / "s", [table], step=1, generation=1, dirty=[ids])


def _encoded(job: Path) -> tuple[list[ChunkEntry], list[int], list[int]]:
    """The chunks; of each group how many blocks it has and its bytes in the spool."""
    entries: list[ChunkEntry] = []
    blocks, spooled = [], []
    opened = PersistJob.open(job)
    for group in opened.groups:
        files = [opened.quantize(group), opened.encode(group)]
        spooled.append(sum(Path(file).with_suffix(".bin").stat().st_size for file in files))
        blocks.append(len(group.blocks))
        entries += encoded_entries(opened.staged, group)
    return entries, blocks, spooled


@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("dirty", [False, True])
@pytest.mark.parametrize("bits", [2, 8])
def test_a_group_takes_no_more_of_the_spool_than_planned_and_chunks_do_not_depend_on_it(
    run: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    bits: int,
    dirty: bool,
    rounded: bool,
) -> None:
    monkeypatch.setattr(plan, "CHUNK_BYTES", 100_000)
    job = _job(run, tmp_path, bits, dirty, rounded)
    whole, _, alone = _encoded(job)
    assert len(alone) == 1
    empty_spool(PersistJob.open(job).staged)
    monkeypatch.setattr(plan, "GROUP_SPOOL_BYTES", 250_000)
    entries, blocks, spooled = _encoded(job)
    assert entries == whole
    # As full as they may get, so that there are no more of them than it takes.
    assert max(spooled) <= 250_000 and len(spooled) > 2 and max(blocks) > 1


@pytest.mark.parametrize("rounded", [False, True])
def test_rows_of_many_widths_fill_a_group_and_take_no_more_of_the_spool(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rounded: bool
) -> None:
    monkeypatch.setattr(plan, "CHUNK_BYTES", 100_000)
    monkeypatch.setattr(plan, "GROUP_SPOOL_BYTES", 350_000)
    a_chunk_for_each_width(monkeypatch)
    job = _job(run, tmp_path, 8, dirty=True, rounded=rounded, mixed=True)
    entries, blocks, spooled = _encoded(job)
    assert max(spooled) <= 350_000 and len(spooled) > 2 and max(blocks) <= 2
    of_rows = [entry for entry in entries if entry.scheme is not None]
    assert len({entry.bits for entry in of_rows}) > 4
    assert len(of_rows) < 16 * len(spooled) and max(entry.bytes for entry in of_rows) < 102_000


@pytest.mark.parametrize("skipped_bytes", [0, 1 << 40])
def test_rows_far_apart_are_read_one_by_one_and_are_the_same(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, skipped_bytes: int
) -> None:
    job = _job(run, tmp_path, 8, dirty=True, rounded=True, mixed=True)
    whole, _, _ = _encoded(job)
    empty_spool(PersistJob.open(job).staged)
    monkeypatch.setattr(spool, "_SKIPPED_BYTES", skipped_bytes)
    monkeypatch.setattr(spool, "PIECE_BYTES", 5_000)
    assert _encoded(job)[0] == whole


def test_what_another_release_has_left_is_done_again(run: Run, tmp_path: Path) -> None:
    job = _job(run, tmp_path, 8, dirty=True, rounded=False)
    whole, _, _ = _encoded(job)
    results = sorted(PersistJob.open(job).staged.spool.glob("*.json"))
    assert len(results) == 2
    for result in results:
        left = {"attempt": json.loads(result.read_text())["attempt"], "parts": "of another kind"}
        result.write_text(json.dumps(left))
    again, _, _ = _encoded(job)
    assert again == whole


@contextmanager
def _files_of_at_most(size_bytes: int) -> Iterator[None]:
    """What grows beyond meets the error of a disk that is full, of another number."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("size_bytes", [0, 4096])
def test_a_spool_without_room_is_named_and_the_job_waits(
    run: Run, tmp_path: Path, size_bytes: int
) -> None:
    job = _job(run, tmp_path, 8, dirty=False, rounded=False)
    spool = PersistJob.open(job).staged.spool
    with (
        _files_of_at_most(size_bytes),
        pytest.raises(StagingFull, match=rf"{spool}.*room for.*RECPOINT_STAGING"),
    ):
        persist_job(job, store=run.store)
    outcome = persist_job(job, store=run.store)
    assert outcome.result == "committed", outcome.error


def test_the_answer_has_the_room_of_what_is_encoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a staging area that is full it is what frees the slot."""
    run = new_run(tmp_path / "run")
    run.claim(None)
    job = _job(run, tmp_path, 8, dirty=False, rounded=False)
    _encoded(job)
    spool = StagedRun(job.parent.parent).spool_directory / job.stem
    there: dict[str, bool] = {}
    monkeypatch.setattr(durable, "step", lambda name: there.update({name: spool.exists()}))
    assert persist_job(job).result == "committed"
    assert not there[f"rename {job.name}"] and any(there.values())


def test_chunks_are_uploaded_where_nothing_more_can_be_noted_in_the_spool(tmp_path: Path) -> None:
    store = open_store(f"memory://{tmp_path.name}")  # a directory would be short of room, too
    run = Run.create(store)
    run.claim(None)
    job = _job(run, tmp_path, 8, dirty=False, rounded=False)
    _encoded(job)
    opened = PersistJob.open(job, store=store)
    with _files_of_at_most(0):
        sizes = [opened.upload(group) for group in opened.groups]
    assert sum(sizes) > 0
    staged = opened.staged
    for group in opened.groups:
        # All but one, and of that half a line, which there was room for.
        *others, largest = sorted(encoded_entries(staged, group), key=lambda entry: entry.bytes)
        lines = [f"{staged.job.attempt} {entry.key}\n" for entry in others]
        lines.append(f"{staged.job.attempt} {largest.key[:20]}")
        result_path(staged, group.index, "uploaded").write_text("".join(lines))
    for _ in range(2):  # as after a failure elsewhere: all that is needed is there once more
        assert [opened.upload(group) for group in opened.groups] == sizes
    assert opened.commit().stored_bytes == sum(sizes)
