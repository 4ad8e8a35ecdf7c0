"""A follower copes with objects that are damaged, gone or doubted, and with consolidations."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from recpoint import Follower
from recpoint.catalog.run import publications
from recpoint.errors import (
    ForeignObject,
    NothingToRestore,
    NotServing,
)
from recpoint.format.naming import CONSOLIDATED_KEY, MANIFEST_KEY, ManifestName
from recpoint.format.records import pack_record
from recpoint.serving.goal import CHANNELS, Channel
from tests.catalog_builder import build, new_run, tables
from tests.consolidation import chain_of, merge
from tests.followed_run import Trainer, require, validated
from tests.polling import until


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
    # Half of step 2 is in the other copy. Step 3 goes on step 1, not on that half.
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
    key = CONSOLIDATED_KEY.of(3, 1, None)
    trainer.run.store.put(key, pack_record(merged.model_copy(update={"attempt": "f" * 32})))
    follower = Follower(trainer.run.url)
    assert follower.poll()
    require(follower, trainer, 3)
    assert [passed.key for passed in follower.status.passed_over] == [key]


def test_serves_what_only_a_consolidated_manifest_tells_of(trainer: Trainer) -> None:
    for step in (1, 2, 3):
        trainer.commit(step)
    merge(trainer.run, trainer.made[-1])
    trainer.run.store.put(MANIFEST_KEY.of(3, 1), b"damaged")
    follower = Follower(trainer.run.url)
    assert follower.poll()
    require(follower, trainer, 3)
    assert follower.status.skipped == ()


def test_behind_what_only_a_consolidated_manifest_tells_of(trainer: Trainer) -> None:
    """Lag is right also if the own manifest was gone at the first look, or if none can be read."""
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
        trainer.run.store.delete(MANIFEST_KEY.of(4, 1))
        for follower in (following, late):
            for _ in range(2):
                with pytest.raises(NotServing):
                    follower.poll()
                assert follower.status.lag_checkpoints == 1
        assert time.time() - (following.status.lag_seconds or 0) == pytest.approx(since, abs=0.01)
        assert late.status.lag_seconds
        following._standings._committed_ms.clear()  # as if it had never known
        trainer.run.store.put(MANIFEST_KEY.of(4, 1), b"damaged")
        for one in trainer.run._consolidated(4, 1):
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


def test_goes_on_serving_what_retention_deleted(trainer: Trainer) -> None:
    follower = Follower(trainer.run.url)
    for step in (1, 2):
        trainer.commit(step, full=True)
    follower.poll()
    trainer.commit(3, full=True)
    trainer.run.store.delete(trainer.made[1].chunks[0].key)
    trainer.run.store.delete("manifests/000000000002-00000001.json")
    trainer.run.store.delete(trainer.made[2].chunks[0].key)
    assert not follower.poll()  # damage to step 3 is no reason to go back to step 1
    require(follower, trainer, 2)


def test_leaves_what_a_validation_found_wrong(trainer: Trainer) -> None:
    follower = Follower(trainer.run.url)
    newest = [trainer.commit(step, full=True) for step in (1, 2)][-1]
    follower.poll()
    validated(trainer.run, newest, "failed")
    assert follower.poll()
    require(follower, trainer, 1)
    assert "validation 1" in follower.status.skipped[0].error


def test_what_is_published_stays_and_its_failed_validation_is_told(trainer: Trainer) -> None:
    for step in (1, 2):
        trainer.commit(step, full=True)
    publications.publish(trainer.run, ManifestName(2, 1), held=True)
    follower = Follower(trainer.run.url, channel="published")
    follower.poll()
    assert follower.status.doubt is None
    validated(trainer.run, trainer.made[1], "failed")
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
    with pytest.raises(NotServing, match="no run.json") as caught, follower.reading():
        pass
    assert "do what that says" in caught.value.next_step
    run = new_run(tmp_path / "later")
    run.claim(None)
    trainer = Trainer(run, tables())
    trainer.commit(1)
    assert follower.poll() and follower.version == 1


def test_no_run_is_said_at_the_first_look(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Follower(str(tmp_path / "typo"), poll_seconds=3600) as follower:
        until(lambda: bool(caplog.records))
    (said,) = caplog.messages
    assert said.startswith("serving nothing yet: NothingToRestore: ")
    assert str(tmp_path / "typo") in said and "found no run.json" in said
    assert "looking again every 3600 s" in said and follower.version is None


@pytest.mark.parametrize("channel", CHANNELS)
def test_a_run_that_is_gone_or_replaced_is_no_run_without_news(
    trainer: Trainer, tmp_path: Path, channel: Channel
) -> None:
    trainer.commit(1)
    publications.publish(trainer.run, ManifestName(1, 1))
    validated(trainer.run, trainer.made[0], "passed")
    follower = Follower(trainer.run.url, channel=channel)
    follower.poll()
    here, away = Path(trainer.run.url), tmp_path / "away"
    here.rename(away)  # like a lost mount: all of its listings are empty
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
