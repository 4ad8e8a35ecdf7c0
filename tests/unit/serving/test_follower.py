from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from recpoint import Follower
from recpoint.catalog.records import publications, validations
from recpoint.catalog.records.leases import look as leases
from recpoint.catalog.restoring.restore import MemoryTarget, restore
from recpoint.catalog.runs.lineage import ManifestName
from recpoint.catalog.runs.run import Run
from recpoint.catalog.stores.elapsed import Clocks
from recpoint.errors import (
    ForeignObject,
    IncompatibleModel,
    NothingToRestore,
    NotServing,
    SettingsError,
    UnknownRow,
    UnknownTable,
)
from recpoint.format.manifest import Manifest
from recpoint.format.naming import (
    LEASES_PREFIX,
    consolidated_key,
    consolidated_prefix,
    manifest_key,
)
from recpoint.format.records import pack_record
from recpoint.format.validation import ValidationRecord
from recpoint.serving.wanted import CHANNELS, Channel
from tests.catalog_builder import Table, build, new_run, publish, tables
from tests.consolidation import chain_of, merge
from tests.interposed_store import InterposedStore


@dataclass
class Trainer:
    """Commits checkpoints, and remembers what the tables were at each."""

    run: Run
    tables: list[Table]
    generation: int = 1
    made: list[Manifest] = field(default_factory=list)
    at: dict[int, list[Tensor]] = field(default_factory=dict)
    random: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(3))

    def commit(self, step: int, *, full: bool = False, parent: Manifest | None = None) -> Manifest:
        if parent is None and self.made and not full:
            parent = self.made[-1]
        dirty = []
        for table in self.tables:
            ids = (torch.rand(table.rows, generator=self.random) < 0.3).nonzero().flatten()
            table.train(ids, self.random)
            dirty.append(ids)
        dense = {"top.weight": torch.full((2, 2), float(step))}
        checkpoint = build(
            self.run,
            self.tables,
            step=step,
            generation=self.generation,
            parent=parent,
            dirty=dirty if parent else None,
            state={"model": {"tensors": dense, "extra": {}}},
        )
        self.made.append(publish(self.run, checkpoint))
        target = MemoryTarget()
        restore(self.run, target, step=step, generation=self.generation)
        self.at[step] = [target.tables[table.name].values for table in self.tables]
        return self.made[-1]


@pytest.fixture
def trainer(tmp_path: Path) -> Trainer:
    run = new_run(tmp_path / "run")
    run.claim(None)
    return Trainer(run, tables())


def require(follower: Follower, trainer: Trainer, step: int) -> None:
    """The follower serves this step, bit for bit, dense layers too."""
    with follower.reading() as version:
        assert version.step == step
        assert bool((version.dense["top.weight"] == step).all())
        for table, values in zip(trainer.tables, trainer.at[step], strict=True):
            found = version.lookup(table.name, torch.arange(table.rows))
            assert torch.equal(found.view(torch.uint8), values.view(torch.uint8))


@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("quantized", [False, True])
def test_serves_each_checkpoint_bit_for_bit(
    trainer: Trainer, bits: int | None, quantized: bool
) -> None:
    trainer.tables[0].bits = bits
    follower = Follower(trainer.run.url, quantized=quantized)
    for step in range(1, 8):
        if step > 4 and bits:
            trainer.tables[0].bits = 8
        trainer.commit(step)
        if step == 3:
            continue  # two at once next time
        assert follower.poll()
        require(follower, trainer, step)
        assert not follower.poll()
    status = follower.status
    assert (status.fulls_applied, status.increments_applied) == (1, 6)
    assert (status.lag_seconds, status.lag_checkpoints, status.lag_batches) == (0.0, 0, 0)
    assert status.error is None and status.skipped == () and status.versions_applied == 6


def test_rows_that_cannot_be_quantized_come_and_go(trainer: Trainer) -> None:
    items = trainer.tables[0]
    items.bits = 8
    follower = Follower(trainer.run.url, quantized=True)
    items.values[4, 0] = torch.inf
    items.values[9, 1] = torch.nan
    for step in range(1, 7):
        trainer.commit(step)
        follower.poll()
        require(follower, trainer, step)
        items.values[step + 10, 0] = torch.nan


def test_a_table_that_changes_between_exact_and_quantized(trainer: Trainer) -> None:
    follower = Follower(trainer.run.url, quantized=True)
    for step, bits in enumerate([None, 4, 4, None, 8, 2], start=1):
        trainer.tables[0].bits = bits
        trainer.commit(step, full=step in (1, 5))
        follower.poll()
        require(follower, trainer, step)


