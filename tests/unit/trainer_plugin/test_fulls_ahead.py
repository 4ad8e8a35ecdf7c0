"""Fulls whose rows are copied before the cut, without knowing the coming batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import recpoint
from recpoint import Checkpointer, Consecutive, Options, Precision
from recpoint.errors import SettingsError
from tests.unit.trainer_plugin.test_copied_ahead import USERS, Job, _compare, _train

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
