"""Samples hold what the tables held at the cut, whether a checkpoint stores it or not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recpoint import Checkpointer, Options
from recpoint.catalog.restore.chunks import StoreChunks, read_chunk
from recpoint.catalog.run.run import Run
from recpoint.catalog.staging import job_files
from recpoint.catalog.staging.area import StagedRun
from recpoint.catalog.staging.job import open_slot
from recpoint.catalog.staging.sample import Sample, Sampler
from recpoint.catalog.staging.slot_reading import read_into
from recpoint.catalog.store.store import open_store
from recpoint.format.chunk import section_tensor
from recpoint.format.manifest import Manifest, RowStateSpec, TableSpec
from recpoint.kernels import row_digest
from tests.training_builder import Place, until

ATTEMPT = "0123456789abcdef" * 2


@pytest.fixture
def place(tmp_path: Any) -> Place:
    return Place(str(tmp_path / "run"), tmp_path / "staging")


def spec(rows: int, dim: int, *, states: int = 0) -> TableSpec:
    row_states = tuple(
        RowStateSpec(name=f"s{i}", dtype="F32", shape=(dim,), optimizer=0) for i in range(states)
    )
    return TableSpec(name=f"{rows}x{dim}", rows=rows, dim=dim, dtype="F32", row_states=row_states)


def drawn(specs: list[TableSpec], attempt: str) -> Sample:
    return Sampler().draw(specs, [range(spec.rows) for spec in specs], attempt)


@pytest.mark.parametrize("rows", [1, 2, 63, 64, 65, 100, 1000, 2**40])
def test_rows_are_drawn_from_everywhere_in_a_table(rows: int) -> None:
    (ids,) = drawn([spec(rows, 4)], ATTEMPT).ids
    assert len(ids) == min(rows, 64)
    assert int(ids[0]) >= 0 and int(ids[-1]) < rows and bool((ids[1:] > ids[:-1]).all())
    edges = torch.cat([torch.tensor([-1]), ids, torch.tensor([rows])])
    assert int(edges.diff().max()) <= 2 * -(-rows // len(ids))


def test_an_attempt_says_which_rows() -> None:
    specs = [spec(10_000, 4), spec(5, 4)]
    one, again = (drawn(specs, ATTEMPT) for _ in range(2))
    other = drawn(specs, "f" * 32)
    assert all(torch.equal(a, b) for a, b in zip(one.ids, again.ids, strict=True))
    assert not torch.equal(one.ids[0], other.ids[0])
    assert other.ids[1].tolist() == list(range(5))


def test_long_rows_and_many_tables_are_sampled_less() -> None:
    assert [len(ids) for ids in drawn([spec(1000, 1 << 20)], ATTEMPT).ids] == [1]
    assert [len(ids) for ids in drawn([spec(1000, 64, states=1)], ATTEMPT).ids] == [32]
    many = drawn([spec(1000, 1024)] * 4096, ATTEMPT)
    assert {len(ids) for ids in many.ids} == {1}
    assert drawn([], ATTEMPT).ids == ()


# --- through a real checkpoint -------------------------------------------------------------------


class Two(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.large = nn.Embedding(5000, 3, sparse=True, dtype=dtype)
        self.small = nn.Embedding(9, 5, sparse=True, dtype=dtype)
        self.never = nn.Embedding(700, 2, sparse=True, dtype=dtype)


def step(model: Two, optimizer: torch.optim.Optimizer, ids: Tensor) -> None:
    optimizer.zero_grad()
    (model.large(ids).float().sum() + model.small(ids % 9).float().sum()).backward()
    optimizer.step()


def sampled(run: Run, manifest: Manifest) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for entry in manifest.chunks:
        if entry.content == "sample":
            sections = read_chunk(StoreChunks(run.store), manifest, entry).sections
            found.update((name, section_tensor(part)) for name, part in sections.items())
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_checkpoint_holds_rows_of_its_own_and_of_others(place: Place, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = Two(dtype)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    ckpt = Checkpointer(
        model,
        optimizer,
        run=place.run,
        staging=place.staging,
        interval_batches=10**6,
        bits=4,
        options=Options(on_error="raise", handle_sigterm=False),
    )
    ckpt.restore()
    tables = (model.large, model.small, model.never)
    for number, ids in enumerate((torch.arange(0, 5000, 3), torch.arange(40, 3000, 7))):
        step(model, optimizer, ids)
        ckpt.step()
        before = [table.weight.detach().clone() for table in tables]
        states = [optimizer.state[table.weight]["sum"].clone() for table in tables]
        assert ckpt.checkpoint()
        if number == 1:
            step(model, optimizer, torch.arange(5000))  # what comes later is not in it
        until(lambda: len(StagedRun(place.run_directory).staged_jobs()) == 1)
        (job_file,) = StagedRun(place.run_directory).staged_jobs()
        job = job_files.read_job(job_file)
        open_slot(job_file, job_files.read_job(job_file)).verify()
        place.persist_all()
        until(lambda: ckpt.stats.committed == ckpt.stats.staged)
        run = Run.open(open_store(place.run))
        manifest = run.manifest(job.step, 1)
        found = sampled(run, manifest)
        for k, (values, state) in enumerate(zip(before, states, strict=True)):
            ids_k = found[f"sample.{k}.ids"]
            assert bool((ids_k[1:] > ids_k[:-1]).all())
            assert torch.equal(found[f"sample.{k}.values"], values[ids_k])
            assert torch.equal(found[f"sample.{k}.state.0"], state[ids_k])
            stored = job.tables[k].row_count
            assert (f"sample.{k}.digests" in found) == (stored > 0)
        if job.kind == "increment":
            break
        everything = [int(v) % 2**64 for v in found["sample.0.digests"]]
        assert everything == [
            row_digest.digest(before[0][:, :0].contiguous(), 0),
            row_digest.digest(before[0], 0),
            row_digest.digest(states[0], 0),
        ]
        assert len(found["sample.0.ids"]) == 64 and len(found["sample.1.ids"]) == 9
    ids_0 = found["sample.0.ids"]
    changed = torch.arange(40, 3000, 7)
    assert torch.isin(ids_0, changed).sum() >= 64 and not torch.isin(ids_0, changed).all()
    own = [int(v) % 2**64 for v in found["sample.0.digests"]]
    assert own[1] == row_digest.digest(before[0][changed], changed)
    assert "sample.2.digests" not in found
    ckpt.close(final=False)


def test_a_slot_has_room_for_every_sample(place: Place) -> None:
    model = Two(torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ckpt = Checkpointer(
        model,
        optimizer,
        run=place.run,
        staging=place.staging,
        interval_batches=10**6,
        options=Options(handle_sigterm=False),
    )
    ckpt.restore()
    bound = ckpt.memory_bound_bytes
    ckpt.checkpoint()
    until(lambda: len(StagedRun(place.run_directory).staged_jobs()) == 1)
    (job_file,) = StagedRun(place.run_directory).staged_jobs()
    job = job_files.read_job(job_file)
    assert job.slot_bytes <= bound
    opened = open_slot(job_file, job_files.read_job(job_file))
    extent = opened.extent("sample.1.ids")
    data = bytearray(extent.length)
    read_into(memoryview(data), extent)
    assert torch.frombuffer(data, dtype=torch.int64).tolist() == list(range(9))
    ckpt.close(final=False)
