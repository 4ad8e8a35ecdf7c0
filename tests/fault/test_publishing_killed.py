"""A publisher that is killed at each of its writes: a pin too many, never one too few."""

from __future__ import annotations

from pathlib import Path

from recpoint import Follower
from recpoint.catalog.run import pins
from recpoint.catalog.run.publications import newest_publication, publish
from recpoint.catalog.run.run import Run
from recpoint.format.naming import ManifestName
from tests.catalog_builder import copy_run, new_run, tables
from tests.consolidation import trained
from tests.fault.retention_lives import publish_life, retain_once
from tests.forked import ForkedProcess
from tests.polling import PATIENCE_SECONDS


def _publish_and_die(url: str, step: int, die: int) -> int | None:
    arguments = {"url": url, "step": step, "die": die}
    process = ForkedProcess(target=publish_life, kwargs=arguments)
    process.start()
    process.join(PATIENCE_SECONDS)
    return process.exitcode


def _require_kept(run: Run) -> None:
    """What is published restores after retention, and a follower is served it."""
    record = newest_publication(run)
    assert record is not None
    name = ManifestName(record.checkpoint.step, record.checkpoint.generation)
    assert any(label.startswith("published-") for label in pins.pinned(run)[name])
    for _ in range(2):
        retain_once(run, last=1)
    follower = Follower(run.url, channel="published")
    assert follower.poll() and follower.version == name.step


def test_killed_at_each_write(tmp_path: Path) -> None:
    original = new_run(tmp_path / "original")
    original.claim(None)
    trained(original, tables(), [1, 2, 3])
    trained(original, tables(seed=4), [8])
    publish(original, ManifestName(2, 1))
    step, finished = 0, False
    served: set[int] = set()
    while not finished:
        step += 1
        run = copy_run(original, tmp_path / f"run-{step}")
        finished = _publish_and_die(run.url, 3, step) == 0
        _require_kept(copy_run(run, tmp_path / f"seen-{step}"))
        record = newest_publication(run)
        assert record is not None
        served.add(record.checkpoint.step)
        publish(run, ManifestName(1, 1))
        labels = {name.step: found for name, found in pins.pinned(run).items()}
        assert len(labels) == 1 and set(labels) == {1} and len(labels[1]) == 1
        _require_kept(run)
    assert served == {2, 3} and step > 5
