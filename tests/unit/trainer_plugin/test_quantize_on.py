"""Rows quantized where their table lives: what is staged, and that the same is stored."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad

from recpoint import Checkpointer, Consecutive, Options, Precision
from recpoint.catalog.restore.chunks import StoreChunks, read_chunk
from recpoint.catalog.restore.restore import MemoryTarget, restore
from recpoint.catalog.run.run import Run
from recpoint.catalog.staging import job_files
from recpoint.catalog.staging.area import StagedRun
from recpoint.catalog.staging.slot import Slot
from recpoint.catalog.store.store import open_store
from recpoint.errors import StagingError
from recpoint.format.job import Job
from recpoint.format.manifest import Manifest
from recpoint.kernels.bit_packing import BITS
from tests.training_builder import Place, checkpointer, simple_training, train, until


def committed(ckpt: Checkpointer, n: int) -> Callable[[], bool]:
    return lambda: ckpt.stats.committed == n


def staged_jobs(ckpt: Checkpointer, n: int) -> Callable[[], bool]:
    return lambda: ckpt.stats.staged == n


def one_by_one(
    place: Place, checkpoints: int, /, **settings: Any
) -> tuple[list[Job], list[Manifest]]:
    """Train, and persist each checkpoint before the next is cut."""
    training = simple_training()
    jobs = []
    with checkpointer(training, place, on_error="raise", **settings) as ckpt:
        ckpt.restore()
        for number in range(1, checkpoints + 1):
            train(training, ckpt, 2)
            until(staged_jobs(ckpt, number))
            (path,) = StagedRun(place.run_directory).staged_jobs()
            jobs.append(job_files.read_job(path))
            assert place.persist_all() == 1
            until(committed(ckpt, number))
    run = Run.open(open_store(place.run))
    return jobs, [run.manifest(job.step, job.generation) for job in jobs]


def bodies(place: Place, manifest: Manifest) -> list[tuple[Any, ...]]:
    """Everything in a checkpoint's row chunks but names of run and attempt."""
    store = Run.open(open_store(place.run)).store
    found = []
    for entry in manifest.chunks:
        if entry.content == "rows":
            chunk = read_chunk(StoreChunks(store), manifest, entry)
            arrays = {
                name: (section.dtype, section.shape, bytes(section.data))
                for name, section in chunk.sections.items()
            }
            name = entry.key.rsplit("/", 1)[1]
            found.append((name, entry.bits, entry.scheme, chunk.meta.row_set, arrays))
    return found


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("quantizer", ["asymmetric", "symmetric"])
def test_the_same_is_stored_whoever_quantizes(tmp_path: Path, bits: int, quantizer: str) -> None:
    stored = []
    for where in ("host", "device"):
        place = Place(str(tmp_path / where), tmp_path / f"{where}-staging")
        jobs, manifests = one_by_one(
            place, 3, bits=bits, quantizer=quantizer, place=where, policy=Consecutive(full_every=2)
        )
        assert [job.kind for job in jobs] == ["full", "increment", "full"]
        for job in jobs:
            assert [table.codes for table in job.tables] == [where == "device"] * 2
            assert bool(job.quantized_by) == (where == "device")
        stored.append([(bodies(place, m), m.quantizers, m.quantized_by) for m in manifests])
    assert stored[0] == stored[1]


@pytest.mark.parametrize(("bits", "quantizer"), [(2, "auto"), (4, "auto"), (4, "greedy")])
def test_the_same_is_stored_also_where_the_method_is_chosen(
    tmp_path: Path, bits: int, quantizer: str
) -> None:
    stored = []
    for where in ("host", "device"):
        place = Place(str(tmp_path / where), tmp_path / f"{where}-staging")
        jobs, manifests = one_by_one(
            place, 6, bits=bits, quantizer=quantizer, place=where, policy=Consecutive(full_every=5)
        )
        assert any(table.codes for job in jobs for table in job.tables) == (where == "device")
        stored.append([(bodies(place, m), m.quantizers) for m in manifests])
    assert stored[0] == stored[1]


@pytest.mark.parametrize("where", ["host", "device"])
def test_a_method_is_kept_until_as_much_again_was_trained(place: Place, where: str) -> None:
    jobs, manifests = one_by_one(place, 9, bits=4, place=where, policy=Consecutive(full_every=6))
    assert [job.step for job in jobs] == list(range(2, 20, 2))
    assert [job.kind for job in jobs] == ["full"] + ["increment"] * 5 + ["full"] + ["increment"] * 2
    # Chosen after 2, 4 and 8 batches of the first chain, and for the second one's full.
    for index, of in enumerate((0, 1, 1, 3, 3, 3, 6, 6, 6)):
        anew = of == index
        for table, chosen in zip(jobs[index].tables, manifests[of].quantizers, strict=True):
            assert table.codes == (where == "device" and not anew)
            assert table.method == (None if anew else chosen.chosen)
            assert chosen.seed == jobs[of].step
        assert manifests[index].quantizers == manifests[of].quantizers


def test_after_a_restart_values_are_staged_until_the_agent_has_chosen(place: Place) -> None:
    one_by_one(place, 1, bits=4, place="device")
    jobs, manifests = one_by_one(place, 3, bits=4, place="device")
    assert [(job.kind, job.step) for job in jobs] == [("increment", step) for step in (4, 6, 8)]
    assert [[table.codes for table in job.tables] for job in jobs] == [
        [False, False],
        [True, True],
        [False, False],
    ]
    assert manifests[0].quantizers == manifests[1].quantizers != manifests[2].quantizers


