"""A reader whose lease comes after a retention's last look at the leases (format §6.6)."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from recpoint.catalog.check.evaluate import evaluate
from recpoint.catalog.check.validate import validate
from recpoint.catalog.restore.files import restore_shards
from recpoint.catalog.restore.order import Selection
from recpoint.catalog.restore.placement import TablePart
from recpoint.catalog.restore.restore import MemoryTarget, restore, restore_parts
from recpoint.catalog.retention.prune import PruneResult, execute
from recpoint.catalog.run import going, leases
from recpoint.catalog.run.run import Run
from recpoint.catalog.store.store import open_store
from recpoint.errors import NothingToRestore, ObjectNotFound, RetentionRefused
from recpoint.format.naming import DELETION_KEY, ManifestName
from tests.interposed_store import InterposedStore, unavailable
from tests.retained_run import filled, make_announcement_old, named, planned, retain, steps

_SECONDS = 60.0


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return filled(open_store(str(tmp_path / "run")))


@pytest.fixture(autouse=True)
def asks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(going, "_ASK_SECONDS", 0.001)


def start(run: Run, step: int | None = None) -> ManifestName:
    """What a trainer does that starts: it restores a checkpoint, and goes on from it."""
    with leases.reading(run, purpose="restore") as lease:
        report = restore(run, MemoryTarget(), Selection(step=step), leased=lease is not None)
        run.claim(report.restored)
    return ManifestName(report.restored.step, report.restored.generation)


def in_the_window(
    run: Run, step: int, come: Callable[[Run], object]
) -> tuple[PruneResult, Future[object]]:
    """`come` after the last look at the leases before the manifest of `step` is deleted.

    The deletion goes on once the reader has come to its end, or asks for the second time whether
    it is announced.
    """
    retain(run)
    plan = planned(run)
    assert plan.delete == tuple(named(run, one) for one in (30, 20, 10))
    asked = threading.Semaphore(0)

    def ask(call: str, key: str) -> None:
        if (call, key) == ("get", DELETION_KEY):
            asked.release()

    reader = Run.open(InterposedStore(run.store, after=ask))
    futures: list[Future[object]] = []

    def strike(call: str, key: str) -> None:
        if (call, key) != ("delete", named(run, step)) or futures:
            return
        futures.append(pool.submit(come, reader))
        futures[0].add_done_callback(lambda future: asked.release(2))
        for _ in range(2):
            assert asked.acquire(timeout=_SECONDS)

    with ThreadPoolExecutor(1) as pool:
        result = execute(Run.open(InterposedStore(run.store, before=strike)), plan)
        return result, futures[0]


def test_a_trainer_is_refused_what_goes_at_that_moment(run: Run) -> None:
    result, reader = in_the_window(run, 10, lambda there: start(there, 10))
    with pytest.raises(ObjectNotFound, match=named(run, 10)):
        reader.result()
    assert result.deleted == tuple(named(run, step) for step in (30, 20, 10))
    assert [name.step for name in run.live_line()] == [50, 40]  # nobody goes on from what is gone


def test_a_trainer_that_was_told_no_step_takes_another(run: Run) -> None:
    def come(there: Run) -> ManifestName:
        # Neither restores any more, from now on.
        run.store.delete(next(c.key for c in run.manifest(40, 1).chunks if c.content == "rows"))
        return start(there)

    result, reader = in_the_window(run, 30, come)
    assert reader.result() == ManifestName(20, 1)
    assert result.deleted == (named(run, 30),)
    assert run.live_line() == [ManifestName(20, 1), ManifestName(10, 1)]
    assert restore(run, MemoryTarget()).restored.step == 20


def test_what_is_announced_and_not_yet_gone_is_waited_for(run: Run) -> None:
    result, reader = in_the_window(run, 30, lambda there: start(there, 20))
    assert reader.result() == ManifestName(20, 1)
    assert result.deleted == (named(run, 30),)
    assert run.live_line() == [ManifestName(20, 1), ManifestName(10, 1)]


def test_files_and_validations_say_that_it_is_gone(run: Run, tmp_path: Path) -> None:
    def come(there: Run) -> None:
        with leases.reading(there, purpose="validate") as lease:
            validate(there, ManifestName(10, 1), level="full", leased=lease is not None)

    _, reader = in_the_window(run, 10, come)
    with pytest.raises(ObjectNotFound, match=named(run, 10)):  # no verdict: it was not damaged
        reader.result()

    other = filled(open_store(str(tmp_path / "other")))
    files = open_store(str(tmp_path / "files"))

    def into_files(there: Run) -> None:
        with leases.reading(there, purpose="restore") as lease:
            restore_shards(there, files, Selection(step=10), leased=lease is not None)

    _, reader = in_the_window(other, 10, into_files)
    with pytest.raises(ObjectNotFound, match=named(run, 10)):
        reader.result()
    assert not list(files.list())


def killed(run: Run) -> None:
    """A retention has announced 30, 20 and 10, and was killed before it deleted one."""
    retain(run)
    plan = planned(run)

    def die(call: str, key: str) -> None:
        if call == "delete" and key.startswith("manifests/"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        execute(Run.open(InterposedStore(run.store, before=die)), plan)
    assert steps(run) == [10, 20, 30, 40, 50]


def test_beside_a_killed_retention_what_it_announced_is_refused_and_the_rest_is_not(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed(run)
    monkeypatch.setattr(going, "_WAIT_SECONDS", 0.05)
    with pytest.raises(RetentionRefused, match=r"read again in (29|30) minutes") as refused:
        start(run, 10)
    assert "it is being deleted" in refused.value.found
    with leases.reading(run, purpose="validate") as lease:
        with pytest.raises(RetentionRefused, match="it is being deleted"):
            validate(run, ManifestName(10, 1), leased=lease is not None)
        with pytest.raises(RetentionRefused, match="it is being deleted"):
            evaluate(run, ManifestName(10, 1), len, function_name="len", leased=True)
    assert run.generation_numbers() == [1]
    assert start(run) == ManifestName(50, 1)


def test_half_an_hour_later_nobody_deletes_under_that_announcement(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed(run)
    monkeypatch.setattr(going, "_WAIT_SECONDS", 0.0)
    make_announcement_old(run, stamp=False)
    with pytest.raises(RetentionRefused):
        start(run, 10)
    make_announcement_old(run)
    assert start(run, 10) == ManifestName(10, 1)
    assert retain(run).deleted == (named(run, 30), named(run, 20))
    assert run.live_line() == [ManifestName(10, 1)]


def test_without_a_lease_nothing_is_looked_at(run: Run) -> None:
    killed(run)
    store = InterposedStore(run.store)
    restore(Run.open(store), MemoryTarget(), Selection(step=10))
    assert ("get", DELETION_KEY) not in store.calls


@pytest.mark.parametrize("how", ["no answer", "damaged"])
def test_an_announcement_that_cannot_be_read_stops_no_restore(run: Run, how: str) -> None:
    killed(run)
    if how == "damaged":
        run.store.put(DELETION_KEY, b"{")

    def fail(call: str, key: str) -> None:
        if how == "no answer" and (call, key) == ("get", DELETION_KEY):
            raise unavailable(key)

    store = InterposedStore(run.store, before=fail)
    assert start(Run.open(store), 10) == ManifestName(10, 1)
    assert store.calls.count(("get", DELETION_KEY)) >= 1


def test_a_store_that_stops_to_answer_while_a_deletion_is_waited_for_refuses(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed(run)
    monkeypatch.setattr(going, "_WAIT_SECONDS", 0.05)
    asked: list[str] = []

    def fail(call: str, key: str) -> None:
        if (call, key) == ("get", DELETION_KEY):
            asked.append(key)
            if len(asked) > 1:
                raise unavailable(key)

    with pytest.raises(RetentionRefused, match="no answer"):
        start(Run.open(InterposedStore(run.store, before=fail)), 10)
    assert run.generation_numbers() == [1]


class _Turns:
    """Lets one of two processes make its next calls to the store, in an order drawn by a seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._changed = threading.Condition()
        self._running = ["retention", "reader"]
        self._whose, self._left = "retention", self._random.randrange(60)

    def take(self, who: str) -> None:
        """Wait for one's turn, and use it."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._is_turn_of(who), timeout=_SECONDS)
            self._left -= 1
            if self._left <= 0:
                self._whose = self._random.choice(self._running)
                self._left = self._random.choice((1, 1, 2, 5, 30))
            self._changed.notify_all()

    def _is_turn_of(self, who: str) -> bool:
        return self._whose == who or self._running == [who]

    def end(self, who: str) -> None:
        """It makes no more calls."""
        with self._changed:
            self._running.remove(who)
            self._changed.notify_all()


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("step", [10, 20, 30])
def test_in_any_order_of_their_calls_a_trainer_goes_on_from_what_stays(
    run: Run, seed: int, step: int
) -> None:
    retain(run)
    plan = planned(run)
    turns = _Turns(seed)

    def process(who: str, work: Callable[[Run], object]) -> Callable[[], object]:
        store = InterposedStore(run.store, before=lambda call, key: turns.take(who))

        def go() -> object:
            try:
                return work(Run.open(store))
            finally:
                turns.end(who)

        return go

    with ThreadPoolExecutor(2) as pool:
        deleting = pool.submit(process("retention", lambda there: execute(there, plan)))
        reading = pool.submit(process("reader", lambda there: start(there, step)))
        deleting.result()
        try:
            reading.result()
        except (ObjectNotFound, NothingToRestore, RetentionRefused):
            assert run.generation_numbers() == [1]
            return
    assert run.live_line()[0] == ManifestName(step, 1)
    assert restore(run, MemoryTarget()).restored.step == step


def test_parts_of_what_goes_are_refused(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    killed(run)
    monkeypatch.setattr(going, "_WAIT_SECONDS", 0.0)
    whole = MemoryTarget()
    restore(run, whole, Selection(step=20))
    name, table = next(iter(whole.tables.items()))
    part = TablePart(table=name, values=torch.zeros_like(table.values))
    with pytest.raises(RetentionRefused, match="it is being deleted"):
        restore_parts(run.url, [part], step=20)
    assert restore_parts(run.url, [part]).restored.step == 50
