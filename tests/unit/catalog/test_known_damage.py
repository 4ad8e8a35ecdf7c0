"""Merged manifests that a validation has found damaged, and what retention does about them."""

from __future__ import annotations

from pathlib import Path

import pytest

from recpoint.catalog.check.validate import record, validate
from recpoint.catalog.restore.restore import MemoryTarget, restore
from recpoint.catalog.retention.prune import execute
from recpoint.catalog.retention.rules import RetentionPolicy
from recpoint.catalog.run.facts import gather
from recpoint.catalog.run.run import Run
from recpoint.format.manifest import Manifest
from recpoint.format.naming import CONSOLIDATED_KEY, VALIDATION_KEY, ManifestName, ValidationLevel
from recpoint.format.records import pack_record
from tests.catalog_builder import Table, new_run, tables
from tests.consolidation import merge, name_of, restored, trained
from tests.interposed_store import InterposedStore
from tests.retained_run import age_file, named, planned, retain, steps

MERGED = CONSOLIDATED_KEY.of(50, 1, None)
LAST = RetentionPolicy(keep_last=1)


class Merged:
    """A chain of five, the last of which is merged into a full that has a wrong bit since."""

    def __init__(self, place: Path) -> None:
        self.run: Run = new_run(place)
        self.run.claim(None)
        self.trained: list[Table] = tables()
        self.newest: Manifest = trained(self.run, self.trained, [10, 20, 30, 40, 50])[-1]
        assert merge(self.run, self.newest).key == MERGED
        full = self.run.read_manifest(self.run.representations()[name_of(self.newest)][0])
        self.key = next(chunk.key for chunk in full.chunks if chunk.content == "rows")
        self.good = self.run.store.get(self.key, max_bytes=1 << 26)
        half = len(self.good) // 2
        wrong = bytes([self.good[half] ^ 1])
        self.run.store.put(self.key, self.good[:half] + wrong + self.good[half + 1 :])

    def train_on(self) -> Manifest:
        (self.newest,) = trained(self.run, self.trained, [60], parent=self.newest, seed=5)
        return self.newest

    def validated(self, step: int, level: ValidationLevel) -> None:
        found = validate(self.run, ManifestName(step, 1), level=level)
        assert found.passed
        record(self.run, found)

    def whole(self) -> bool:
        (found,) = (one.whole for one in gather(self.run).manifests if one.key == MERGED)
        return found


@pytest.fixture
def merged(tmp_path: Path) -> Merged:
    return Merged(tmp_path / "run")


@pytest.mark.parametrize("seen_by", [50, 60])
def test_the_chain_that_stands_in_for_it_stays(merged: Merged, seen_by: int) -> None:
    # By a validation of the checkpoint itself, or of one that stands on it.
    run = merged.run
    if seen_by == 50:
        merged.validated(50, "sample")
    merged.train_on()
    merged.validated(60, "full" if seen_by == 60 else "sample")
    assert retain(run, LAST).marked == (MERGED,)
    assert retain(run, LAST).deleted == (MERGED,)
    assert steps(run) == [10, 20, 30, 40, 50, 60]
    assert restore(run, MemoryTarget()).chain_length == 6
    # Merged anew it is another one, and good: the chain may go.
    merge(run, run.manifest(50, 1))
    assert merged.whole()
    for _ in range(2):
        retain(run, LAST)
    assert steps(run) == [50, 60]
    assert restored(run, merged.newest)[1].chain_length == 2


def test_damage_that_is_found_after_the_plan_was_made(merged: Merged) -> None:
    run = merged.run
    merged.train_on()
    merged.validated(60, "sample")
    retain(run, LAST)
    plan = planned(run, LAST)
    assert len(plan.delete) == 5
    merged.validated(60, "full")
    result = execute(run, plan)
    assert result.deleted == () and len(result.spared) == 5
    assert restore(run, MemoryTarget()).restored.step == 60


def test_only_a_validation_that_looks_at_as_much_takes_it_back(merged: Merged) -> None:
    merged.train_on()
    assert merged.whole()
    merged.validated(60, "full")
    less: tuple[ValidationLevel, ...] = ("metadata", "sample")
    for level in less:
        merged.validated(60, level)
        assert not merged.whole()
    merged.run.store.put(merged.key, merged.good)
    assert not merged.whole()
    merged.validated(60, "full")
    assert merged.whole()


@pytest.mark.parametrize("newer", ["by the store's clock", "by its stamp", "by both"])
def test_it_is_another_only_if_it_is_newer_by_every_clock(merged: Merged, newer: str) -> None:
    merged.validated(50, "sample")
    if newer != "by its stamp":
        (info,) = merged.run.store.list("validations/")
        age_file(merged.run, info.key, 3600)
    if newer != "by the store's clock":
        full = merged.run.read_manifest(merged.run.representations()[name_of(merged.newest)][0])
        later = full.model_copy(update={"committed_ms": full.committed_ms + 3_600_000})
        merged.run.store.put(MERGED, pack_record(later))
        age_file(merged.run, MERGED, 1800)
    assert merged.whole() == (newer == "by both")


def test_a_record_that_cannot_be_read_tells_nothing(merged: Merged) -> None:
    merged.validated(50, "sample")
    (info,) = merged.run.store.list("validations/")
    merged.run.store.put(info.key, b"damaged")
    assert merged.whole()


def test_records_are_read_only_where_one_manifest_may_stand_in_for_another(tmp_path: Path) -> None:
    run: Run = new_run(tmp_path / "run")
    run.claim(None)
    made = trained(run, tables(), [10, 20, 30, 40])
    levels: tuple[ValidationLevel, ...] = ("metadata", "sample", "sample")
    for manifest in made:
        for level in levels:
            record(run, validate(run, name_of(manifest), level=level))
    store = InterposedStore(run.store)

    def read() -> list[int]:
        store.calls.clear()
        gather(Run.open(store))
        names = [VALIDATION_KEY.parse(key) for call, key in store.calls if call == "get"]
        return sorted(name.step for name in names if name is not None)

    assert read() == []
    lists = [key for call, key in store.calls if call == "list"]
    merge(run, made[2])
    assert read() == [30, 40]  # one each
    assert [key for call, key in store.calls if call == "list"] == lists
    run.store.delete(named(run, 30))
    assert read() == []
