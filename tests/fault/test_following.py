"""Following while the store fails, and while others commit, merge and delete."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from recpoint import Follower
from recpoint.catalog.run import publications
from recpoint.catalog.run.run import Run
from recpoint.catalog.store.store import open_store
from recpoint.errors import RecpointError
from recpoint.format.manifest import Manifest
from recpoint.format.naming import ManifestName
from recpoint.testing.faults import READS, Fault, FaultStore
from recpoint.testing.seaweed import SeaweedServer
from tests.catalog_builder import Table, build, new_run, publish, tables
from tests.consolidation import merge
from tests.fault.retention_lives import retain_once
from tests.polling import PATIENCE_SECONDS, until


class Trainer:
    """Each checkpoint's step is in its dense layers and in the first row of each table."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.tables: list[Table] = tables(rows=200)
        self.newest: Manifest | None = None
        self._random = torch.Generator().manual_seed(1)

    def commit(self, step: int, *, full: bool = False) -> Manifest:
        dirty = []
        for table in self.tables:
            some = (torch.rand(table.rows, generator=self._random) < 0.2).nonzero().flatten()
            ids = torch.cat([torch.tensor([0]), some]).unique()
            table.train(ids, self._random)
            table.values[0] = step
            dirty.append(ids)
        full = full or self.newest is None
        made = build(
            self.run,
            self.tables,
            step=step,
            generation=1,
            parent=None if full else self.newest,
            dirty=None if full else dirty,
            state={"model": {"tensors": {"step": torch.tensor([step])}, "extra": {}}},
            rows_per_chunk=64,
        )
        self.newest = publish(self.run, made)
        return self.newest


def whole(follower: Follower, *, until_done: Callable[[int], bool] = lambda step: True) -> int:
    """The step that a request sees, looked for in everything, again and again until it is done."""
    with follower.reading() as version:
        first = torch.tensor([0])
        done = False
        while not done:
            done = until_done(version.step)
            seen = {int(version.dense["step"]), version.step}
            seen |= {int(version.lookup(name, first)[0, 0]) for name in ("items", "users")}
            assert seen == {version.step}
        return version.step


def is_near(follower: Follower, step: int) -> bool:
    return follower.version is not None and follower.version >= step - 8


def started(directory: Path) -> Trainer:
    run = new_run(directory)
    run.claim(None)
    return Trainer(run)


@pytest.mark.parametrize(
    "quantized", [False, pytest.param(True, marks=pytest.mark.nightly("kills"))]
)
def test_requests_see_whole_versions_while_others_commit_merge_and_delete(
    tmp_path: Path, quantized: bool
) -> None:
    trainer = started(tmp_path / "run")
    trainer.tables[0].bits = 8
    trainer.commit(1)
    torn: list[BaseException] = []
    seen: set[int] = set()
    stop = threading.Event()
    committed = 1

    def ask(follower: Follower) -> None:
        try:
            while not stop.is_set():
                # It holds its version while four more are committed.
                seen.add(whole(follower, until_done=lambda s: stop.is_set() or committed > s + 4))
        except BaseException as error:
            torn.append(error)

    with Follower(trainer.run.url, poll_seconds=0.01, quantized=quantized) as follower:
        assert follower.wait(seconds=PATIENCE_SECONDS)
        threads = [threading.Thread(target=ask, args=(follower,)) for _ in range(3)]
        for thread in threads:
            thread.start()
        for step in range(2, 36):
            newest = trainer.commit(step, full=step % 8 == 0)
            committed = step
            # However slow this machine is, there is something to be seen of the way.
            until(partial(is_near, follower, step))
            if step % 4 == 3:
                merge(trainer.run, newest)
            if step % 3 == 0:
                retain_once(trainer.run, last=2)
        stop.set()
        until(lambda: follower.version == 35)
        for thread in threads:
            thread.join(PATIENCE_SECONDS)
    assert torn == [] and len(seen) > 2
    assert whole(follower) == 35


def test_a_read_that_fails_anywhere_leaves_the_version_before_whole(tmp_path: Path) -> None:
    trainer = started(tmp_path / "run")
    trainer.commit(1)
    follower = Follower(trainer.run.url)
    follower.poll()
    store = follower._run.store if follower._run else None
    assert store is not None and follower._run is not None
    at, finished = 0, False
    while not finished:
        at += 1
        trainer.commit(1 + at)
        plan = Fault(kind="fail", on=READS | {"list", "size"}, after=at - 1, times=1)
        follower._run.store = FaultStore(store, [plan])
        try:
            finished = follower.poll()
        except RecpointError as error:
            assert follower.status.error == f"{type(error).__name__}: {error}"
            assert whole(follower) == at
        follower._run.store = store
        follower._failed.clear()
        follower.poll()
        assert whole(follower) == 1 + at
    assert at > 6 and follower.status.fulls_applied == 1


def test_bits_that_flip_on_the_way_are_read_again(tmp_path: Path) -> None:
    trainer = started(tmp_path / "run")
    trainer.commit(1)
    trainer.commit(2)
    follower = Follower(trainer.run.url)
    follower._store = FaultStore(follower._store, [Fault.flip(key_contains="chunks/")])
    assert follower.poll() and whole(follower) == 2
    assert follower.status.skipped == ()


@pytest.mark.slow
def test_goes_on_serving_while_a_real_store_is_away(own_seaweed: SeaweedServer) -> None:
    url = own_seaweed.run_url()
    run = Run.create(open_store(url))
    run.claim(None)
    trainer = Trainer(run)
    trainer.commit(1)
    trainer.commit(2)
    with Follower(url, poll_seconds=0.1) as follower:
        assert follower.wait(seconds=PATIENCE_SECONDS, step=2)
        own_seaweed.kill()
        until(lambda: follower.status.error is not None, seconds=300)
        assert whole(follower) == 2
        own_seaweed.start()
        trainer.commit(3)
        merge(run, trainer.commit(4))
        assert follower.wait(seconds=300, step=4)
        assert whole(follower) == 4 and follower.status.fulls_applied >= 1
        until(lambda: follower.status.error is None)


def test_publishing_and_following_on_a_real_s3_server(s3_run_url: str) -> None:
    run = Run.create(open_store(s3_run_url))
    run.claim(None)
    trainer = Trainer(run)
    for step in (1, 2, 3):
        trainer.commit(step)
    publications.publish(run, ManifestName(2, 1))
    with Follower(s3_run_url, channel="published", poll_seconds=0.1) as follower:
        assert follower.wait(seconds=PATIENCE_SECONDS) and whole(follower) == 2
        trainer.commit(4, full=True)
        for _ in range(2):
            retain_once(run, last=1)
        assert [name.step for name in run.manifest_names()] == [1, 2, 4]
        publications.publish(run, ManifestName(4, 1))
        assert follower.wait(seconds=PATIENCE_SECONDS, step=4) and whole(follower) == 4
        publications.publish(run, ManifestName(2, 1), held=True)
        until(lambda: follower.version == 2)
        assert whole(follower) == 2
