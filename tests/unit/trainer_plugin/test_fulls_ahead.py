"""Fulls whose rows are copied before the cut, without knowing the coming batches."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import recpoint
from recpoint import Checkpointer, Consecutive, Options, Precision
from recpoint.errors import SettingsError
from recpoint.trainer_plugin.pipeline import lead
from recpoint.trainer_plugin.policy import ChainLink
from recpoint.trainer_plugin.snapshot.window import Window
from tests.polling import until
from tests.running_parts import pipeline_of
from tests.unit.trainer_plugin.test_copied_ahead import (
    ITEMS,
    USERS,
    Job,
    Reader,
    _compare,
    _train,
)
from tests.unit.trainer_plugin.test_windows import window_of

WINDOW: dict[str, Any] = {"copy_fulls_ahead": 12}
_ALWAYS_FULL = Consecutive(full_every=1)


@pytest.mark.parametrize("policy", ["intermittent", "one_shot"])
@pytest.mark.parametrize("optimizer", ["sgd", "dense adagrad", "sparse_adam"])
def test_staged_bytes_equal_those_of_a_plain_cut(
    tmp_path: Path, policy: str, optimizer: str
) -> None:
    chosen: dict[str, Any] = {
        "policy": policy,
        "optimizer": optimizer.removeprefix("dense "),
        "sparse": not optimizer.startswith("dense "),
    }
    plain = Job(tmp_path / "plain", **chosen)
    ahead = Job(tmp_path / "ahead", **chosen, **WINDOW)
    kinds = []
    for done in range(1, 81):
        plain.batch()
        ahead.batch()
        if done % 20 == 0:
            staged, copied = ahead.staged_job(), ahead.copied
            kinds.append(staged.kind)
            if staged.kind == "full":
                assert copied.why_plain is None, done
                # All rows were copied before the stall; in it only those of twelve batches.
                assert copied.rows_before > USERS
                assert 0 < copied.rows_in_stall < USERS // 4
                assert staged.copied_ahead is not None
            else:
                assert copied.why_plain.startswith("it was to be an increment, and without")
                assert copied.rows_before == 0 and staged.copied_ahead is None
            _compare(plain, ahead)
    assert kinds[0] == "full" and "increment" in kinds
    plain.checkpoints.close(final=False)
    ahead.checkpoints.close(final=False)


def test_every_full_of_an_interval_has_a_window(tmp_path: Path) -> None:
    plain = Job(tmp_path / "plain", policy=_ALWAYS_FULL)
    ahead = Job(tmp_path / "ahead", policy=_ALWAYS_FULL, **WINDOW)
    assert [copied.why_plain for copied in _train(plain, ahead, 60)] == [None] * 3


def _waits_for_rows(window: Window) -> bool:
    """Whether the thread of the window has copied all that was handed over."""
    copier = window._copier
    if copier is None:
        return False
    return copier.copied()[0] == window._placed_rows + window._asked_rows


def test_rows_that_change_are_copied_again_before_the_stall(tmp_path: Path) -> None:
    plain = Job(tmp_path / "plain", policy=_ALWAYS_FULL)
    ahead = Job(tmp_path / "ahead", policy=_ALWAYS_FULL, **WINDOW)
    sizes: list[int] = []
    while plain.done < 20:
        plain.batch()
        ahead.batch()
        if 10 < ahead.done < 20:  # a window of 12 batches is open: its thread finishes each round
            window = window_of(ahead)
            until(partial(_waits_for_rows, window))
            sizes.append(window.size_bytes - 8 * window._asked_rows)  # ids of rows copied again
    assert len(set(sizes)) == 1
    users, items, _ = next(iter(Reader()))
    assert 0 < ahead.copied.rows_in_stall <= users.numel() + items.numel()
    assert ahead.copied.rows_before > USERS + ITEMS
    _compare(plain, ahead)
    for job in (plain, ahead):
        job.checkpoints.close(final=False)


@pytest.mark.parametrize("accumulate", [1, 4])
def test_changes_that_only_marks_know_are_in_the_full(tmp_path: Path, accumulate: int) -> None:
    jobs = [
        Job(tmp_path / name, policy=_ALWAYS_FULL, accumulate=accumulate, **settings)
        for name, settings in (("plain", {}), ("ahead", WINDOW))
    ]
    changed_ids = torch.arange(USERS - 300, USERS, 7)
    for done in range(1, 41):
        for job in jobs:
            job.batch()
            if done == 15:  # the window is open, and these rows may be copied by now
                with torch.no_grad():
                    job.model.users.weight[changed_ids] += 1
                job.checkpoints.mark("users", changed_ids)
            if done == 35:
                job.checkpoints.delete_rows("items", torch.arange(0, 700, 50))
        if done % 20 == 0:
            assert jobs[1].copied.why_plain is None
            _compare(*jobs)
    for job in jobs:
        job.checkpoints.close(final=False)


def test_a_window_that_cannot_hold_makes_the_cut_plain(tmp_path: Path) -> None:
    jobs = [
        Job(tmp_path / name, policy=_ALWAYS_FULL, **settings)
        for name, settings in (("plain", {}), ("ahead", WINDOW))
    ]
    reasons = []
    for done in range(1, 61):
        for job in jobs:
            job.batch()
            if done == 15:  # torch counts the change, and nobody says which rows it is of
                with torch.no_grad():
                    job.model.items.weight.mul_(0.9)
            if done == 35:
                job.model.users.weight = nn.Parameter(job.model.users.weight.detach().clone())
                job.optimizers[0].param_groups[0]["params"][0] = job.model.users.weight
        if done % 20 == 0:
            reasons.append(jobs[1].copied.why_plain)
            _compare(*jobs)
    assert "every row of table 'items' became dirty" in reasons[0]
    assert reasons[1] is not None and reasons[2] is None
    for job in jobs:
        job.checkpoints.close(final=False)


@pytest.mark.parametrize("moved", ["weight", "row state"])
def test_memory_that_moves_in_a_window_makes_the_cut_plain(tmp_path: Path, moved: str) -> None:
    """A tensor that is handed to another process for the first time moves, and keeps its name."""
    jobs = [
        Job(tmp_path / name, policy=_ALWAYS_FULL, optimizer="adagrad", **settings)
        for name, settings in (("plain", {"copy_fulls_ahead": 0}), ("ahead", WINDOW))
    ]
    while jobs[0].done < 20:
        for job in jobs:
            job.batch()
            if job.done == 15:
                weight = job.model.users.weight
                tensor = weight if moved == "weight" else job.optimizers[0].state[weight]["sum"]
                tensor.share_memory_()
    assert jobs[1].copied.why_plain == "table 'users' lies in other memory"
    _compare(*jobs)
    for job in jobs:
        job.checkpoints.close(final=False)


def test_a_cut_that_comes_early_or_unannounced(tmp_path: Path) -> None:
    jobs = [
        Job(tmp_path / name, policy=_ALWAYS_FULL, **settings)
        for name, settings in (("plain", {}), ("ahead", WINDOW))
    ]
    reasons = []
    for due in (13, 17, 37):  # early in a window, without one, and in time
        while jobs[0].done < due:
            for job in jobs:
                job.batch()
        if due != 37:
            assert all(job.checkpoints.checkpoint() for job in jobs)
        reasons.append(jobs[1].copied.why_plain)
        _compare(*jobs)
    assert reasons == [None, "it was not known before that it would be taken now", None]
    for job in jobs:
        job.checkpoints.close(final=False)


def test_the_rows_of_a_void_window_are_in_the_next_checkpoint(tmp_path: Path) -> None:
    """Marks that were set aside return when training ends within a window."""
    ahead = Job(tmp_path / "ahead", **WINDOW)
    while ahead.done < 35:
        ahead.batch()
        if ahead.done == 20:
            assert ahead.staged_job().kind == "full"
            ahead.persist()
    values = {name: tensor.clone() for name, tensor in ahead.model.state_dict().items()}
    ahead.checkpoints.close()  # takes the last checkpoint, 15 batches after the full
    ahead.place.persist_all()
    restored = Job(tmp_path / "ahead", **WINDOW)
    assert restored.checkpoints.batches_done == 35
    for name, tensor in restored.model.state_dict().items():
        assert torch.equal(tensor, values[name]), name
    restored.checkpoints.close(final=False)


def test_where_rows_cannot_be_copied_the_setting_is_refused(tmp_path: Path) -> None:
    model = nn.Embedding(9, 2, sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    chosen: dict[str, Any] = {"run": str(tmp_path), "interval_batches": 2}
    with pytest.raises(SettingsError, match=r"Options\(copy_fulls_ahead=3\): found Precision"):
        Checkpointer(
            model,
            optimizer,
            options=Options(copy_fulls_ahead=3),
            bits=Precision(bits=8, place="device"),
            **chosen,
        )
    with pytest.raises(SettingsError, match=r"Options.copy_fulls_ahead"):
        Options(copy_fulls_ahead=-1)
    cached = recpoint.embeddings.cached(
        nn.Sequential(nn.Embedding(9, 2, sparse=True)), recpoint.embeddings.local(), 5
    )
    with pytest.raises(SettingsError, match="found tables in a cache"):
        Checkpointer(
            cached,
            torch.optim.SGD(cached.parameters(), lr=0.1),
            options=Options(copy_fulls_ahead=3),
            **chosen,
        )


def test_a_window_that_opened_too_late_makes_the_cut_plain(tmp_path: Path) -> None:
    """The rest of a full that was hardly copied takes longer than a plain cut."""
    jobs = [
        Job(tmp_path / name, policy=_ALWAYS_FULL, **settings)
        for name, settings in (("plain", {}), ("ahead", {**WINDOW, "copy_share": 1e-6}))
    ]
    while jobs[0].done < 20:
        for job in jobs:
            job.batch()
    assert jobs[1].copied.why_plain == "too few rows were copied before: open its window earlier"
    _compare(*jobs)
    for job in jobs:
        job.checkpoints.close(final=False)


def copied_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have each full after the first copied ahead, however short its stall."""
    monkeypatch.setattr(lead, "_LONG_STALL_SECONDS", 0.0)
    monkeypatch.setattr(lead, "_MARGIN", 1e6)