@pytest.mark.parametrize("where", ["auto", "host"])
def test_tables_on_the_cpu_are_left_to_the_agent(place: Place, where: str) -> None:
    jobs, _ = one_by_one(place, 2, bits=4, quantizer="asymmetric", place=where)
    assert not any(table.codes for job in jobs for table in job.tables)
    assert {job.quantized_by for job in jobs} == {""}


class Odd(nn.Module):
    """Tables that no codes are staged of, but of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.usual = nn.Embedding(60, 16, sparse=True)
        self.narrow = nn.Embedding(60, 2, sparse=True)  # codes would take more room
        self.float64 = nn.Embedding(60, 16, sparse=True, dtype=torch.float64)
        self.broken = nn.Embedding(60, 16, sparse=True)
        with torch.no_grad():
            self.broken.weight.fill_(float("nan"))
            self.usual.weight[3, 4] = float("inf")
            self.usual.weight[5:9] = float("nan")
            self.usual.weight[20] *= 1e6
            self.usual.weight[21] = 0.1


def test_what_cannot_be_quantized_or_not_with_profit_is_staged_as_it_is(place: Place) -> None:
    model = Odd()
    ckpt = Checkpointer(
        model,
        [SGD(model.parameters(), lr=0.1)],
        run=place.run,
        staging=place.staging,
        interval_batches=1,
        bits=Precision(bits=4, small_table_values=0, quantizer="asymmetric", place="device"),
        options=Options(handle_sigterm=False, on_error="raise"),
    )
    ckpt.restore()
    for ids in (torch.arange(0), torch.tensor([1, 3, 6, 20, 21, 22])):
        for name, weight in model.named_parameters():
            with torch.no_grad():
                weight[ids] *= 0.5
            ckpt.mark(name.removesuffix(".weight"), ids)
        ckpt.step()
        until(lambda: len(StagedRun(place.run_directory).staged_jobs()) == 1)
        job = job_files.read_job(StagedRun(place.run_directory).staged_jobs()[0])
        assert [table.codes for table in job.tables] == [True, False, False, False]
        assert job.segment("t0.exact_at").shape == ((5,) if job.kind == "full" else (2,))
        assert place.persist_all() == 1
        until(committed(ckpt, ckpt.batches_done))
        target = MemoryTarget()
        restore(Run.open(open_store(place.run)), target)
        found, kept = target.tables["usual"].values, model.usual.weight.detach()
        exact = ~kept.isfinite().all(dim=1)
        assert torch.equal(found[exact].view(torch.int32), kept[exact].view(torch.int32))
        width = kept.amax(1, keepdim=True) - kept.amin(1, keepdim=True)
        assert bool(((found - kept).abs() <= 0.04 * width + 1e-5)[~exact].all())
        broken = target.tables["broken"].values
        assert torch.equal(broken.view(torch.int32), model.broken.weight.detach().view(torch.int32))
    ckpt.close(final=False)


def test_row_states_go_with_the_codes(tmp_path: Path) -> None:
    """Of a table with a state for each value, from sparse gradients."""
    restored = []
    for where in ("host", "device"):
        place = Place(str(tmp_path / where), tmp_path / f"{where}-staging")
        training = simple_training()
        training.model.users.sparse = True
        training.optimizers = [Adagrad(training.model.parameters(), lr=0.1)]
        settings: dict[str, Any] = {"bits": 8, "place": where, "interval_batches": 1}
        with place.agent(), checkpointer(training, place, **settings) as ckpt:
            ckpt.restore()
            for number in range(1, 4):
                train(training, ckpt, 1)
                until(committed(ckpt, number))
        target = MemoryTarget()
        restore(Run.open(open_store(place.run)), target)
        for name, module in (("users", training.model.users), ("items", training.model.items)):
            (state,) = target.tables[name].row_states
            assert state is not None
            assert torch.equal(state, training.optimizers[0].state[module.weight]["sum"])
        restored.append([target.tables[name].values for name in ("users", "items")])
    for host, device in zip(*restored, strict=True):
        assert torch.equal(host, device)


def test_a_cut_that_fails_after_quantizing_loses_no_row(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = simple_training()
    with (
        place.agent(),
        checkpointer(training, place, interval_batches=1, bits=8, place="device") as ckpt,
    ):
        ckpt.restore()
        train(training, ckpt, 1)
        until(lambda: ckpt.stats.committed == 1)

        def full(slot: Slot, size_bytes: int) -> None:
            raise StagingError("slot", found="no room", expected="room", next_step="for the test")

        with monkeypatch.context() as patched:
            patched.setattr(Slot, "reserve", full)
            train(training, ckpt, 1)
            assert ckpt.stats.failed == 1
        train(training, ckpt, 1)
        until(lambda: ckpt.stats.committed == 2)
    target = MemoryTarget()
    restore(Run.open(open_store(place.run)), target)
    weight = training.model.users.weight.detach()
    width = weight.amax(1, keepdim=True) - weight.amin(1, keepdim=True)
    error = (target.tables["users"].values - weight).abs()
    assert bool((error <= 0.51 * width / 255 + 1e-6).all())