def test_an_increment_is_read_once_and_alone(trainer: Trainer) -> None:
    follower = Follower(trainer.run.url)
    trainer.commit(1)
    follower.poll()
    before = follower.status.bytes_read
    made = trainer.commit(2)
    follower.poll()
    assert follower.status.bytes_read - before == made.stored_bytes
    # The copy that was replaced has not read it: it takes the rows from the other.
    made = trainer.commit(3)
    before = follower.status.bytes_read
    follower.poll()
    assert follower.status.bytes_read - before == made.stored_bytes
    require(follower, trainer, 3)


def test_cumulative_increments_go_on_what_is_served(trainer: Trainer) -> None:
    follower = Follower(trainer.run.url)
    base = trainer.commit(1)
    follower.poll()
    changed: list[set[int]] = [set(), set()]
    for step in (2, 3, 4):
        for table, rows in zip(trainer.tables, changed, strict=True):
            ids = (torch.rand(table.rows, generator=trainer.random) < 0.2).nonzero().flatten()
            table.train(ids, trainer.random)
            rows.update(ids.tolist())
        checkpoint = build(
            trainer.run,
            trainer.tables,
            step=step,
            generation=1,
            parent=base,
            dirty=[torch.tensor(sorted(rows)) for rows in changed],
            state={"model": {"tensors": {"top.weight": torch.full((2, 2), float(step))}}},
        )
        made = publish(trainer.run, checkpoint)
        trainer.at[step] = [table.values.clone() for table in trainer.tables]
        before = follower.status.bytes_read
        assert follower.poll()
        assert follower.status.bytes_read - before == made.stored_bytes
        require(follower, trainer, step)
    assert follower.status.fulls_applied == 1


def test_an_increment_on_the_base_that_lacks_rows_brings_the_base_again(trainer: Trainer) -> None:
    follower = Follower(trainer.run.url)
    base = trainer.commit(1)
    first = [table.clone() for table in trainer.tables]
    follower.poll()
    trainer.commit(2)
    follower.poll()
    # Rows that step 2 changed are in this one as they were in step 1: it does not hold them.
    trainer.tables = first
    trainer.commit(3, parent=base)
    assert follower.poll()
    require(follower, trainer, 3)
    assert follower.status.fulls_applied == 2


def test_catches_up_from_a_newer_full_when_that_is_less(trainer: Trainer) -> None:
    follower = Follower(trainer.run.url)
    trainer.commit(1)
    follower.poll()
    for step in range(2, 9):
        trainer.commit(step)
    before = follower.status.bytes_read
    merge(trainer.run, trainer.made[-1])
    (merged,) = chain_of(trainer.run, trainer.made[-1])
    assert follower.poll()
    require(follower, trainer, 8)
    assert follower.status.bytes_read - before <= merged.stored_bytes
    assert follower.status.fulls_applied == 2
    trainer.commit(9)
    assert follower.poll()
    require(follower, trainer, 9)
    assert follower.status.fulls_applied == 2


def test_goes_on_although_its_base_is_gone(trainer: Trainer) -> None:
    follower = Follower(trainer.run.url)
    for step in (1, 2, 3):
        trainer.commit(step)
    follower.poll()
    trainer.commit(4)
    merge(trainer.run, trainer.made[-1])
    for manifest in trainer.made:
        trainer.run.store.delete(f"manifests/{manifest.step:012d}-00000001.json")
    assert follower.poll()
    require(follower, trainer, 4)


def test_a_gap_is_refused_and_named(trainer: Trainer) -> None:
    follower = Follower(trainer.run.url)
    for step in (1, 2):
        trainer.commit(step)
    follower.poll()
    for step in (3, 4):
        trainer.commit(step)
    trainer.run.store.delete("manifests/000000000003-00000001.json")
    assert not follower.poll()
    require(follower, trainer, 2)
    (skipped,) = follower.status.skipped
    assert skipped.name.step == 4 and "step 3" in skipped.error
    assert follower.status.lag_seconds and follower.status.lag_batches == 2
    trainer.commit(5, full=True)
    assert follower.poll()
    require(follower, trainer, 5)
    assert follower.status.skipped == ()


