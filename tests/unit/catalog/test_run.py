"""Runs and generations: who owns a run, and who knows it (format §4, §5, §6.1)."""

from __future__ import annotations

import errno
import os
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from recpoint.catalog.run.run import Run
from recpoint.catalog.run.run_record import remake_run_record
from recpoint.catalog.store.contract import probe_create_only
from recpoint.catalog.store.local import LocalStore
from recpoint.errors import (
    DigestMismatch,
    ForeignObject,
    FormatError,
    MissingLink,
    NothingToRestore,
    ObjectExists,
    StoreUnavailable,
)
from recpoint.format.naming import CONSOLIDATED_KEY, GENERATION_KEY, MANIFEST_KEY
from recpoint.format.records import CheckpointRef
from tests.catalog_builder import build, new_run, publish, tables
from tests.consolidation import merge, trained
from tests.interposed_store import InterposedStore, unavailable


def at_once(count: int, work: Callable[[], object]) -> list[object]:
    barrier = threading.Barrier(count)

    def together() -> object:
        barrier.wait(240)
        return work()

    with ThreadPoolExecutor(count) as pool:
        return [future.result() for future in [pool.submit(together) for _ in range(count)]]


def flip(path: Path) -> None:
    """Change one bit of a value, so that the JSON stays JSON."""
    data = bytearray(path.read_bytes())
    data[data.index(b'"run":"') + 12] ^= 1
    path.write_bytes(data)


def test_a_url_without_a_run_says_so(tmp_path: Path) -> None:
    with pytest.raises(NothingToRestore, match=r"no run\.json"):
        Run.open(LocalStore(tmp_path))


def test_creating_twice_gives_the_same_run(tmp_path: Path) -> None:
    first = Run.create(LocalStore(tmp_path))
    assert Run.create(LocalStore(tmp_path)).record == first.record
    assert Run.open(LocalStore(tmp_path)).record == first.record


