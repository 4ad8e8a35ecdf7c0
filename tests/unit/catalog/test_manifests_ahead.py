"""Manifests read ahead of a walk: the same chain, each manifest once, several at a time."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path

import pytest
import torch

from recpoint.catalog.run.chain import resolve_chain
from recpoint.catalog.run.run import Run
from recpoint.errors import MissingLink
from recpoint.format.manifest import Manifest
from recpoint.format.naming import CONSOLIDATED_KEY, MANIFEST_KEY, ManifestName
from tests.catalog_builder import build, new_run, publish, tables
from tests.consolidation import merge
from tests.interposed_store import InterposedStore

DIRTY = [torch.tensor([1, 4, 7]), torch.tensor([0])]
STEPS = tuple(range(10, 18))


@pytest.fixture
def links(tmp_path: Path) -> list[Manifest]:
    """A full at step 10 and increments up to step 17, in the run `links` was made in."""
    run = new_run(tmp_path)
    run.claim(None)
    made = [publish(run, build(run, tables(), step=10, generation=1))]
    for step in STEPS[1:]:
        checkpoint = build(run, tables(), step=step, generation=1, parent=made[-1], dirty=DIRTY)
        made.append(publish(run, checkpoint))
    return made


@pytest.fixture
def run(tmp_path: Path, links: list[Manifest]) -> Run:
    run = new_run(tmp_path)
    return Run(InterposedStore(run.store), run.record)


def reads(run: Run) -> Counter[str]:
    assert isinstance(run.store, InterposedStore)
    return Counter(key for call, key in run.store.calls if call == "get" and "-" in key)


def newest(run: Run, line: list[ManifestName]) -> tuple[Manifest, ...]:
    return resolve_chain(run, ManifestName(STEPS[-1], 1), line=line).manifests


def test_each_manifest_is_read_once_and_several_at_a_time(run: Run, links: list[Manifest]) -> None:
    together = threading.Barrier(len(STEPS) - 1)

    def before(call: str, key: str) -> None:
        # All but the first, which tells of the others: none ends before each has begun.
        if call == "get" and key != MANIFEST_KEY.of(STEPS[-1], 1):
            together.wait(240)

    assert isinstance(run.store, InterposedStore)
    line = run.live_line()
    run.store.calls.clear()
    run.store.before = before
    assert newest(run, line) == tuple(links)
    assert reads(run) == dict.fromkeys((MANIFEST_KEY.of(step, 1) for step in STEPS), 1)


@pytest.mark.parametrize(
    "steps",
    [(), (17,), (16, 14), (3, 2), tuple(range(40, 9, -1)), (17, 16, 15, 14, 13, 12, 11)],
)
def test_a_wrong_line_costs_time_only(
    run: Run, links: list[Manifest], steps: tuple[int, ...]
) -> None:
    assert newest(run, [ManifestName(step, 1) for step in steps]) == tuple(links)
    for step in STEPS:
        assert reads(run)[MANIFEST_KEY.of(step, 1)] == 1
    assert not set(reads(run)) & {MANIFEST_KEY.of(step, 1) for step in (2, 3, 18, 40)}


def test_what_is_missing_is_an_error_of_the_walk(run: Run, links: list[Manifest]) -> None:
    line = run.live_line()
    run.store.delete(MANIFEST_KEY.of(13, 1))
    with pytest.raises(MissingLink) as caught:
        newest(run, line)
    assert caught.value.subject == MANIFEST_KEY.of(13, 1)
    assert "step 14" in caught.value.expected


def test_a_consolidated_manifest_is_what_is_read_ahead(run: Run, links: list[Manifest]) -> None:
    merge(run, links[3])
    assert isinstance(run.store, InterposedStore)
    run.store.calls.clear()
    line = [ManifestName(step, 1) for step in reversed(STEPS)]
    assert [m.step for m in newest(run, line)] == [13, 14, 15, 16, 17]
    expected = {MANIFEST_KEY.of(step, 1) for step in STEPS[4:]} | {CONSOLIDATED_KEY.of(13, 1, None)}
    assert reads(run) == dict.fromkeys(expected, 1)