def test_an_increment_on_another_attempt_is_no_way(trainer: Trainer) -> None:
    follower = Follower(trainer.run.url)
    full = trainer.commit(1)
    other = trainer.commit(2)
    follower.poll()
    stranger = full.model_copy(
        update={"attempt": "ab" * 16, "step": 2, "chain_length": 1, "generation": 1}
    )
    checkpoint = build(
        trainer.run,
        trainer.tables,
        step=3,
        generation=1,
        parent=stranger,
        dirty=[torch.tensor([1]), torch.tensor([1])],
    )
    for key, data in checkpoint.chunks.items():
        trainer.run.store.put(key, data)
    trainer.run.store.put("manifests/000000000003-00000001.json", pack_record(checkpoint.manifest))
    assert not follower.poll()
    require(follower, trainer, 2)
    assert other.attempt in follower.status.skipped[0].error


def test_damage_leaves_what_is_served_and_heals(trainer: Trainer) -> None:
    follower = Follower(trainer.run.url, threads=1)
    trainer.commit(1)
    follower.poll()
    bad = trainer.commit(2)
    rows = [chunk for chunk in bad.chunks if chunk.content == "rows"]
    data = bytearray(trainer.run.store.get(rows[-1].key, max_bytes=rows[-1].bytes))
    data[-1] ^= 1
    trainer.run.store.put(rows[-1].key, bytes(data))
    assert not follower.poll()
    require(follower, trainer, 1)
    assert rows[-1].key in follower.status.skipped[0].error
    # Half of step 2 is in the other copy. What comes next goes on step 1, not on that.
    trainer.tables[0].values[:] = trainer.at[1][0]
    trainer.tables[1].values[:] = trainer.at[1][1]
    trainer.commit(3, parent=trainer.made[0])
    before = follower.status.bytes_read
    assert follower.poll()
    require(follower, trainer, 3)
    assert follower.status.bytes_read - before == trainer.made[-1].stored_bytes


def test_a_damaged_consolidation_is_passed_over(trainer: Trainer) -> None:
    for step in (1, 2, 3):
        trainer.commit(step)
    merge(trainer.run, trainer.made[-1])
    (merged,) = chain_of(trainer.run, trainer.made[-1])
    chunk = next(c for c in merged.chunks if c.content == "rows")
    trainer.run.store.put(chunk.key, b"x" * chunk.bytes)
    follower = Follower(trainer.run.url)
    assert follower.poll()
    require(follower, trainer, 3)
    (passed,) = follower.status.passed_over
    assert chunk.key in passed.error


def test_a_consolidation_of_another_attempt_is_passed_over(trainer: Trainer) -> None:
    for step in (1, 2, 3):
        trainer.commit(step)
    merge(trainer.run, trainer.made[-1])
    (merged,) = chain_of(trainer.run, trainer.made[-1])
    key = consolidated_key(3, 1, None)
    trainer.run.store.put(key, pack_record(merged.model_copy(update={"attempt": "f" * 32})))
    follower = Follower(trainer.run.url)
    assert follower.poll()
    require(follower, trainer, 3)
    assert [passed.key for passed in follower.status.passed_over] == [key]


def test_serves_what_only_a_consolidated_manifest_tells_of(trainer: Trainer) -> None:
    for step in (1, 2, 3):
        trainer.commit(step)
    merge(trainer.run, trainer.made[-1])
    trainer.run.store.put(manifest_key(3, 1), b"damaged")
    follower = Follower(trainer.run.url)
    assert follower.poll()
    require(follower, trainer, 3)
    assert follower.status.skipped == ()


def test_behind_what_only_a_consolidated_manifest_tells_of(trainer: Trainer) -> None:
    """Also where it began to follow when the checkpoint's own was gone, or nothing can be read."""
    following = Follower(trainer.run.url, reader_wait_seconds=0.0)
    late = Follower(trainer.run.url, reader_wait_seconds=0.0)
    for follower in (following, late):
        trainer.commit(len(trainer.made) + 1)
        follower.poll()
    following.poll()
    with following.reading(), late.reading():
        trainer.commit(3)
        assert following.poll() and late.poll()  # their other copies are in use now, too
        trainer.commit(4)
        with pytest.raises(NotServing):
            following.poll()
        since = time.time() - (following.status.lag_seconds or 0)
        merge(trainer.run, trainer.made[-1])
        trainer.run.store.delete(manifest_key(4, 1))
        for follower in (following, late):
            for _ in range(2):
                with pytest.raises(NotServing):
                    follower.poll()
                assert follower.status.lag_checkpoints == 1
        assert time.time() - (following.status.lag_seconds or 0) == pytest.approx(since, abs=0.01)
        assert late.status.lag_seconds
        following._standings._committed_ms.clear()  # as where it never knew
        trainer.run.store.put(manifest_key(4, 1), b"damaged")
        for one in trainer.run._consolidated(consolidated_prefix(4, 1)):
            trainer.run.store.delete(one.key)
        assert not following.poll()
        assert time.time() - (following.status.lag_seconds or 0) == pytest.approx(since, abs=0.01)


