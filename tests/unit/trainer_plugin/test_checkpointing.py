"""A training process and its checkpoints: when, which kind, and what becomes of them."""

from __future__ import annotations

import logging
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import nn
from torch.optim import Adagrad, Adam

from recpoint import Checkpointer, Consecutive
from recpoint.catalog.restore.restore import MemoryTarget, restore
from recpoint.catalog.run.run import Run
from recpoint.catalog.staging.agent_lock import AgentLock
from recpoint.catalog.staging.area import StagedRun
from recpoint.catalog.store.store import open_store
from recpoint.embeddings.tables.optimizers import FullyDirtyTables
from recpoint.errors import SettingsError, StagingError
from recpoint.format.naming import END_KEY, GENERATION_KEY
from recpoint.trainer_plugin.pipeline import handoff
from recpoint.trainer_plugin.snapshot.area_room import SmallStagingArea
from recpoint.trainer_plugin.snapshot.host_memory import is_in_memory
from recpoint.trainer_plugin.snapshot.staging import StagingArea
from tests.training_builder import (
    ROWS,
    Place,
    checkpointer,
    reject,
    simple_training,
    train,
    until,
)


def kinds(place: Place) -> list[tuple[int, str, int]]:
    """(step, kind, dirty rows) of the live line, oldest first."""
    run = Run.open(open_store(place.run))
    manifests = [run.manifest(*name) for name in reversed(run.live_line())]
    return [(manifest.step, manifest.kind, manifest.dirty_rows) for manifest in manifests]


def committed(ckpt: Checkpointer, n: int) -> Callable[[], bool]:
    return lambda: ckpt.stats.committed == n


def staged_jobs(ckpt: Checkpointer, n: int) -> Callable[[], bool]:
    return lambda: ckpt.stats.staged == n


