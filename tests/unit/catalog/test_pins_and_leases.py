"""What pins and leases keep from a retention, and how old they are (format §6.6, §6.7)."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from recpoint.catalog.check.check import check
from recpoint.catalog.consolidate.consolidate import consolidate
from recpoint.catalog.consolidate.plan import plan_consolidation
from recpoint.catalog.retention.prune import PruneResult, execute
from recpoint.catalog.run import deletions, leases, metrics, pins
from recpoint.catalog.run.deletions import announce
from recpoint.catalog.run.facts import gather
from recpoint.catalog.run.publications import publish
from recpoint.catalog.run.run import Run
from recpoint.catalog.store.contract import (
    PROBE_PREFIX,
    Clocks,
    ObjectInfo,
    Store,
    now_ms,
    store_ms,
)
from recpoint.catalog.store.store import open_store
from recpoint.errors import (
    ChainError,
    ForeignObject,
    NothingToRestore,
    ObjectNotFound,
    RetentionRefused,
    SettingsError,
    StoreAccessDenied,
    StoreUnavailable,
)
from recpoint.format.naming import (
    CHUNKS_PREFIX,
    CONSOLIDATED_KEY,
    DELETION_KEY,
    EXPIRED_KEY,
    LEASE_KEY,
    MANIFEST_KEY,
    METRIC_KEY,
    PIN_KEY,
    ManifestName,
    is_probe_key,
)
from recpoint.format.record_kinds import PIN
from recpoint.format.records import pack_record
from recpoint.format.retention_records import Pin, Stamp
from recpoint.testing.faults import Fault, FaultStore
from tests.interposed_store import InterposedStore, unavailable
from tests.no_threads import no_threads
from tests.polling import until
from tests.retained_run import (
    HOUR,
    add,
    age_file,
    consolidated,
    filled,
    keys,
    make_old,
    named,
    planned,
    require_tidy,
    retain,
    rewrite_lease,
    steps,
    values,
)


@pytest.fixture(params=["local", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """A place on a local disk, and one on the real S3 server."""
    if request.param == "local":
        return open_store(str(tmp_path / "run"))
    return open_store(request.getfixturevalue("s3_run_url"))


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return filled(open_store(str(tmp_path / "run")))


class TestPins:
    """A pin that was reported as set holds."""

    def test_it_keeps_the_checkpoint_and_its_chain(self, store: Store) -> None:
        run = filled(store)
        made = pins.pin(run, ManifestName(20, 1), label="release", who="ana", why="shipped")
        assert pins.pinned(run) == {ManifestName(20, 1): ("release",)}
        assert run.records(PIN).read(20, 1, "release") == made
        retain(run)
        retain(run)
        assert steps(run) == [10, 20, 40, 50]
        assert check(run, level="full").ok
        again = pins.pin(run, ManifestName(20, 1), label="release", who="bob")
        assert again.who == "ana"
        pins.unpin(run, ManifestName(20, 1), label="release")
        retain(run)
        retain(run)
        require_tidy(run, [40, 50])

    def test_it_rescues_what_is_marked_and_the_grace_begins_anew(self, run: Run) -> None:
        retain(run)
        make_old(run, 2 * HOUR)
        pins.pin(run, ManifestName(20, 1))
        assert keys(run) & {EXPIRED_KEY.of(named(run, s)) for s in (10, 20, 30)} == {
            EXPIRED_KEY.of(named(run, 30))
        }
        pins.unpin(run, ManifestName(20, 1))
        result = retain(run, grace=HOUR)
        assert result.deleted == (named(run, 30),) and steps(run) == [10, 20, 40, 50]

    def test_one_that_cannot_be_read_counts(self, run: Run) -> None:
        run.store.put(PIN_KEY.of(30, 1, "pin"), b"damaged")
        assert planned(run).mark == ()

    @pytest.mark.parametrize(
        "wrong", [{"name": "other"}, {"checkpoint": 10}, {"run": "f" * 32}], ids=lambda w: min(w)
    )
    def test_one_that_says_what_its_key_does_not_counts_and_is_refused(
        self, run: Run, wrong: dict[str, object]
    ) -> None:
        made = pins.pin(run, ManifestName(30, 1), label="release")
        if "checkpoint" in wrong:
            wrong = {"checkpoint": run.manifest(10, 1).ref}
        run.store.put(PIN_KEY.of(30, 1, "release"), pack_record(made.model_copy(update=wrong)))
        with pytest.raises(ForeignObject, match="the record of pins") as refused:
            run.records(PIN).read(30, 1, "release")
        assert f"recpoint unpin {run.url} 30 --name release" in refused.value.next_step
        assert pins.pinned(run) == {ManifestName(30, 1): ("release",)}
        assert planned(run).mark == ()

    def test_one_of_no_checkpoint_is_told_and_left(self, run: Run) -> None:
        key = PIN_KEY.of(25, 1, "pin")
        run.store.put(key, b"of something that is gone")
        plan = planned(run)
        assert plan.stray_pins == (key,) and len(plan.mark) == 3
        execute(run, plan)
        assert key in keys(run)

    def test_two_pins_of_one_checkpoint_are_removed_one_by_one(self, run: Run) -> None:
        for label in ("ana", "bob"):
            pins.pin(run, ManifestName(10, 1), label=label)
        pins.unpin(run, ManifestName(10, 1), label="ana")
        assert pins.pinned(run) == {ManifestName(10, 1): ("bob",)}
        with pytest.raises(NothingToRestore, match="the pins bob"):
            pins.unpin(run, ManifestName(10, 1), label="ana")

    @pytest.mark.parametrize("label", ["", "A", "../x", "x" * 65, "a b"])
    def test_labels_that_no_key_can_hold(self, run: Run, label: str) -> None:
        with pytest.raises(SettingsError):
            pins.pin(run, ManifestName(10, 1), label=label)

    def test_no_pin_of_what_is_not_there_or_does_not_restore(self, run: Run) -> None:
        with pytest.raises(ObjectNotFound):
            pins.pin(run, ManifestName(11, 1))
        run.store.delete(named(run, 10))
        with pytest.raises(ChainError):
            pins.pin(run, ManifestName(30, 1))
        assert pins.pinned(run) == {}

    def test_too_late_once_the_deletion_is_announced(self, run: Run) -> None:
        retain(run)

        def pin(call: str, key: str) -> None:
            if call == "delete" and key.startswith("manifests/"):
                for step in (10, 20, 30):
                    # 30 may be gone already: then it is not there to be pinned.
                    with pytest.raises((RetentionRefused, ObjectNotFound)):
                        pins.pin(run, ManifestName(step, 1))

        execute(Run.open(InterposedStore(run.store, before=pin)), planned(run))
        require_tidy(run, [40, 50])

    def test_in_time_right_before_the_announcement(self, run: Run) -> None:
        retain(run)

        def pin(call: str, key: str) -> None:
            if (call, key) == ("create", DELETION_KEY):
                pins.pin(run, ManifestName(20, 1))

        result = execute(Run.open(InterposedStore(run.store, before=pin)), planned(run))
        assert result.deleted == (named(run, 30),)
        assert {key for key, _ in result.spared} == {named(run, 10), named(run, 20)}
        assert steps(run) == [10, 20, 40, 50] and check(run, level="full").ok

    def test_deleted_between_the_looks_of_the_pin(self, run: Run) -> None:
        retain(run)
        plan = planned(run)

        def delete(call: str, key: str) -> None:
            if (call, key) == ("create", PIN_KEY.of(10, 1, "pin")):
                execute(run, plan)

        with pytest.raises((ObjectNotFound, ChainError)):
            pins.pin(Run.open(InterposedStore(run.store, before=delete)), ManifestName(10, 1))
        require_tidy(run, [40, 50])

    def test_a_holder_that_loses_the_store_leaves_the_pin_to_who_has_found_it(
        self, run: Run
    ) -> None:
        key = PIN_KEY.of(30, 1, "release")
        others: list[Pin] = []

        def lose(call: str, at: str) -> None:
            if at.startswith("manifests/") and key in keys(run):
                if not others:
                    others.append(pins.pin(run, ManifestName(30, 1), label="release"))
                raise unavailable(at)

        losing = Run.open(InterposedStore(run.store, before=lose))
        with pytest.raises(StoreUnavailable):
            pins.pin(losing, ManifestName(30, 1), label="release", who="ana")
        assert [one.who for one in others] == ["ana"]
        assert pins.pinned(run) == {ManifestName(30, 1): ("release",)}

    def test_what_restores_without_what_is_being_deleted_is_pinned(self, store: Store) -> None:
        run = Run.create(store)
        run.claim(None)
        parent = None
        for step in (10, 20, 30):
            parent = add(run, step, parent)
        consolidated(run, 30)
        add(run, 40, parent)
        retain(run)

        def die(call: str, key: str) -> None:
            if (call, key) == ("delete", named(run, 20)):
                raise unavailable(key)

        with pytest.raises(StoreUnavailable):
            execute(Run.open(InterposedStore(run.store, before=die)), planned(run))
        doomed = deletions.read_deletion(run)
        assert doomed is not None and set(doomed.manifests) == {
            named(run, step) for step in (10, 20, 30)
        }
        was = values(run, 40)
        pins.pin(run, ManifestName(30, 1))
        assert publish(run, ManifestName(40, 1)).created
        for step in (10, 20):
            with pytest.raises(RetentionRefused, match="is being deleted"):
                pins.pin(run, ManifestName(step, 1))
        result = execute(run, planned(run), take_over_seconds=0)
        assert set(result.deleted) == {named(run, 10), named(run, 20)} and steps(run) == [30, 40]
        assert check(run, level="full").ok
        assert all(map(torch.equal, was, values(run, 40)))

    def test_another_chain_at_the_second_look_is_looked_up_too(self, run: Run) -> None:
        mine = announce(run, (CONSOLIDATED_KEY.of(30, 1, None),))

        def merge(call: str, key: str) -> None:
            if (call, key) == ("get", DELETION_KEY) and not run.consolidated():
                consolidated(run, 30)

        with pytest.raises(RetentionRefused, match="consolidated/000000000030"):
            pins.pin(Run.open(InterposedStore(run.store, before=merge)), ManifestName(30, 1))
        assert pins.pinned(run) == {}
        mine.withdraw()


class TestMetrics:
    """What was measured counts for the checkpoint and under the name that the key has."""

    @pytest.mark.parametrize(
        "to",
        [METRIC_KEY.of(10, 1, "loss"), METRIC_KEY.of(20, 1, "auc"), METRIC_KEY.of(20, 1, "loss")],
    )
    def test_one_under_anothers_key_is_left_out(self, run: Run, to: str) -> None:
        metrics.record_metric(run, ManifestName(10, 1), "auc", 0.75)
        data = run.store.get(METRIC_KEY.of(10, 1, "auc"), max_bytes=1 << 20)
        run.store.put(to, data)
        assert metrics.read_metrics(run, ["loss", "auc"], of=run.manifest_names()) == {
            "loss": {},
            "auc": {ManifestName(10, 1): 0.75},
        }

    def test_a_bit_that_flips_on_the_way_loses_none(self, run: Run) -> None:
        metrics.record_metric(run, ManifestName(10, 1), "auc", 0.75)
        store = FaultStore(run.store, [Fault.flip(key_contains="metrics/")])
        found = metrics.read_metrics(Run.open(store), ["auc"], of=run.manifest_names())
        assert found == {"auc": {ManifestName(10, 1): 0.75}}

    def test_those_of_deleted_checkpoints_are_not_read_and_go_with_the_chunks(
        self, run: Run
    ) -> None:
        for step in steps(run):
            metrics.record_metric(run, ManifestName(step, 1), "auc", 0.5)
            metrics.record_metric(run, ManifestName(step, 1), "loss", 0.5)
        kept = {METRIC_KEY.of(step, 1, name) for step in (40, 50) for name in ("auc", "loss")}
        run.store.delete(MANIFEST_KEY.of(30, 1))  # nothing stands on it
        store = InterposedStore(run.store)
        facts = gather(Run.open(store), metrics=["auc"])
        assert facts.metrics["auc"].keys() == {ManifestName(s, 1) for s in (10, 20, 40, 50)}
        read = {key for call, key in store.calls if call == "get" and key.startswith("metrics/")}
        assert read == {METRIC_KEY.of(step, 1, "auc") for step in (10, 20, 40, 50)}
        retain(run)
        retain(run)
        assert {key for key in keys(run) if key.startswith("metrics/")} == kept
        assert steps(run) == [40, 50]


class TestLeases:
    """Who reads is not deleted from under; who is dead is not waited for."""

    def test_nothing_is_deleted_while_everything_is_read(self, store: Store) -> None:
        run = filled(store)
        retain(run)
        with leases.reading(run, purpose="restore"):
            plan = planned(run)
            assert plan.held[0].startswith("restore by process ")
            assert execute(run, plan).deleted == ()
            assert steps(run) == [10, 20, 30, 40, 50]
        assert len(retain(run).deleted) == 3
        require_tidy(run, [40, 50])

    def test_a_running_consolidation_keeps_what_it_reads(self, run: Run) -> None:
        retain(run)  # marks it
        meanwhile: list[PruneResult] = []

        def delete(call: str, key: str) -> None:
            if call in ("put", "create") and key.startswith(CHUNKS_PREFIX) and not meanwhile:
                meanwhile.append(retain(run))

        reading = Run.open(InterposedStore(run.store, before=delete))
        consolidate(reading, plan_consolidation(reading, ManifestName(30, 1)))
        (result,) = meanwhile
        assert result.deleted == () and set(result.unmarked) == {
            named(run, s) for s in (10, 20, 30)
        }
        assert ManifestName(30, 1) in run.consolidated()
        retain(run)
        retain(run)
        require_tidy(run, [40, 50])

    def test_a_lease_that_comes_right_before_the_deletion_is_seen(self, run: Run) -> None:
        retain(run)
        held: list[leases.HeldLease] = []

        def begin(call: str, key: str) -> None:
            if (call, key) == ("create", DELETION_KEY):
                held.append(leases.HeldLease(run, purpose="restore"))

        result = execute(Run.open(InterposedStore(run.store, before=begin)), planned(run))
        assert result.deleted == () and steps(run) == [10, 20, 30, 40, 50]
        assert not planned(run).unfinished  # nothing was begun: it may be pinned as before
        held[0].release()
        retain(run)
        require_tidy(run, [40, 50])

    def test_a_lease_of_some_keeps_those_and_their_chains(self, run: Run) -> None:
        lease = leases.HeldLease(run, purpose="publish", covers=[run.manifest(20, 1).ref])
        retain(run)
        retain(run)
        assert steps(run) == [10, 20, 40, 50]
        lease.renew(covers=[run.manifest(10, 1).ref])
        retain(run)
        retain(run)
        assert steps(run) == [10, 40, 50]
        lease.release()
        retain(run)
        retain(run)
        require_tidy(run, [40, 50])

    def test_one_that_was_not_renewed_in_time_is_removed(self, run: Run) -> None:
        lease = leases.HeldLease(run, purpose="restore", ttl_seconds=60)
        retain(run)
        (found,) = leases.read_leases(run, Clocks.read(run.store))
        rewrite_lease(run, found, Stamp(written_ms=now_ms() - 61_000, boot=None, boot_ms=0))
        assert planned(run).held  # the store says that it is young
        age_file(run, found.key, 61)
        plan = planned(run)
        assert plan.held == () and plan.expired_leases == (found.key,)
        lease.renew()  # between plan and deed: it is there to stay
        assert execute(run, plan).deleted == () and found.key in keys(run)
        rewrite_lease(run, found, Stamp(written_ms=now_ms() - 61_000, boot=None, boot_ms=0))
        age_file(run, found.key, 61)
        plan = planned(run)
        assert len(execute(run, plan).deleted) == 3
        lease.renew()  # its owner lives after all, and finds nothing missing that it may rely on
        assert planned(run).held

    def test_one_from_the_future_is_given_a_stamp_that_ends(self, run: Run) -> None:
        leases.HeldLease(run, purpose="restore", ttl_seconds=60)
        (found,) = leases.read_leases(run, Clocks.read())
        rewrite_lease(run, found, Stamp(written_ms=now_ms() + 10**9, boot=None, boot_ms=0))
        plan = planned(run)
        assert plan.held and len(plan.adopt) == 1
        execute(run, plan)
        (adopted,) = leases.read_leases(run, Clocks.read())
        assert adopted.lease is not None and adopted.lease.stamp.written_ms <= now_ms()
        assert planned(run).held and planned(run).adopt == ()

    def test_one_that_cannot_be_read_is_honoured_for_a_week(self, run: Run) -> None:
        key = LEASE_KEY.of("ab" * 16)
        run.store.put(key, b"damaged")
        retain(run)
        assert planned(run).held[0].startswith("unreadable")
        age_file(run, key, 8 * 24 * HOUR)
        assert planned(run).expired_leases == (key,)

    @pytest.mark.parametrize("wrong", ["run", "owner"])
    def test_one_of_another_run_or_owner_covers_nobody_knows_what(
        self, run: Run, wrong: str
    ) -> None:
        """Honoured like one that cannot be read, not for what it says, nor for as long."""
        lease = leases.HeldLease(run, purpose="restore", covers=[], ttl_seconds=3600)
        lease.renew()
        (found,) = leases.read_leases(run, Clocks.read())
        assert found.lease is not None and found.covers == ()
        run.store.put(
            found.key, pack_record(found.lease.model_copy(update={wrong: secrets.token_hex(16)}))
        )
        (foreign,) = leases.read_leases(run, Clocks.read())
        assert foreign.alive and foreign.covers is None and foreign.lease is None
        assert foreign.who.startswith("unreadable: the record of leases/")
        retain(run)
        assert planned(run).held
        age_file(run, found.key, 8 * 24 * HOUR)
        assert planned(run).expired_leases == (found.key,)

    def test_a_bit_that_flips_on_the_way_makes_no_lease_unreadable(self, run: Run) -> None:
        leases.HeldLease(run, purpose="restore", covers=[])
        store = FaultStore(run.store, [Fault.flip(key_contains="leases/")])
        (found,) = leases.read_leases(Run.open(store), Clocks.read())
        assert found.lease is not None and found.covers == ()

    def test_who_may_not_write_reads_without(self, run: Run) -> None:
        def refuse(call: str, key: str) -> None:
            if call == "put":
                raise StoreAccessDenied(key, found="403", expected="200", next_step="ask")

        with leases.reading(
            Run.open(InterposedStore(run.store, before=refuse)), purpose="restore"
        ) as lease:
            assert lease is None

    def test_who_cannot_start_the_thread_that_renews_it_reads_without(self, run: Run) -> None:
        with (
            pytest.raises(LookupError) as raised,
            no_threads(),
            leases.reading(run, purpose="restore") as lease,
        ):
            assert lease is None
            assert leases.read_leases(run, Clocks.read()) == []
            raise LookupError("of the reader's own")
        assert raised.value.__context__ is None

    def test_it_is_renewed_for_as_long_as_the_reader_reads(self, run: Run) -> None:
        puts: list[str] = []

        def refuse(call: str, key: str) -> None:
            if call == "put":
                puts.append(key)
                if len(puts) == 2:
                    raise unavailable(key)  # a renewal that fails is tried again

        def written_ms() -> int:
            (found,) = leases.read_leases(run, Clocks.read())
            assert found.lease is not None
            return found.lease.stamp.written_ms

        store = InterposedStore(run.store, before=refuse)
        threads_before = set(threading.enumerate())  # an earlier test may have left one
        with leases.reading(Run.open(store), purpose="restore", renew_seconds=0.01):
            began_ms = written_ms()
            until(lambda: written_ms() > began_ms and len(puts) > 3)
        assert leases.read_leases(run, Clocks.read()) == []
        new_threads = {thread.name for thread in set(threading.enumerate()) - threads_before}
        assert "recpoint-lease" not in new_threads  # or it could write it again


class TestAge:
    """A mark is as old as the clock says that makes it youngest."""

    @pytest.fixture
    def marked(self, run: Run) -> Run:
        retain(run, grace=HOUR)
        return run

    def test_all_clocks_have_to_agree(self, marked: Run) -> None:
        assert len(planned(marked, grace=HOUR).waiting) == 3
        make_old(marked, 2 * HOUR)
        assert len(planned(marked, grace=HOUR).delete) == 3

    def test_a_wall_clock_that_jumped_deletes_nothing(self, marked: Run) -> None:
        make_old(marked, 2 * HOUR, boot=False)
        assert planned(marked, grace=HOUR).delete == ()

    def test_a_store_whose_clock_stands_back_deletes_nothing(self, marked: Run) -> None:
        make_old(marked, 2 * HOUR, files=False)
        assert planned(marked, grace=HOUR).delete == ()

    def test_a_stamp_from_the_future_deletes_nothing_and_is_written_anew(self, marked: Run) -> None:
        make_old(marked, -2 * HOUR)
        plan = planned(marked, grace=HOUR)
        assert plan.delete == () and len(plan.remark) == 3
        execute(marked, plan)
        assert planned(marked, grace=HOUR).remark == ()
        make_old(marked, 2 * HOUR)
        assert len(retain(marked, grace=HOUR).deleted) == 3


def test_a_store_that_does_not_list_what_was_written_is_unavailable(run: Run) -> None:
    """Its time cannot be told; nothing is left behind."""

    class Hidden(InterposedStore):
        def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
            return (one for one in super().list(prefix) if not is_probe_key(one.key))

    with pytest.raises(StoreUnavailable, match="no such object in a listing"):
        store_ms(Hidden(run.store))
    assert not list(run.store.list(PROBE_PREFIX))
    assert abs(store_ms(run.store) - now_ms()) < 3_600_000