def test_starts_with_the_newest_that_is_good(trainer: Trainer) -> None:
    trainer.commit(1)
    trainer.commit(2)
    trainer.run.store.delete(trainer.made[-1].chunks[0].key)
    follower = Follower(trainer.run.url)
    assert follower.poll()
    require(follower, trainer, 1)
    assert follower.status.skipped[0].name.step == 2


def test_pins_to_an_older_version_and_back(trainer: Trainer) -> None:
    follower = Follower(trainer.run.url)
    for step in (1, 2, 3):
        trainer.commit(step)
        follower.poll()
    follower.pin(2)
    assert follower.poll()
    require(follower, trainer, 2)
    trainer.commit(4)
    assert not follower.poll()
    assert follower.status.pinned == 2 and follower.status.lag_checkpoints == 2
    follower.unpin()
    assert follower.poll()
    require(follower, trainer, 4)
    follower.pin(77)
    with pytest.raises(NothingToRestore, match="step 77"):
        follower.poll()
    require(follower, trainer, 4)
    assert follower.status.error and "step 77" in follower.status.error


def test_a_trainer_that_went_back_takes_the_follower_along(trainer: Trainer) -> None:
    follower = Follower(trainer.run.url)
    for step in (1, 2, 3):
        trainer.commit(step)
    follower.poll()
    trainer.run.claim(trainer.made[0].ref)
    assert follower.poll()
    require(follower, trainer, 1)
    trainer.generation = 2
    trainer.commit(2, parent=trainer.made[0])
    assert follower.poll()
    require(follower, trainer, 2)


def test_goes_on_serving_what_retention_deleted(trainer: Trainer) -> None:
    follower = Follower(trainer.run.url)
    for step in (1, 2):
        trainer.commit(step, full=True)
    follower.poll()
    trainer.commit(3, full=True)
    trainer.run.store.delete(trainer.made[1].chunks[0].key)
    trainer.run.store.delete("manifests/000000000002-00000001.json")
    trainer.run.store.delete(trainer.made[2].chunks[0].key)
    assert not follower.poll()  # not back to step 1 because step 3 is damaged
    require(follower, trainer, 2)


def _validated(run: Run, manifest: Manifest, result: str) -> None:
    finding = {"subject": "items", "row": 1, "what": "values"}
    finding |= {"found": "1", "expected": "2", "bound": "0"}
    record = ValidationRecord.model_validate(
        {
            "run": run.id,
            "checkpoint": manifest.ref.model_dump(),
            "level": "sample",
            "result": result,
            "links_read": 1,
            "chunks_read": 1,
            "bytes_read": 1,
            "rows_compared": 1,
            "worst_ppm": 0,
            "digests": [],
            "findings": [] if result == "passed" else [finding],
            "more_findings": 0,
            "evaluated_by": "",
            "started_ms": 1,
            "finished_ms": 2,
            "writer": "test",
        },
        strict=False,
    )
    validations.add_record(run, record)


def test_leaves_what_a_validation_found_wrong(trainer: Trainer) -> None:
    follower = Follower(trainer.run.url)
    newest = [trainer.commit(step, full=True) for step in (1, 2)][-1]
    follower.poll()
    _validated(trainer.run, newest, "failed")
    assert follower.poll()
    require(follower, trainer, 1)
    assert "validation 1" in follower.status.skipped[0].error


def test_the_channel_of_validated_ones(trainer: Trainer) -> None:
    follower = Follower(trainer.run.url, channel="validated")
    made = [trainer.commit(step) for step in (1, 2, 3)]
    assert not follower.poll()
    with pytest.raises(NotServing), follower.reading():
        pass
    _validated(trainer.run, made[1], "passed")
    assert follower.poll()
    require(follower, trainer, 2)