def test_interval_kinds_and_what_the_reader_is_told(place: Place) -> None:
    training = simple_training()
    with (
        place.agent(),
        checkpointer(training, place, interval_batches=3, policy=Consecutive(full_every=2)) as ckpt,
    ):
        ckpt.restore()
        for batch in range(1, 11):
            train(training, ckpt, 1)
            until(committed(ckpt, batch // 3))
    assert [(step, kind) for step, kind, _ in kinds(place)] == [
        (3, "full"),
        (6, "increment"),
        (9, "full"),
        (10, "increment"),  # the end of training
    ]
    assert training.reader.told == [3, 3, 3, 3]
    stats = ckpt.stats
    assert (stats.staged, stats.committed, stats.skipped, stats.failed) == (4, 4, 0, 0)
    assert stats.lag_batches == 0 and stats.last_error is None and len(stats.stalls_ms) == 4


def test_an_increment_holds_the_rows_that_were_looked_up(place: Place) -> None:
    training = simple_training()
    with place.agent(), checkpointer(training, place, interval_batches=1) as ckpt:
        ckpt.restore()
        train(training, ckpt, 1)
        until(lambda: ckpt.stats.committed == 1)
        users, items, target = next(training.reader)
        training.optimizers[0].zero_grad()
        training.model(users, items).sum().backward()
        training.optimizers[0].step()
        training.model.eval()
        training.model(torch.arange(8), items)
        training.model.train()
        ckpt.mark("users", torch.tensor([0]))
        ckpt.step()
        until(lambda: ckpt.stats.committed == 2)
    expected = len({0, *users.tolist()}) + len(set(items.flatten().tolist()))
    assert kinds(place)[1] == (2, "increment", expected)


def test_a_state_dict_that_asks_for_a_checkpoint_gets_none(place: Place) -> None:
    """It would be cut into the slot that is being written."""
    training = simple_training()
    ckpt = checkpointer(training, place, interval_batches=1)
    ckpt.restore()
    state, cut = training.reader.state_dict, [False]

    def after_asking() -> dict[str, Any]:
        if not any(cut):  # else without end
            cut.append(ckpt.checkpoint())
        return state()

    training.reader.state_dict = after_asking  # type: ignore[method-assign]
    with place.agent():
        for _ in range(2):
            train(training, ckpt, 1)
            until(lambda: ckpt.stats.committed == ckpt.batches_done)
        ckpt.close(final=False)
    assert not any(cut) and len(cut) == 3
    assert ckpt.stats.failed == 0


def test_a_new_row_state_needs_a_full(place: Place) -> None:
    training = simple_training()
    training.optimizers[0] = torch.optim.Adagrad(training.model.parameters(), lr=0.1)
    training.optimizers[0].state.clear()  # as an optimizer that creates it at its first step
    with place.agent(), checkpointer(training, place) as ckpt:
        ckpt.restore()
        assert ckpt.checkpoint()
        until(lambda: ckpt.stats.committed == 1)
        fresh = torch.optim.Adagrad(training.model.parameters(), lr=0.1)
        training.optimizers[0].state.update(fresh.state)
        train(training, ckpt, 2)
        until(lambda: ckpt.stats.committed == 2)
        train(training, ckpt, 2)
    assert [kind for _, kind, _ in kinds(place)] == ["full", "full", "increment"]


def test_row_states_that_were_replaced_are_stored(place: Place) -> None:
    training = simple_training()
    (adagrad,) = training.optimizers = [Adagrad(training.model.parameters(), lr=0.1)]
    weights = [training.model.users.weight, training.model.items.weight]
    with place.agent(), checkpointer(training, place) as ckpt:
        ckpt.restore()
        train(training, ckpt, 2)
        until(lambda: ckpt.stats.committed == 1)
        for weight in weights:
            adagrad.state[weight]["sum"] = adagrad.state[weight]["sum"] + 1
        train(training, ckpt, 2)
        until(lambda: ckpt.stats.committed == 2)
    assert [kind for _, kind, _ in kinds(place)] == ["full", "increment"]
    other = simple_training(2)
    (restored,) = other.optimizers = [Adagrad(other.model.parameters(), lr=0.1)]
    with place.agent(), checkpointer(other, place) as ckpt:
        ckpt.restore()
    for ours, theirs in zip(
        weights, [other.model.users.weight, other.model.items.weight], strict=True
    ):
        assert torch.equal(restored.state[theirs]["sum"], adagrad.state[ours]["sum"])


def test_without_an_agent_checkpoints_are_skipped_and_no_row_is_lost(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    training = simple_training()
    ckpt = checkpointer(training, place, interval_batches=1, close_seconds=0.0)
    ckpt.restore()
    train(training, ckpt, 1)
    until(lambda: ckpt.stats.staged == 1)
    train(training, ckpt, 5)
    assert (ckpt.stats.staged, ckpt.stats.skipped) == (1, 5)
    assert ckpt.stats.lag_batches == 6
    assert place.persist_all() == 1
    until(lambda: ckpt.stats.committed == 1)
    train(training, ckpt, 1)
    until(lambda: ckpt.stats.staged == 2)
    ckpt.close()
    assert "recpoint agent" in caplog.text
    assert place.persist_all() == 1
    target = MemoryTarget()
    restore(Run.open(open_store(place.run)), target)
    assert torch.equal(target.tables["users"].values, training.model.users.weight.detach())
    assert torch.equal(target.tables["items"].values, training.model.items.weight.detach())


def test_the_final_checkpoint_waits_for_the_slot(place: Place) -> None:
    training = simple_training()
    ckpt = checkpointer(training, place, interval_batches=2)
    ckpt.restore()
    train(training, ckpt, 3)
    with place.agent():
        ckpt.close()
    assert [step for step, _, _ in kinds(place)] == [2, 3]


def test_several_jobs_may_wait(place: Place) -> None:
    training = simple_training()
    ckpt = checkpointer(training, place, interval_batches=1, jobs=3)
    ckpt.restore()
    train(training, ckpt, 4)
    until(lambda: ckpt.stats.staged == 3)
    assert ckpt.stats.skipped == 1
    assert len(list(StagedRun(place.run_directory).slots_directory.iterdir())) == 3
    with place.agent():
        ckpt.close()
    assert [(step, kind) for step, kind, _ in kinds(place)] == [
        (1, "full"),
        (2, "increment"),
        (3, "increment"),
        (4, "increment"),
    ]


@pytest.mark.parametrize(
    ("error_type", "then"),
    [("MissingLink", "full"), ("DigestMismatch", "full"), ("StagingError", "increment")],
)
def test_a_rejected_job_gives_its_rows_back(place: Place, error_type: str, then: str) -> None:
    training = simple_training()
    ckpt = checkpointer(training, place, interval_batches=1)
    ckpt.restore()
    train(training, ckpt, 1)
    until(lambda: ckpt.stats.staged == 1)
    place.persist_all()
    until(lambda: ckpt.stats.committed == 1)
    train(training, ckpt, 1)
    until(lambda: ckpt.stats.staged == 2)
    reject(StagedRun(place.run_directory).staged_jobs()[0], error_type)
    until(lambda: ckpt.stats.failed == 1)
    assert error_type in (ckpt.stats.last_error or "")
    train(training, ckpt, 1)
    with place.agent():
        ckpt.close()
    assert [(step, kind) for step, kind, _ in kinds(place)] == [(1, "full"), (3, then)]
    target = MemoryTarget()
    restore(Run.open(open_store(place.run)), target)
    assert torch.equal(target.tables["users"].values, training.model.users.weight.detach())


def test_after_a_stale_writer_nothing_more_is_staged(place: Place) -> None:
    training = simple_training()
    ckpt = checkpointer(training, place, interval_batches=1)
    ckpt.restore()
    Run.open(open_store(place.run)).claim(None)  # another trainer, on another host
    train(training, ckpt, 1)
    until(lambda: ckpt.stats.staged == 1)
    place.persist_all()
    until(lambda: ckpt.stats.failed == 1)
    assert "StaleWriter" in (ckpt.stats.last_error or "")
    train(training, ckpt, 3)
    ckpt.close()
    assert (ckpt.stats.staged, ckpt.stats.skipped) == (1, 4)
    assert kinds(place) == []


def test_on_error_raise_raises_at_the_next_step(place: Place) -> None:
    training = simple_training()
    ckpt = checkpointer(training, place, interval_batches=1, on_error="raise")
    ckpt.restore()
    train(training, ckpt, 1)
    until(lambda: ckpt.stats.staged == 1)
    reject(StagedRun(place.run_directory).staged_jobs()[0], "NoSuchError")
    until(lambda: ckpt.stats.failed == 1)
    training.batch()
    with pytest.raises(Exception, match="rejected by the agent"):
        ckpt.step()
    ckpt.close(final=False)


def test_an_exception_in_training_takes_no_final_checkpoint(place: Place) -> None:
    training = simple_training()
    with pytest.raises(ZeroDivisionError):
        with checkpointer(training, place, interval_batches=10) as ckpt:
            ckpt.restore()
            train(training, ckpt, 3)
            raise ZeroDivisionError
    assert ckpt.stats.staged == 0


def test_one_trainer_per_run_and_staging_area(place: Place) -> None:
    first = checkpointer(simple_training(), place)
    first.restore()
    second = checkpointer(simple_training(), place)
    with pytest.raises(StagingError, match=f"process {os.getpid()}, this one") as refused:
        second.restore()
    # The process itself is not to be stopped.
    assert refused.value.next_step.startswith(
        "call close() of the other Checkpointer in this process first, or"
    )
    first.close(final=False)
    second.restore()
    second.close(final=False)


def test_jobs_of_an_earlier_trainer_are_finished_before_the_restore(place: Place) -> None:
    first = simple_training()
    ckpt = checkpointer(first, place)
    ckpt.restore()
    train(first, ckpt, 2)
    until(lambda: ckpt.stats.staged == 1)
    ckpt.close(final=False)
    second = simple_training(7)
    again = checkpointer(second, place)
    with place.agent(), again:
        report = again.restore()
    assert report is not None and report.restored.step == 2
    assert torch.equal(first.model.users.weight, second.model.users.weight)


def test_jobs_that_nobody_will_finish_do_not_pile_up(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        training = simple_training()
        ckpt = checkpointer(training, place)
        assert ckpt.restore() is None
        train(training, ckpt, 2)
        until(staged_jobs(ckpt, 1))
        ckpt.close(final=False)
    assert "left behind" in caplog.text and "recpoint agent" in caplog.text
    assert len(StagedRun(place.run_directory).staged_jobs()) == 1
    assert len(list(StagedRun(place.run_directory).slots_directory.iterdir())) == 1


@pytest.mark.parametrize("start", [{}, {"fresh": True}, {"step": 2}])
def test_a_lost_number_that_something_staged_is_of_is_not_taken_again(
    start: dict[str, Any], place: Place
) -> None:
    """What was staged would be committed as the next trainer's, on whatever line that is."""
    training = simple_training()
    with place.agent(), checkpointer(training, place) as ckpt:
        ckpt.restore()
        train(training, ckpt, 2)
    training = simple_training()
    ckpt = checkpointer(training, place)
    ckpt.restore()
    train(training, ckpt, 2)
    until(staged_jobs(ckpt, 1))
    ckpt.close(final=False)
    store = open_store(place.run)
    for key in (GENERATION_KEY.of(2), END_KEY.of(2)):  # a killed trainer leaves no end record
        store.delete(key)
    with checkpointer(simple_training(), place) as again:
        again.restore(**start)
        again.close(final=False)
    assert Run.open(store).generation_numbers() == [1, 3]


def test_the_memory_bound_is_stated_before_training(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    training = simple_training()
    ckpt = checkpointer(training, place, jobs=2)
    tables = sum(p.nbytes for p in training.model.parameters())
    assert 2 * tables < ckpt.memory_bound_bytes < 2 * tables + 2 * 40_000
    with caplog.at_level(logging.INFO, logger="recpoint"):
        ckpt.restore()
    assert f"at most {ckpt.memory_bound_bytes} bytes" in caplog.text
    assert ckpt.host_memory_bound_bytes == ckpt.memory_bound_bytes
    assert training.reader.position == 0
    ckpt.close(final=False)


def test_a_staging_area_that_is_too_small_is_told_when_built(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.statvfs

    def nearly_full(path: Path) -> os.statvfs_result:
        return os.statvfs_result((*real(path)[:3], 1, 1, *real(path)[5:]))

    monkeypatch.setattr(os, "statvfs", nearly_full)
    with pytest.warns(SmallStagingArea, match="bytes are free"):
        checkpointer(simple_training(), place)


@pytest.fixture
def place_on_disk(tmp_path: Path) -> Iterator[Place]:
    """A place whose staging area is not in memory, as the tests' directory may be."""
    if is_in_memory(Path("/var/tmp")):
        pytest.skip("/var/tmp is in memory")
    with tempfile.TemporaryDirectory(dir="/var/tmp") as directory:
        yield Place(str(tmp_path / "run"), Path(directory) / "staging")


def test_a_staging_area_that_no_snapshot_fits_is_refused_when_built(
    place_on_disk: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = place_on_disk
    real = os.statvfs

    def tiny(path: Path) -> os.statvfs_result:
        return os.statvfs_result((4096, 4096, 1, 1, 1, *real(path)[5:]))

    monkeypatch.setattr(os, "statvfs", tiny)
    with pytest.raises(SettingsError) as caught:
        checkpointer(simple_training(), place)
    assert caught.value.subject == f"staging area {place.staging}"
    assert caught.value.found == "a file system of 4096 bytes"
    assert "the first snapshot may take" in caught.value.expected
    assert "RECPOINT_STAGING" in caught.value.next_step

    def unlimited(path: Path) -> os.statvfs_result:
        return os.statvfs_result((4096, 4096, 0, 0, 0, *real(path)[5:]))

    monkeypatch.setattr(os, "statvfs", unlimited)
    with pytest.warns(SmallStagingArea):
        checkpointer(simple_training(), place)


def test_seconds(place: Place) -> None:
    training = simple_training()
    with place.agent():
        ckpt = checkpointer(training, place, interval_batches=None, interval_seconds=0.05)
        with ckpt:
            ckpt.restore()

            def three_committed() -> bool:
                train(training, ckpt, 1)
                return ckpt.stats.committed >= 3

            until(three_committed)
    assert all(grant >= 1 for grant in training.reader.told)
    assert len(training.reader.told) >= 3


def test_frozen_tables_are_in_fulls_only(place: Place) -> None:
    training = simple_training()
    training.model.items.weight.requires_grad_(False)
    with place.agent(), checkpointer(training, place, interval_batches=1) as ckpt:
        ckpt.restore()
        for n in (1, 2):
            train(training, ckpt, 1)
            until(committed(ckpt, n))
    run = Run.open(open_store(place.run))
    newest, oldest = (run.manifest(*name) for name in run.live_line())
    assert {chunk.table for chunk in newest.chunks} == {0, None}
    assert {chunk.table for chunk in oldest.chunks} == {0, 1, None}


def test_quantized_tables_keep_their_state_exact(place: Place) -> None:
    training = simple_training()
    with place.agent():
        with checkpointer(training, place, bits=8, tables={"items": "lossless"}) as ckpt:
            ckpt.restore()
            train(training, ckpt, 2)
        second = simple_training(5)
        with checkpointer(second, place) as again:
            again.restore()
    users = training.model.users.weight - second.model.users.weight
    assert 0 < users.abs().max() < 0.05
    assert torch.equal(training.model.items.weight, second.model.items.weight)
    assert torch.equal(training.model.top.weight, second.model.top.weight)


@pytest.mark.parametrize("state", ["lossless", 16])
def test_optimizer_state_is_exact_unless_it_was_asked_otherwise(
    place: Place, state: Literal["lossless", 16]
) -> None:
    training = simple_training()
    training.optimizers = [Adagrad(training.model.parameters(), lr=0.1)]
    with place.agent():
        with checkpointer(training, place, state=state) as ckpt:
            ckpt.restore()
            train(training, ckpt, 2)
        second = simple_training(5)
        second.optimizers = [Adagrad(second.model.parameters(), lr=0.1)]
        with checkpointer(second, place) as again:
            again.restore()
    for table in ("users", "items"):
        before, after = (
            t.optimizers[0].state[t.model.get_parameter(f"{table}.weight")]["sum"]
            for t in (training, second)
        )
        assert (before > 0).any() and torch.equal(before == 0, after == 0)
        assert (after - before).abs().le(2.0**-8 * before).all()
        assert torch.equal(before, after) == (state == "lossless")
    assert torch.equal(training.model.users.weight, second.model.users.weight)
    top = (t.optimizers[0].state[t.model.top.weight]["sum"] for t in (training, second))
    assert torch.equal(*top)


def test_the_quantizer_that_was_set_is_the_one_of_the_checkpoint(place: Place) -> None:
    training = simple_training()
    with place.agent(), checkpointer(training, place, bits=4, quantizer="symmetric") as ckpt:
        ckpt.restore()
        train(training, ckpt, 2)
    run = Run.open(open_store(place.run))
    for name in run.live_line():
        methods = [quantizer.method for quantizer in run.manifest(*name).quantizers]
        assert methods == ["symmetric"] * 2


def test_a_start_without_an_agent_is_told_once(
    place: Place, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handoff, "_AGENT_SECONDS", 0.1)
    monkeypatch.setattr(handoff, "BEAT_SECONDS", 0.01)

    def told() -> list[str]:
        return [text for text in caplog.messages if text.startswith("no agent is running")]

    with AgentLock(place.staging), checkpointer(simple_training(), place) as ckpt:
        ckpt.restore()
        time.sleep(0.5)
    assert told() == []
    ckpt = checkpointer(simple_training(), place)
    ckpt.restore()
    until(lambda: bool(told()))
    time.sleep(0.3)
    ckpt.close(final=False)
    (text,) = told()
    assert text.endswith(f"are not stored. Next: recpoint agent --staging {place.staging}")


def test_an_interval_too_short_for_the_agent_is_told_with_its_figure(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    training = simple_training()
    ckpt = checkpointer(training, place, interval_batches=1)
    ckpt.restore()
    for number in range(8):
        train(training, ckpt, 1)
        until(lambda staged=number + 1: ckpt.stats.staged == staged)  # type: ignore[misc]
        place.persist_all()
        until(lambda stored=number + 1: ckpt.stats.committed == stored)  # type: ignore[misc]
    caplog.clear()
    with AgentLock(place.staging):  # an agent that is slower than the interval
        train(training, ckpt, 9)
    (text,) = (one for one in caplog.messages if "8 in a row not taken" in one)
    assert re.search(r"it takes [\d.]+ m?s for a checkpoint", text)
    assert re.search(r"Next: set a longer interval, of more than [\d.]+ m?s", text)
    ckpt.close(final=False)


def test_due_checkpoints_that_nobody_stores_are_told_at_warning_level(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    def told() -> list[str]:
        return [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]

    training = simple_training()
    ckpt = checkpointer(training, place, interval_batches=1)
    ckpt.restore()
    train(training, ckpt, 10)
    # The first is cut; of the nine after it the 1st, 2nd, 4th and 8th are told.
    assert [text.split(", ")[1].split(" in a row")[0] for text in told()] == ["1", "2", "4", "8"]
    # Without the option the agent would look at another staging area than this one, for ever.
    agent = f"Next: recpoint agent --staging {place.staging}"
    assert all("no agent is running" in text and agent in text for text in told())
    until(lambda: ckpt.stats.staged == 1)
    caplog.clear()
    with AgentLock(place.staging):  # an agent that gets nowhere
        train(training, ckpt, 7)
        assert "the agent has not stored them" in told()[0] and len(told()) == 1
        assert "If this host failed now, 17 batches would be lost" in told()[0]
        assert "If only this process failed, " in told()[0]
        assert "and an agent stored what is staged, 16 would be lost." in told()[0]
    caplog.clear()
    place.persist_all()
    until(lambda: ckpt.stats.committed == 1)  # the answer is heard
    train(training, ckpt, 1)
    stored = "checkpoints are stored again: that of batch 1 is committed, after 16 were not taken"
    assert told() == [stored]
    until(lambda: ckpt.stats.staged == 2)
    place.persist_all()
    until(lambda: ckpt.stats.committed == 2)
    assert told() == [stored]  # the next one is nothing new
    ckpt.close(final=False)


def test_the_warning_of_fully_dirty_tables_names_the_line_of_the_script(place: Place) -> None:
    model = nn.ModuleDict({"users": nn.Embedding(5, 2)})
    with pytest.warns(FullyDirtyTables) as caught:
        Checkpointer(model, Adam(model.parameters()), run=place.run, interval_batches=1)
    assert caught[0].filename == __file__


def test_a_relative_staging_area_stays_where_it_was(
    place: Place, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    training = simple_training()
    ckpt = checkpointer(training, place, interval_batches=1, directory="staging")
    ckpt.restore()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    train(training, ckpt, 1)
    until(staged_jobs(ckpt, 1))
    assert len(StagedRun(place.run_directory).staged_jobs()) == 1
    ckpt.close(final=False)


def test_the_default_staging_area_needs_no_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RECPOINT_STAGING", str(tmp_path / "default"))
    assert StagingArea(tmp_path / "default", "/run").agent_command() == "recpoint agent"
    other = StagingArea(tmp_path / "an other", "/run").agent_command()
    assert other == f"recpoint agent --staging '{tmp_path}/an other'"


def test_a_frozen_table_is_stored_in_fulls_and_when_something_changed_it(place: Place) -> None:
    training = simple_training()
    users = training.model.users.weight.requires_grad_(False)
    with place.agent(), checkpointer(training, place, interval_batches=1, bits=4) as ckpt:
        ckpt.restore()
        for count in range(1, 4):
            if count == 3:
                with torch.no_grad():
                    users[7] += 1.0
            train(training, ckpt, 1)
            until(committed(ckpt, count))
    run = Run.open(open_store(place.run))
    stored = []
    for name in reversed(run.live_line()):
        entries = [e for e in run.manifest(*name).chunks if e.content == "rows" and e.table == 0]
        stored.append(sum(entry.row_count or 0 for entry in entries))
    assert stored == [ROWS, 0, ROWS]
    target = MemoryTarget()
    restore(run, target)
    assert torch.equal(target.tables["users"].values, users)
