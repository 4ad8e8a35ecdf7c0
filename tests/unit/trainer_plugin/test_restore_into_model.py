"""What a restore refuses, before it changes anything, and what can be asked for by name."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad

from recpoint import Seed
from recpoint.catalog.run.run import Run
from recpoint.catalog.store.store import open_store
from recpoint.errors import FormatError, IncompatibleModel, NothingToRestore
from recpoint.trainer_plugin import mismatches
from tests.interposed_store import InterposedStore
from tests.training_builder import (
    DIM,
    ROWS,
    Place,
    Recommender,
    Training,
    checkpointer,
    simple_training,
    train,
    until,
)


@pytest.fixture
def trained(place: Place) -> Training:
    """A run with checkpoints at 2, 4 and 5."""
    training = simple_training()
    with place.agent(), checkpointer(training, place) as ckpt:
        ckpt.restore()
        for _ in range(5):
            train(training, ckpt, 1)
            until(lambda: ckpt.stats.committed == ckpt.batches_done // 2)
    return training


def snapshot(training: Training) -> list[torch.Tensor]:
    return [tensor.detach().clone() for tensor in training.model.state_dict().values()]


def other_rows(training: Training) -> None:
    training.model.users = nn.Embedding(ROWS + 1, DIM)


def fewer_rows(training: Training) -> None:
    training.model.users = nn.Embedding(ROWS - 1, DIM)


def renamed_table(training: Training) -> None:
    training.model.members = training.model.users
    del training.model.users


def other_dtype(training: Training) -> None:
    training.model.users = nn.Embedding(ROWS, DIM, dtype=torch.float64)


def other_dim(training: Training) -> None:
    training.model.users = nn.Embedding(ROWS, DIM + 1)


def missing_table(training: Training) -> None:
    del training.model.items


def extra_table(training: Training) -> None:
    training.model.more = nn.Embedding(3, DIM)


def other_dense(training: Training) -> None:
    training.model.top = nn.Linear(DIM, 2)


def extra_buffer(training: Training) -> None:
    training.model.register_buffer("seen", torch.zeros(3))


CHANGES: dict[str, tuple[Callable[[Training], None], str, str]] = {
    "rows": (
        other_rows,
        rf"'users': rows {ROWS + 1} in the model, {ROWS} in the checkpoint",
        mismatches.more_rows("users"),
    ),
    "fewer rows": (
        fewer_rows,
        rf"'users': rows {ROWS - 1} in the model, {ROWS} in the checkpoint",
        mismatches.fewer_rows("users", ROWS),
    ),
    "dtype": (
        other_dtype,
        "'users': dtype F64 in the model, F32",
        mismatches.TABLE_DTYPE,
    ),
    "dim": (
        other_dim,
        rf"'users': values a row {DIM + 1} in the model, {DIM}",
        mismatches.TABLE_VALUES,
    ),
    "missing table": (
        missing_table,
        "table 'items' is not in the model",
        mismatches.TABLE_ONLY_THERE,
    ),
    "extra table": (
        extra_table,
        "table 'more' is not in the checkpoint",
        mismatches.TABLE_ONLY_HERE,
    ),
    "renamed table": (
        renamed_table,
        "table 'members' is not in the checkpoint; table 'users' is not in the model",
        "rename table 'members' to 'users', or load its rows under the new name with "
        'restore(partial={"tables": {"members": "users"}})',
    ),
    "dense": (
        other_dense,
        r"'top.weight' is float32\[2, 6\] in the model and float32\[1, 12\]",
        mismatches.DENSE_FORM,
    ),
    "buffer": (
        extra_buffer,
        "'seen' is not in the checkpoint",
        mismatches.DENSE_ONLY_HERE,
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_another_model_is_refused_and_untouched(
    change: str, place: Place, trained: Training
) -> None:
    alter, message, next_step = CHANGES[change]
    second = simple_training(9)
    alter(second)
    second.optimizers = [SGD(second.model.parameters(), lr=0.1)]
    before = snapshot(second)
    ckpt = checkpointer(second, place)
    with pytest.raises(IncompatibleModel, match=message) as caught:
        ckpt.restore()
    assert caught.value.next_step == f"{next_step}; {mismatches.LOAD_BY_NAME}"
    # The message is not pushed out of sight: what is shown above it is the call, and where it ends.
    assert [frame.name for frame in caught.traceback][1:] == ["restore"]
    assert all(map(torch.equal, before, snapshot(second)))
    assert len(Run.open(open_store(place.run)).generations()) == 1, "nothing was claimed"


def swap_class(second: Training) -> dict[str, Any]:
    second.optimizers = [Adagrad(second.model.parameters(), lr=0.1)]
    return {}


def regroup(second: Training) -> dict[str, Any]:
    parameters = list(second.model.parameters())
    second.optimizers = [SGD([{"params": parameters[:1]}, {"params": parameters[1:]}], lr=0.1)]
    return {}


def no_reader(second: Training) -> dict[str, Any]:
    return {"reader": None}


def more_schedulers(second: Training) -> dict[str, Any]:
    return {"schedulers": [torch.optim.lr_scheduler.StepLR(second.optimizers[0], 3)]}


def more_extras(second: Training) -> dict[str, Any]:
    return {"extras": {"again": second.reader}}


def more_optimizers(second: Training) -> dict[str, Any]:
    parameters = list(second.model.parameters())
    second.optimizers = [SGD(parameters[:1], lr=0.1), SGD(parameters[1:], lr=0.1)]
    return {}


def two_mismatches(second: Training) -> dict[str, Any]:
    return no_reader(second) | more_extras(second)


@pytest.mark.parametrize(
    ("alter", "message", "next_steps"),
    [
        (
            swap_class,
            "optimizer 0 is torch.optim.adagrad.Adagrad here and torch.optim.sgd.SGD",
            [mismatches.OPTIMIZER_CLASS],
        ),
        (regroup, "other parameter groups", [mismatches.PARAMETER_GROUPS]),
        (
            more_optimizers,
            "2 optimizers here, 1 in the checkpoint",
            [mismatches.OPTIMIZER_COUNT],
        ),
        (no_reader, "a reader only in the checkpoint", [mismatches.READER_ONLY_THERE]),
        (
            more_schedulers,
            "1 schedulers here, 0 in the checkpoint",
            [mismatches.SCHEDULER_COUNT],
        ),
        (more_extras, "extra 'again' is only here", [mismatches.EXTRA_ONLY_HERE]),
        (
            two_mismatches,
            "a reader only in the checkpoint; extra 'again' is only here",
            [mismatches.READER_ONLY_THERE, mismatches.EXTRA_ONLY_HERE],
        ),
    ],
)
def test_other_surroundings_are_refused(
    alter: Callable[[Training], dict[str, Any]],
    message: str,
    next_steps: list[str],
    place: Place,
    trained: Training,
) -> None:
    second = simple_training(9)
    settings = alter(second)
    before = snapshot(second)
    with pytest.raises(IncompatibleModel, match=message) as caught:
        checkpointer(second, place, **settings).restore()
    assert caught.value.next_step == "; ".join([*next_steps, mismatches.LOAD_BY_NAME])
    assert all(map(torch.equal, before, snapshot(second)))


def test_a_schedule_of_more_rates_is_refused(place: Place) -> None:
    def scheduled(*, groups: int) -> Training:
        training = simple_training()
        optimizer = SGD(training.model.parameters(), lr=0.1)
        for _ in range(groups - 1):
            optimizer.add_param_group({"params": []})
        training.optimizers = [optimizer]
        training.schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 3)]
        return training

    first = scheduled(groups=1)
    with place.agent(), checkpointer(first, place) as ckpt:
        ckpt.restore()
        train(first, ckpt, 2)
    message = r"schedulers\[0\] sets 2 learning rates here, 1 in the checkpoint"
    with pytest.raises(IncompatibleModel, match=message) as caught:
        checkpointer(scheduled(groups=2), place).restore()
    assert mismatches.SCHEDULER_RATES in caught.value.next_step


def test_state_that_only_the_checkpoint_has_is_refused_with_a_next_step(place: Place) -> None:
    first = simple_training()
    settings: dict[str, Any] = {"reader": None, "extras": {"metrics": first.reader}}
    with place.agent(), checkpointer(first, place, **settings) as ckpt:
        ckpt.restore()
        train(first, ckpt, 2)
    message = "a reader only here; extra 'metrics' is only in the checkpoint"
    with pytest.raises(IncompatibleModel, match=message) as caught:
        checkpointer(simple_training(9), place).restore()
    expected = [mismatches.READER_ONLY_HERE, mismatches.EXTRA_ONLY_THERE, mismatches.LOAD_BY_NAME]
    assert caught.value.next_step == "; ".join(expected)


def test_equal_next_steps_are_said_once_and_alike_tables_are_not_taken_for_renamed(
    place: Place, trained: Training
) -> None:
    """Two new tables have the form of the one that is missing: nobody knows which it was."""
    second = simple_training(9)
    renamed_table(second)
    second.model.guests = nn.Embedding(ROWS, DIM)
    second.optimizers = [SGD(second.model.parameters(), lr=0.1)]
    with pytest.raises(IncompatibleModel) as caught:
        checkpointer(second, place).restore()
    assert caught.value.next_step == "; ".join(
        [mismatches.TABLE_ONLY_HERE, mismatches.TABLE_ONLY_THERE, mismatches.LOAD_BY_NAME]
    )


def test_a_renamed_table_loads_under_its_new_name(place: Place, trained: Training) -> None:
    second = simple_training(9)
    second.model.members = nn.Embedding(ROWS, DIM)
    second.optimizers = [SGD(second.model.parameters(), lr=0.1)]
    with place.agent(), checkpointer(second, place) as ckpt:
        ckpt.restore(partial={"tables": {"members": "users"}})
        assert torch.equal(second.model.members.weight, trained.model.users.weight)


def test_parts_by_name_start_a_line_of_their_own(place: Place, trained: Training) -> None:
    second = simple_training(9)
    second.model.top = nn.Linear(2 * DIM, 4)
    second.optimizers = [SGD(second.model.parameters(), lr=0.1)]
    items = second.model.items.weight.detach().clone()
    with place.agent():
        ckpt = checkpointer(second, place)
        report = ckpt.restore(partial={"tables": ["users"], "dense": ["norm.running_mean"]})
        assert report is not None and report.restored.step == 5 and ckpt.batches_done == 0
        assert torch.equal(second.model.users.weight, trained.model.users.weight)
        for name, buffer in second.model.named_buffers():
            same = torch.equal(buffer, trained.model.get_buffer(name))
            assert same == (name == "norm.running_mean")
        assert torch.equal(second.model.items.weight, items)
        assert second.reader.position == 0
        assert ckpt.checkpoint()
        ckpt.close()
    run = Run.open(open_store(place.run))
    assert run.live_line() == [(0, 2)]
    assert run.manifest(0, 2).kind == "full"


@pytest.mark.parametrize(
    ("partial", "message"),
    [
        ({"tables": ["nobody"]}, "'nobody' is not in the checkpoint"),
        ({"dense": ["nobody"]}, "'nobody' is not in the checkpoint"),
        ({"dense": ["top.weight"]}, r"'top.weight' is torch.float32 \[4, 12\]"),
    ],
)
def test_parts_that_are_not_there(
    partial: dict[str, list[str]], message: str, place: Place, trained: Training
) -> None:
    second = simple_training(9)
    second.model.top = nn.Linear(2 * DIM, 4)
    second.optimizers = [SGD(second.model.parameters(), lr=0.1)]
    with pytest.raises(IncompatibleModel, match=message):
        checkpointer(second, place).restore(partial=partial)


def test_fresh_starts_a_new_line_on_purpose(place: Place, trained: Training) -> None:
    second = simple_training(9)
    with place.agent(), checkpointer(second, place) as ckpt:
        assert ckpt.restore(fresh=True) is None
        assert ckpt.batches_done == 0
        train(second, ckpt, 2)
    run = Run.open(open_store(place.run))
    assert run.live_line() == [(2, 2)]
    assert len(run.superseded()) == 3


@pytest.mark.parametrize("start", [{"fresh": True}, {"partial": {"tables": ["users"]}}])
@pytest.mark.parametrize("policy", ["consecutive", "one_shot"])
def test_a_new_line_without_a_checkpoint_is_never_a_silent_fresh_start(
    start: dict[str, Any], policy: str, place: Place, trained: Training
) -> None:
    with checkpointer(simple_training(9), place) as ended:
        ended.restore(**start)
        ended.close(final=False)  # before its first checkpoint, as by a kill
    run = Run.open(open_store(place.run))
    for _ in range(2):
        with pytest.raises(NothingToRestore) as refused:
            checkpointer(simple_training(9), place).restore()
    assert run.generation_numbers() == [1, 2]
    assert "3 superseded, the newest step 5 (generation 1)" in refused.value.found
    assert "restore(step=5, generation=1)" in refused.value.next_step
    assert "restore(fresh=True)" in refused.value.next_step
    with pytest.raises(NothingToRestore, match="ended before its first") as refused:
        checkpointer(simple_training(9), place).restore(partial={"tables": ["users"]})
    assert "restore(step=5, generation=1, partial=...)" in refused.value.next_step
    # Nor does it seed a run that has checkpoints.
    with pytest.raises(NothingToRestore, match="3 superseded"):
        checkpointer(simple_training(9), place).restore(seed=Seed(place.run, tables=["users"]))
    with pytest.raises(NothingToRestore, match="name its generation too: step 5, generation 1"):
        checkpointer(simple_training(9), place).restore(5)
    second = simple_training(9)
    with place.agent(), checkpointer(second, place, policy=policy) as ckpt:
        report = ckpt.restore(step=5, generation=1)
        assert report is not None and report.restored.step == ckpt.batches_done == 5
        assert torch.equal(second.model.users.weight, trained.model.users.weight)
        train(second, ckpt, 1)
    assert run.live_line() == [(6, 3), (5, 1), (4, 1), (2, 1)]
    assert run.manifest(6, 3).kind == "increment"
    with checkpointer(simple_training(9), place) as ckpt:
        assert ckpt.restore(fresh=True) is None


def test_manifests_that_are_gone_are_never_a_silent_fresh_start(
    place: Place, trained: Training
) -> None:
    """A directory that was not copied, or not mounted: training goes on once it is there."""
    manifests = Path(place.run) / "manifests"
    moved = manifests.rename(manifests.with_name("moved"))
    run = Run.open(open_store(place.run))
    for _ in range(2):
        with pytest.raises(NothingToRestore, match="nothing is under manifests/ any") as refused:
            checkpointer(simple_training(9), place).restore()
    assert run.generation_numbers() == [1]
    assert "restore(fresh=True)" in refused.value.next_step
    moved.rename(manifests)
    with checkpointer(simple_training(9), place) as ckpt:
        report = ckpt.restore()
        assert report is not None and report.restored.step == 5


def test_parts_of_a_superseded_checkpoint(place: Place, trained: Training) -> None:
    with checkpointer(simple_training(9), place) as ended:
        ended.restore(fresh=True)
    second = simple_training(9)
    with checkpointer(second, place) as ckpt:
        report = ckpt.restore(4, generation=1, partial={"tables": ["users"]})
        assert report is not None and report.restored.step == 4 and ckpt.batches_done == 0


def test_an_explicit_step_leaves_newer_ones_behind_and_says_so(
    place: Place, trained: Training, caplog: pytest.LogCaptureFixture
) -> None:
    second = simple_training(9)
    with place.agent(), checkpointer(second, place) as ckpt:
        four: Any = np.int64(4)
        report = ckpt.restore(four)
        assert report is not None and report.restored.step == ckpt.batches_done == 4
        train(second, ckpt, 2)
    run = Run.open(open_store(place.run))
    assert run.live_line() == [(6, 2), (4, 1), (2, 1)]
    parent = run.manifest(6, 2).parent
    assert parent is not None and parent.step == 4
    # The branch is the same training: batch 5 was trained as before.
    assert second.reader.position == 6
    (said,) = [message for message in caplog.messages if "left behind" in message]
    assert "1 checkpoint(s) that counted, up to step 5" in said and "Next: remove the step" in said
    caplog.clear()
    with checkpointer(simple_training(9), place) as ckpt:
        ckpt.restore(6)
    assert not [message for message in caplog.messages if "left behind" in message]


def test_going_on_from_one_that_did_not_count_says_what_it_leaves(
    place: Place, trained: Training, caplog: pytest.LogCaptureFixture
) -> None:
    with place.agent(), checkpointer(fresh := simple_training(9), place) as ckpt:
        ckpt.restore(fresh=True)
        train(fresh, ckpt, 2)
    with checkpointer(simple_training(9), place) as ckpt:
        report = ckpt.restore(5, generation=1)
        assert report is not None and report.restored.step == 5
    (said,) = [message for message in caplog.messages if "left behind" in message]
    assert "1 checkpoint(s) that counted, up to step 2 (generation 2), are left behind" in said


def test_one_line_on_stderr_says_how_training_begins(
    place: Place, trained: Training, capsys: pytest.CaptureFixture[str]
) -> None:
    def said(announce: bool = True, **restoring: Any) -> str:
        capsys.readouterr()
        with checkpointer(simple_training(9), place, announce=announce) as ckpt:
            ckpt.restore(**restoring)
            return capsys.readouterr().err

    url = place.run
    assert re.fullmatch(rf"recpoint: {url} is restored: step 5 \(.*\)\n", said())
    assert said(announce=False) == ""
    back = said(step=4)
    assert re.fullmatch(
        rf"recpoint: {url} goes back to step 4 \(.*\): 1 checkpoint\(s\) are left behind\n", back
    )
    parts = said(partial={"tables": ["users"]})
    assert re.fullmatch(rf"recpoint: {url} begins with parts of step 4 \(.*\)\n", parts)
    assert said(fresh=True) == f"recpoint: {url} begins: nothing is restored\n"


def test_a_stderr_that_cannot_be_written_to_ends_no_start(
    place: Place,
    trained: Training,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    gone = io.StringIO()
    gone.close()
    for stream in (gone, None):
        monkeypatch.setattr("sys.stderr", stream)
        with checkpointer(simple_training(9), place, announce=True) as ckpt:
            assert ckpt.restore() is not None
    assert "could not be printed to stderr" in caplog.text


def test_what_is_read_is_under_a_lease(place: Place, trained: Training) -> None:
    run = Run.open(open_store(place.run))
    leases = []

    def look(call: str, key: str) -> None:
        if call == "get" and key.startswith("chunks/"):
            leases.append(len(list(run.store.list("leases/"))))

    with checkpointer(simple_training(9), place) as ckpt:
        starts = ckpt._training._starts
        starts._store = InterposedStore(starts._store, before=look)
        ckpt.restore()
    assert leases and set(leases) == {1}
    assert not list(run.store.list("leases/"))


def test_a_step_that_is_not_there(place: Place, trained: Training) -> None:
    with pytest.raises(NothingToRestore):
        checkpointer(simple_training(), place).restore(3)


def test_a_step_of_a_run_that_has_none(place: Place) -> None:
    with pytest.raises(NothingToRestore):
        checkpointer(simple_training(), place).restore(3)


def test_damaged_checkpoints_are_never_a_silent_fresh_start(
    place: Place, trained: Training
) -> None:
    for manifest in (Path(place.run) / "manifests").iterdir():
        manifest.write_bytes(b"garbage")
    ways: list[dict[str, Any]] = [{}, {"step": 5}, {"step": 5, "generation": 1}]
    for arguments in ways:
        with pytest.raises((NothingToRestore, FormatError)) as caught:
            checkpointer(simple_training(), place).restore(**arguments)
        # The command can be copied.
        assert f"recpoint check {place.run}" in str(caught.value)
        assert "recpoint check URL" not in str(caught.value)


def test_a_damaged_newest_falls_back(place: Place, trained: Training) -> None:
    newest = sorted((Path(place.run) / "manifests").iterdir())[-1]
    newest.write_bytes(b"garbage")
    ckpt = checkpointer(simple_training(), place)
    report = ckpt.restore()
    assert report is not None and report.restored.step == 4 and len(report.skipped) == 1
    assert f"recpoint check {place.run}" in report.skipped[0].error
    ckpt.close(final=False)


def test_a_checkpoint_committed_while_restoring_is_found(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old trainer's agent commits between the restore and the claim."""
    first = simple_training()
    ckpt = checkpointer(first, place)
    ckpt.restore()
    train(first, ckpt, 2)
    until(lambda: ckpt.stats.staged == 1)
    place.persist_all()
    until(lambda: ckpt.stats.committed == 1)
    train(first, ckpt, 2)
    until(lambda: ckpt.stats.staged == 2)
    ckpt.close(final=False)
    claim = Run.claim

    def commit_first(run: Run, restored: Any, **options: Any) -> Any:
        place.persist_all()
        return claim(run, restored, **options)

    monkeypatch.setattr(Run, "claim", commit_first)
    second = simple_training(9)
    again = checkpointer(second, place, drain_seconds=0.0)
    report = again.restore()
    assert report is not None and report.restored.step == again.batches_done == 4
    assert torch.equal(first.model.users.weight, second.model.users.weight)
    again.close(final=False)


def test_hooks_are_gone_after_close(place: Place) -> None:
    training = simple_training()
    ckpt = checkpointer(training, place)
    ckpt.restore()
    ckpt.close(final=False)
    model = training.model
    assert isinstance(model, Recommender)
    assert not model.users._forward_pre_hooks and not model.items._forward_pre_hooks
    assert not training.optimizers[0]._optimizer_step_post_hooks