def test_only_the_tables_that_are_named(trainer: Trainer) -> None:
    trainer.commit(1)
    follower = Follower(trainer.run.url, tables=["users"])
    follower.poll()
    trainer.commit(2)
    follower.poll()
    with follower.reading() as version:
        assert list(version.tables) == ["users"]
        assert torch.equal(version.lookup("users", torch.arange(20)), trainer.at[2][1])
    other = Follower(trainer.run.url, tables=["nobody"])
    with pytest.raises(IncompatibleModel, match="nobody"):
        other.poll()


def test_a_reader_keeps_its_version_and_updates_wait(trainer: Trainer) -> None:
    follower = Follower(trainer.run.url, reader_wait_seconds=0.0)
    trainer.commit(1)
    follower.poll()
    with follower.reading() as old:
        before = old.lookup("items", torch.arange(40)).clone()
        trainer.commit(2)
        assert follower.poll()
        require(follower, trainer, 2)
        trainer.commit(3)
        with pytest.raises(NotServing, match=r"1 request\(s\)"):
            follower.poll()
        assert torch.equal(old.lookup("items", torch.arange(40)), before)
        assert old.step == 1
    assert follower.poll()
    require(follower, trainer, 3)


def test_the_lease_is_there_while_reading_and_gone_after(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer.commit(1)
    follower = Follower(trainer.run.url)
    seen: list[str] = []
    get = follower._store.get

    def watched(key: str, *, max_bytes: int) -> bytes:
        seen.extend(held.who for held in leases(trainer.run, Clocks.read()))
        return get(key, max_bytes=max_bytes)

    monkeypatch.setattr(follower._store, "get", watched)
    follower.poll()
    assert any(who.startswith("follow by process") for who in seen)
    assert leases(trainer.run, Clocks.read()) == []


def test_lag_is_right_at_the_look_that_goes_back(trainer: Trainer) -> None:
    for step in (10, 20, 30, 40):
        trainer.commit(step)
    follower = Follower(trainer.run.url)
    follower.poll()
    follower.pin(20)
    assert follower.poll()
    first = follower.status
    assert (first.lag_checkpoints, first.lag_batches) == (2, 20)
    assert first.lag_seconds is not None and first.lag_seconds > 0
    assert not follower.poll()
    assert follower.status.lag_checkpoints == 2
    follower.unpin()
    assert follower.poll()
    assert (follower.status.lag_checkpoints, follower.status.lag_seconds) == (0, 0.0)


def test_only_what_is_ahead_counts_as_skipped(trainer: Trainer) -> None:
    for step in (10, 20, 30, 40, 50):
        trainer.commit(step)
    for number in (1, 2):
        _validated(trainer.run, trainer.made[number], "passed")
    follower = Follower(trainer.run.url, channel="validated")
    for moved in (True, False):
        assert follower.poll() is moved
        status = follower.status
        assert follower.version == 30
        assert [one.name.step for one in status.skipped] == [50, 40]
    follower.pin(10)  # which was not validated itself
    for _ in range(2):
        follower.poll()
        status = follower.status
        assert [one.name.step for one in status.skipped] == [50, 40]
        assert status.lag_checkpoints == 2


def test_what_is_published_stays_and_its_failed_validation_is_told(trainer: Trainer) -> None:
    for step in (1, 2):
        trainer.commit(step, full=True)
    publications.publish(trainer.run, ManifestName(2, 1), held=True)
    follower = Follower(trainer.run.url, channel="published")
    follower.poll()
    assert follower.status.doubt is None
    _validated(trainer.run, trainer.made[1], "failed")
    assert not follower.poll()
    assert follower.version == 2 and follower.status.error is None
    assert follower.status.doubt == "validation 1 found wrong or damaged rows"
    publications.publish(trainer.run, ManifestName(1, 1), release=True)
    assert follower.poll() and follower.status.doubt is None
    publications.publish(trainer.run, ManifestName(2, 1), force=True)
    assert follower.poll()
    assert follower.status.doubt == "validation 1 found wrong or damaged rows"


def test_no_run_yet(tmp_path: Path) -> None:
    follower = Follower(str(tmp_path / "later"))
    with pytest.raises(NothingToRestore):
        follower.poll()
    assert follower.version is None and follower.lag_seconds is None
    assert follower.status.error is not None
    with pytest.raises(NotServing), follower.reading():
        pass
    run = new_run(tmp_path / "later")
    run.claim(None)
    trainer = Trainer(run, tables())
    trainer.commit(1)
    assert follower.poll() and follower.version == 1


@pytest.mark.parametrize("channel", CHANNELS)
def test_a_run_that_is_gone_or_replaced_is_no_run_without_news(
    trainer: Trainer, tmp_path: Path, channel: Channel
) -> None:
    trainer.commit(1)
    publications.publish(trainer.run, ManifestName(1, 1))
    _validated(trainer.run, trainer.made[0], "passed")
    follower = Follower(trainer.run.url, channel=channel)
    follower.poll()
    here, away = Path(trainer.run.url), tmp_path / "away"
    here.rename(away)  # as a mount that is lost: all of its listings are empty
    with pytest.raises(NothingToRestore, match="run.json"):
        follower.poll()
    assert follower.status.error is not None
    require(follower, trainer, 1)
    other = Trainer(new_run(here), tables())
    other.run.claim(None)
    other.commit(2)
    with pytest.raises(ForeignObject, match="which is followed"):
        follower.poll()
    require(follower, trainer, 1)
    here.rename(tmp_path / "other")
    away.rename(here)
    assert not follower.poll() and follower.status.error is None


@pytest.mark.parametrize("quantized", [False, True])
def test_ids_that_are_no_integers_are_refused(trainer: Trainer, quantized: bool) -> None:
    trainer.tables[0].bits = 4
    trainer.commit(1)
    follower = Follower(trainer.run.url, quantized=quantized)
    follower.poll()
    with follower.reading() as version, pytest.raises((TypeError, RuntimeError), match="(?i)int"):
        version.lookup(trainer.tables[0].name, torch.tensor([0.5]))


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("row", [-1, 20])
def test_a_row_that_is_not_there_is_named(trainer: Trainer, quantized: bool, row: int) -> None:
    trainer.commit(7)
    follower = Follower(trainer.run.url, quantized=quantized)
    follower.poll()
    assert trainer.tables[1].rows == 20
    with follower.reading() as version, pytest.raises(IndexError) as refused:
        version.lookup("users", torch.tensor([[3, row], [0, 19]]))
    assert isinstance(refused.value, UnknownRow)
    assert str(refused.value).startswith(
        f"table 'users': found row {row} among 4 ids; expected rows 0 … 19, of 20 at step 7. Next: "
    )


def test_a_table_that_is_not_served_is_named(trainer: Trainer) -> None:
    trainer.commit(7)
    follower = Follower(trainer.run.url, tables=["users"])
    follower.poll()
    with follower.reading() as version, pytest.raises(KeyError) as refused:
        version.lookup("items", torch.tensor([0]))
    assert isinstance(refused.value, UnknownTable)
    assert str(refused.value).startswith(
        "table 'items': found no such table at step 7; expected one of 'users'. Next: "
    )


def test_a_pin_to_what_is_not_there_is_named(trainer: Trainer) -> None:
    trainer.commit(1)
    follower = Follower(trainer.run.url)
    for pinned in ((7, None), (1, 7)):
        follower.pin(*pinned)
        with pytest.raises(NothingToRestore, match="pinned to"):
            follower.poll()


def test_settings_are_checked(tmp_path: Path) -> None:
    url = str(tmp_path)
    settings: list[dict[str, Any]] = [{"channel": "best"}, {"poll_seconds": 0.0}, {"threads": 0}]
    for wrong in settings:
        with pytest.raises(SettingsError, match=next(iter(wrong))):
            Follower(url, **wrong)
    with pytest.raises(SettingsError, match="tables"):
        Follower(url, model=torch.nn.Embedding(3, 3), tables=["weight"])


def test_a_version_is_never_seen_with_the_lag_of_another(trainer: Trainer) -> None:
    """Requests are given a version before the lease of the move to it is released."""
    seen: list[tuple[int | None, int, bool]] = []

    def called(call: str, key: str) -> None:
        if call == "delete" and key.startswith(LEASES_PREFIX):
            status = follower.status
            assert bool(status.lag_seconds) == bool(follower.lag_seconds)
            seen.append((follower.version, status.lag_checkpoints, bool(status.lag_seconds)))

    follower = Follower(trainer.run.url)
    follower._store = InterposedStore(follower._store, before=called)
    for step in (1, 2):
        trainer.commit(step)
        assert follower.poll()
    follower.pin(1)
    assert follower.poll()
    follower.unpin()
    assert follower.poll()
    assert seen == [(1, 0, False), (2, 0, False), (1, 1, True), (2, 0, False)]