def wait_for_copy(job: Job) -> None:
    """Wait until the open window, if there is one, has copied all rows."""
    ahead = pipeline_of(job.checkpoints).ahead
    assert ahead is not None
    window = ahead.window
    if window is not None and window.reason is None:
        assert isinstance(window, Window)
        until(lambda: window._copier is not None)
        copier = window._copier
        assert copier is not None
        until(lambda: copier.copied()[0] >= USERS + ITEMS)


def test_by_default_fulls_are_copied_ahead_after_a_long_stall(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied_windows(monkeypatch)
    settings: list[dict[str, Any]] = [{"copy_fulls_ahead": False}, {}]
    plain, ahead = (
        Job(tmp_path / str(number), policy=Consecutive(full_every=2), **chosen)
        for number, chosen in enumerate(settings)
    )
    reasons = []
    for _ in range(60):
        plain.batch()
        ahead.batch()
        wait_for_copy(ahead)
        if ahead.done % 20 == 0:
            reasons.append(ahead.copied.why_plain)
            _compare(plain, ahead)
    assert plain.copied is None
    assert "was measured yet" in reasons[0]
    assert "it was to be an increment" in reasons[1]
    assert reasons[2] is None
    plain.checkpoints.close(final=False)
    ahead.checkpoints.close(final=False)


@pytest.mark.parametrize("by_default", [True, False])
def test_a_change_that_nothing_marked_makes_the_cut_plain(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    by_default: bool,
) -> None:
    copied_windows(monkeypatch)
    jobs = [
        Job(tmp_path / name, policy=_ALWAYS_FULL, **settings)
        for name, settings in (
            ("plain", {"copy_fulls_ahead": 0}),
            ("ahead", {} if by_default else WINDOW),
        )
    ]
    reasons = []
    while jobs[0].done < 60:
        for job in jobs:
            job.batch()
        wait_for_copy(jobs[1])
        if jobs[0].done == 35:
            for job in jobs:  # torch does not count this
                job.model.users.weight.data.mul_(0.5)
        if jobs[0].done % 20 == 0:
            reasons.append(jobs[1].copied.why_plain)
            _compare(*jobs)
    assert reasons[1] == "rows that were copied before had changed, and nothing marked them"
    found_rows = jobs[1].checkpoints.stats.unmarked_rows
    assert found_rows > 1_000
    (text,) = [text for text in caplog.messages if "that nothing had marked" in text]
    assert text.startswith(f"table 'users': {found_rows} of ") and "copied for this full" in text
    assert "(values; rows " in text and "mark_all()" in text
    if by_default:
        assert "nothing marked them" in reasons[2]  # and so on, for good
    else:
        assert reasons[2] is None
    for job in jobs:
        job.checkpoints.close(final=False)


def test_a_window_makes_no_checkpoint_a_full(tmp_path: Path) -> None:
    """A policy may know more at the cut than when the window opened."""
    job = Job(tmp_path, policy=_ALWAYS_FULL, **WINDOW)
    while job.done < 15:
        job.batch()
    ahead = pipeline_of(job.checkpoints).ahead
    assert ahead is not None and ahead.window is not None
    increment = ChainLink(kind="increment", base=None, parent=None, chain_length=1)
    assert ahead.link_at_cut(increment, ()) is increment
    assert ahead.window.reason == "its policy chose an increment after all"
    job.checkpoints.close(final=False)


def test_with_a_lookahead_it_says_only_whether_fulls_are_copied_ahead(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"ahead=3\): found a Lookahead as the reader"):
        Job(tmp_path / "refused", window=12, copy_fulls_ahead=3)
    plain = Job(tmp_path / "plain", copy_fulls_ahead=0)
    ahead = Job(tmp_path / "ahead", window=12, copy_fulls_ahead=0)
    reasons = []
    while plain.done < 40:
        for job in (plain, ahead):
            job.batch()
        if plain.done % 20 == 0:
            reasons.append(ahead.copied.why_plain)
            _compare(plain, ahead)
    assert reasons == ["Options(copy_fulls_ahead=0) has fulls copied in their stalls", None]
    plain.checkpoints.close(final=False)
    ahead.checkpoints.close(final=False)