def test_a_directory_that_another_makes_and_removes_at_once_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As two do that look at the same moment whether a store can create."""
    made = os.mkdir
    refused: list[object] = []

    def mkdir(path: Path, mode: int = 0o777) -> None:
        if path.name == "chunks" and not refused:
            refused.append(path)
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
        made(path, mode)

    monkeypatch.setattr(os, "mkdir", mkdir)
    store = LocalStore(tmp_path)
    store.put("chunks/one", b"1")
    assert refused and store.get("chunks/one", max_bytes=9) == b"1"


def test_of_many_creators_all_get_the_winners_run(tmp_path: Path) -> None:
    runs = at_once(6, lambda: Run.create(LocalStore(tmp_path)).id)
    assert len(set(runs)) == 1


def test_a_damaged_run_record_is_named(tmp_path: Path) -> None:
    new_run(tmp_path)
    flip(tmp_path / "run.json")
    with pytest.raises(FormatError, match=r"run\.json") as caught:
        Run.open(LocalStore(tmp_path))
    assert caught.value.next_step.startswith("put run.json back")


@pytest.mark.parametrize("left", ["generations", "manifests", "consolidated"])
def test_no_run_is_made_beside_what_another_has_left(left: str, tmp_path: Path) -> None:
    run = new_run(tmp_path)
    made = build(run, tables(), step=10, generation=run.claim(None).generation)
    publish(run, made)
    (tmp_path / "run.json").unlink()
    if left == "consolidated":
        merged = CONSOLIDATED_KEY.of(10, 1, None)
        (tmp_path / merged).parent.mkdir()
        (tmp_path / MANIFEST_KEY.of(10, 1)).rename(tmp_path / merged)
    if left != "generations":
        (tmp_path / GENERATION_KEY.of(1)).unlink()
    store = LocalStore(tmp_path)
    for call in (Run.create, Run.open):
        with pytest.raises(NothingToRestore) as refused:
            call(store)
        assert refused.value.subject.endswith("run.json") and left in refused.value.found
        assert run.id in refused.value.found
        assert f"recpoint bring-back {tmp_path}" in refused.value.next_step
    assert not (tmp_path / "run.json").exists()
    record, told_by = remake_run_record(store)
    assert (record.run, told_by) == (run.id, 1)
    assert Run.create(store).id == run.id
    with pytest.raises(ForeignObject, match=f"the record of run {run.id}"):
        remake_run_record(store)


def test_a_damaged_run_record_is_moved_away_and_made_anew(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    run.claim(None)
    (tmp_path / "run.json").write_bytes(b"{")
    store = LocalStore(tmp_path)
    for call in (Run.create, Run.open, remake_run_record):
        with pytest.raises(FormatError) as refused:
            call(store)
        assert "recpoint bring-back" in refused.value.next_step
    (tmp_path / "run.json").rename(tmp_path.parent / "damaged.json")
    assert remake_run_record(store)[0].run == run.id


def test_a_lost_run_record_is_not_guessed(tmp_path: Path) -> None:
    run, other = new_run(tmp_path / "run"), new_run(tmp_path / "other")
    run.claim(None)
    other.claim(None)
    (tmp_path / "run" / "run.json").unlink()
    taken = (tmp_path / "other" / GENERATION_KEY.of(1)).read_bytes()
    (tmp_path / "run" / GENERATION_KEY.of(2)).write_bytes(taken)
    store = LocalStore(tmp_path / "run")
    with pytest.raises(ForeignObject, match="records of 2 runs"):
        remake_run_record(store)
    for number in (1, 2):
        (tmp_path / "run" / GENERATION_KEY.of(number)).write_bytes(b"garbage")
    with pytest.raises(NothingToRestore, match="which is damaged too"):
        Run.create(store)
    with pytest.raises(NothingToRestore, match="tells the run's id"):
        remake_run_record(store)
    assert not (tmp_path / "run" / "run.json").exists()


def test_a_run_that_is_made_while_another_looks_is_found(tmp_path: Path) -> None:
    """Its record, and its first generation, between two looks of a second trainer."""
    ids: list[str] = []

    def made_meanwhile(operation: str, key: str) -> None:
        if operation == "list" and not ids:
            run = new_run(tmp_path)
            ids.append(run.id)
            run.claim(None)

    store = InterposedStore(LocalStore(tmp_path), before=made_meanwhile)
    assert [Run.create(store).id] == ids


def test_generations_are_numbered_from_one_and_say_who_claimed(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    ref = CheckpointRef(step=7, generation=1, attempt="a" * 32)
    assert [run.claim(None).generation, run.claim(ref).generation] == [1, 2]
    fresh = Run.open(LocalStore(tmp_path))
    assert [record.restored for record in fresh.generations()] == [None, ref]
    assert {record.run for record in fresh.generations()} == {run.id}
    assert len({record.token for record in fresh.generations()}) == 2


def test_trainers_that_claim_at_once_get_different_numbers(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    numbers = at_once(6, lambda: run.claim(None).generation)
    assert set(numbers) == {1, 2, 3, 4, 5, 6}


def test_a_claim_whose_answer_got_lost_is_recognised(tmp_path: Path) -> None:
    losing = [True]

    def lose(call: str, key: str) -> None:
        if call == "create" and key.startswith("generations/") and losing:
            losing.pop()
            raise unavailable(key)

    run = Run.create(InterposedStore(LocalStore(tmp_path), after=lose))
    assert run.claim(None).generation == 1
    assert run.generation_numbers() == [1]


def test_a_probe_whose_answer_got_lost_is_no_refusal(tmp_path: Path) -> None:
    losing = [True]

    def lose(call: str, key: str) -> None:
        # What a client that asks again after a lost answer is told: the object is there.
        if call == "create" and losing:
            losing.pop()
            raise ObjectExists(key, found="an object", expected="none", next_step="read it back")

    probe_create_only(InterposedStore(LocalStore(tmp_path), after=lose))
    assert not losing


def test_a_claim_ends_when_the_store_stays_away(tmp_path: Path) -> None:
    new_run(tmp_path)
    tries = []

    def refuse(call: str, key: str) -> None:
        if call == "create":
            tries.append(key)
            raise unavailable(key)

    run = Run.open(InterposedStore(LocalStore(tmp_path), before=refuse))
    with pytest.raises(StoreUnavailable):
        run.claim(None)
    assert 1 < len(tries) < 10
    assert run.generation_numbers() == []


def test_generation_records_are_read_once(tmp_path: Path) -> None:
    new_run(tmp_path).claim(None)
    store = InterposedStore(LocalStore(tmp_path))
    run = Run.open(store)
    run.live_line()
    run.live_line()
    assert store.calls.count(("get", GENERATION_KEY.of(1))) == 1


def test_a_damaged_generation_on_the_line_stops_the_reader(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    manifest = publish(run, build(run, tables(), step=5, generation=run.claim(None).generation))
    run.claim(manifest.ref)
    flip(tmp_path / GENERATION_KEY.of(2))
    fresh = Run.open(LocalStore(tmp_path))
    with pytest.raises(DigestMismatch) as caught:
        fresh.live_line()
    assert GENERATION_KEY.of(2) in caught.value.subject
    assert f"recpoint relink {tmp_path} 2" in caught.value.next_step
    with pytest.raises(DigestMismatch):
        fresh.generations()
    # The line before it can still be followed, and so can a checkpoint that somebody names.
    assert fresh.live_line(before=2) == [(5, 1)]
    assert fresh.manifest(5, 1) == manifest


def test_a_damaged_generation_beside_the_line_does_not(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    manifest = publish(run, build(run, tables(), step=5, generation=run.claim(None).generation))
    run.claim(None)
    run.claim(manifest.ref)
    flip(tmp_path / GENERATION_KEY.of(2))
    assert Run.open(LocalStore(tmp_path)).live_line() == [(5, 1)]


def test_a_missing_generation_is_named(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    manifest = publish(run, build(run, tables(), step=5, generation=run.claim(None).generation))
    run.claim(manifest.ref)
    run.store.delete(GENERATION_KEY.of(1))
    with pytest.raises(MissingLink, match=r"generations/00000001\.json"):
        Run.open(LocalStore(tmp_path)).live_line()


def test_a_generation_of_another_run_is_foreign(tmp_path: Path) -> None:
    ours, theirs = new_run(tmp_path / "ours"), new_run(tmp_path / "theirs")
    theirs.claim(None)
    ours.store.put(GENERATION_KEY.of(1), theirs.store.get(GENERATION_KEY.of(1), max_bytes=10_000))
    with pytest.raises(ForeignObject) as caught:
        ours.live_line()
    assert theirs.id in caught.value.found and ours.id in caught.value.expected


def test_a_manifest_of_another_run_or_place_is_foreign(tmp_path: Path) -> None:
    ours, theirs = new_run(tmp_path / "ours"), new_run(tmp_path / "theirs")
    for run in (ours, theirs):
        publish(run, build(run, tables(), step=5, generation=run.claim(None).generation))
    key = MANIFEST_KEY.of(5, 1)
    ours.store.put(MANIFEST_KEY.of(6, 1), ours.store.get(key, max_bytes=100_000))
    with pytest.raises(ForeignObject, match="the record of manifests/000000000005"):
        ours.manifest(6, 1)
    ours.store.put(key, theirs.store.get(key, max_bytes=100_000))
    with pytest.raises(ForeignObject, match=theirs.id):
        ours.manifest(5, 1)


def test_any_good_manifest_tells_of_a_checkpoint(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    run.claim(None)
    made = trained(run, tables(), [5, 6, 7, 8])
    merge(run, made[-1], links=2)
    merge(run, made[-1])
    own = MANIFEST_KEY.of(8, 1)
    full, after = CONSOLIDATED_KEY.of(8, 1, None), CONSOLIDATED_KEY.of(8, 1, 6)
    good = run.store.get(own, max_bytes=100_000)
    assert run.manifest(8, 1) == made[-1]
    run.store.put(own, b"damaged")
    assert (run.manifest(8, 1).ref, run.manifest(8, 1).kind) == (made[-1].ref, "full")
    run.store.put(full, b"damaged")
    assert (run.manifest(8, 1).ref, run.manifest(8, 1).kind) == (made[-1].ref, "increment")
    run.store.put(after, b"damaged")
    with pytest.raises(FormatError) as caught:
        run.manifest(8, 1)
    assert caught.value.subject == own
    run.store.delete(own)  # there is such a checkpoint all the same
    with pytest.raises(FormatError) as caught:
        run.manifest(8, 1)
    assert caught.value.subject == full
    run.store.put(own, good)
    assert run.manifest(8, 1) == made[-1]


def test_superseded_are_those_off_the_line(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    generation = run.claim(None).generation
    refs = [publish(run, build(run, tables(), step=s, generation=generation)) for s in (5, 9)]
    run.claim(refs[0].ref)
    assert run.live_line() == [(5, 1)]
    assert run.superseded() == [(9, 1)]


def test_a_run_can_be_sent_to_another_process(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    run.claim(None)
    sent = pickle.loads(pickle.dumps(run))
    assert (sent.id, sent.generations()) == (run.id, run.generations())


def test_keys_that_are_not_ours_are_ignored(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    run.claim(None)
    for key in ("generations/2.json", "generations/00000000.json", "manifests/notes.txt"):
        run.store.put(key, b"hello")
    assert run.generation_numbers() == [1]
    assert run.live_line() == []


class TestClaimFromNewest:
    """A trainer that starts while another still commits (format §6.1, write order, rule 1)."""

    def test_nothing_is_restored_twice_when_nothing_happens(self, tmp_path: Path) -> None:
        run = new_run(tmp_path)
        manifest = publish(run, build(run, tables(), step=5, generation=run.claim(None).generation))
        looks: list[int | None] = []

        def restore(before: int | None) -> CheckpointRef | None:
            looks.append(before)
            return manifest.ref

        assert run.claim_from_newest(restore).restored == manifest.ref
        assert looks == [None]

    def test_what_is_committed_meanwhile_is_restored_after_all(self, tmp_path: Path) -> None:
        run = new_run(tmp_path)
        old = run.claim(None).generation
        publish(run, build(run, tables(), step=5, generation=old))
        looks: list[int | None] = []

        def restore(before: int | None) -> CheckpointRef | None:
            looks.append(before)
            newest = run.live_line(before=before)[0]
            if before is None:
                publish(run, build(run, tables(), step=9, generation=old))
            return run.manifest(*newest).ref

        record = run.claim_from_newest(restore)
        assert record.restored is not None and record.restored.step == 9
        assert looks == [None, 2]
        assert run.live_line() == [(9, 1), (5, 1)]

    def test_a_newer_one_that_does_not_restore_leaves_the_claim(self, tmp_path: Path) -> None:
        run = new_run(tmp_path)
        old = run.claim(None).generation
        good = publish(run, build(run, tables(), step=5, generation=old))

        def restore(before: int | None) -> CheckpointRef | None:
            if before is None:
                publish(run, build(run, tables(), step=9, generation=old))
            return good.ref

        assert run.claim_from_newest(restore).generation == 2
        assert run.generation_numbers() == [1, 2]
