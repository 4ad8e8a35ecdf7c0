"""Retentions that meet: nobody deletes but under an announcement of their own (format §6.6)."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path

import pytest

from recpoint.catalog.check.check import check
from recpoint.catalog.retention.prune import execute
from recpoint.catalog.run import deletions, leases, pins
from recpoint.catalog.run.deletions import TAKE_OVER_SECONDS, announce, standing, take_over
from recpoint.catalog.run.run import Run
from recpoint.catalog.store.contract import Clocks
from recpoint.catalog.store.store import open_store
from recpoint.errors import (
    RetentionRefused,
)
from recpoint.format.naming import DELETION_KEY, ManifestName
from tests.interposed_store import InterposedStore
from tests.retained_run import (
    HOUR,
    add,
    age_file,
    filled,
    keys,
    make_announcement_old,
    named,
    planned,
    require_tidy,
    retain,
    steps,
)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return filled(open_store(str(tmp_path / "run")))


class TestAnnouncement:
    """Of this retention and of another that is at work, was killed, or cannot be read."""

    def test_two_retentions_at_once(self, run: Run) -> None:
        retain(run)
        plan = planned(run)
        told: list[str] = []

        def other(call: str, key: str) -> None:
            if call == "delete" and key.startswith("manifests/"):
                with pytest.raises(RetentionRefused) as refused:
                    execute(run, plan)
                told.append(refused.value.found)

        execute(Run.open(InterposedStore(run.store, before=other)), plan)
        who = f"process {os.getpid()} of {socket.gethostname()}"
        assert len(told) == 3 and all(who in found for found in told)
        require_tidy(run, [40, 50])

    def test_a_pin_is_refused_while_another_plan_knows_of_the_deletion(self, run: Run) -> None:
        # One has announced and looked, and deletes. Another was planned beside its announcement,
        # and meets a lease that has come since: it must not end what it did not begin.
        retain(run)
        plan = planned(run)
        struck: list[str] = []

        def other(call: str, key: str) -> None:
            if call == "delete" and key.startswith("manifests/") and not struck:
                struck.append(key)
                made = planned(run)
                assert set(made.unfinished) == set(plan.delete)
                with leases.reading(run, purpose="seed", covers=[run.manifest(10, 1).ref]):
                    with suppress(RetentionRefused):
                        execute(run, made)
                with pytest.raises(RetentionRefused, match="it is being deleted") as refused:
                    pins.pin(run, ManifestName(10, 1))
                who = f"announced by process {os.getpid()} of {socket.gethostname()}"
                assert who in refused.value.found
                assert "half an hour after the announcement" in refused.value.next_step

        execute(Run.open(InterposedStore(run.store, before=other)), plan)
        assert struck
        require_tidy(run, [40, 50])

    def test_whose_announcement_was_taken_over_deletes_nothing_more(self, run: Run) -> None:
        retain(run)
        plan = planned(run)
        announced: list[str] = []

        def stalled(call: str, key: str) -> None:
            if (call, key) == ("create", DELETION_KEY):
                announced.append(key)
            elif (call, key) == ("get", DELETION_KEY) and len(announced) == 1:
                # It was away for so long that another has finished its work, but for a lease.
                announced.append(key)
                with leases.reading(run, purpose="seed", covers=[run.manifest(10, 1).ref]):
                    finished = execute(run, planned(run), take_over_seconds=0.0)
                assert finished.deleted == (named(run, 30), named(run, 20))
                pins.pin(run, ManifestName(10, 1))

        with pytest.raises(RetentionRefused, match="gone, or another's is there"):
            execute(Run.open(InterposedStore(run.store, before=stalled)), plan)
        assert steps(run) == [10, 40, 50] and check(run, level="full").ok
        assert pins.pinned(run) == {ManifestName(10, 1): ("pin",)}

    def test_an_announcement_that_is_another_by_now_is_left(self, run: Run) -> None:
        mine = announce(run, (named(run, 10),))
        there = standing(run, Clocks.read(run.store))
        assert there is not None
        other = take_over(run, there, (), after_seconds=0.0)
        mine.withdraw()
        assert DELETION_KEY in keys(run)
        with pytest.raises(RetentionRefused):
            mine.require_standing()
        other.require_standing()
        other.withdraw()
        assert DELETION_KEY not in keys(run)

    def test_a_killed_one_is_finished_when_its_announcement_is_old(self, run: Run) -> None:
        retain(run)
        announce(run, (named(run, 30), named(run, 20)))
        for stamp_old, file_old in ((True, False), (False, True)):
            make_announcement_old(run, stamp=stamp_old, file=file_old)
            with pytest.raises(RetentionRefused, match=r"at work or was killed.*in \d+ minutes"):
                retain(run)
        make_announcement_old(run)
        assert retain(run).deleted == tuple(named(run, step) for step in (30, 20, 10))
        require_tidy(run, [40, 50])

    def test_an_announcement_from_the_future_is_as_old_as_the_store_says(self, run: Run) -> None:
        retain(run)
        announce(run, (named(run, 30),))
        make_announcement_old(run, seconds=-24 * HOUR, file=False)
        with pytest.raises(RetentionRefused, match="at work or was killed"):
            retain(run)
        age_file(run, DELETION_KEY, TAKE_OVER_SECONDS + 60)
        assert len(retain(run).deleted) == 3

    @pytest.mark.parametrize("marked", [True, False])
    def test_an_announcement_that_cannot_be_read(self, run: Run, marked: bool) -> None:
        if marked:
            retain(run)
        run.store.put(DELETION_KEY, b"damaged")
        if marked:
            with pytest.raises(RetentionRefused, match="the record cannot be read"):
                retain(run)
        age_file(run, DELETION_KEY, TAKE_OVER_SECONDS + 60)
        result = retain(run)
        assert len(result.deleted) == (3 if marked else 0)
        assert DELETION_KEY not in keys(run)

    def test_what_takes_long_is_announced_again_and_looked_at_again(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        run = Run.create(open_store(str(tmp_path / "many")))
        run.claim(None)
        for step in range(10, 120, 10):
            add(run, step, None)
        retain(run)
        plan = planned(run)
        assert len(plan.delete) == 10
        gone: list[str] = []
        announced: list[int] = []  # so many deletions before each announcement

        def slow(call: str, key: str) -> None:
            if (call, key) == ("create", DELETION_KEY):
                announced.append(len(gone))
            if call == "delete" and key.startswith("manifests/"):
                gone.append(key)
                # The time for one announcement is over.
                monkeypatch.setattr(deletions, "_WORKING_SECONDS", 0.0)
            elif (call, key) == ("create", DELETION_KEY) and gone:
                monkeypatch.undo()
                pins.pin(run, ManifestName(10, 1))

        result = execute(Run.open(InterposedStore(run.store, before=slow)), plan)
        assert announced == list(range(9))  # no second deletion under any of them
        assert len(gone) == 9 and named(run, 10) in dict(result.spared)
        assert steps(run) == [10, 110] and DELETION_KEY not in keys(run)
