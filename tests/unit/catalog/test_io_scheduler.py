"""Reads ahead and writes behind: in order, bounded, and over when the caller is."""

from __future__ import annotations

import threading
from functools import partial

import pytest

from recpoint.catalog.store.scheduler import (
    READ_SMALL_BYTES,
    WHOLE_CHUNK_BYTES,
    ReadScheduler,
    WriteBudget,
    WriteScheduler,
)


def test_outcomes_come_in_the_order_of_the_jobs() -> None:
    first_may_end = threading.Event()

    def work(job: int) -> int:
        if job == 0:
            assert first_may_end.wait(240)
        elif job == 1:
            first_may_end.set()  # the second job ends before the first
        return job * job

    with ReadScheduler(2) as reads:
        found = [(job, outcome.result()) for job, outcome in reads.in_order(range(20), work)]
    assert found == [(job, job * job) for job in range(20)]


def test_no_more_is_begun_than_threads_and_two() -> None:
    begun: list[int] = []
    with ReadScheduler(3) as reads:
        for job, outcome in reads.in_order(range(50), begun.append):
            outcome.result()
            assert max(begun) < job + 3 + 2
    assert sorted(begun) == list(range(50))


def test_an_error_belongs_to_its_job() -> None:
    def work(job: int) -> int:
        if job == 3:
            raise KeyError("three")
        return job

    with ReadScheduler(2) as reads:
        for job, outcome in reads.in_order(range(6), work):
            if job == 3:
                with pytest.raises(KeyError, match="three"):
                    outcome.result()
            else:
                assert outcome.result() == job


def test_a_caller_that_stops_drops_what_is_not_begun() -> None:
    begun: list[int] = []
    with ReadScheduler(1) as reads:
        for job, _ in reads.in_order(range(1000), begun.append):
            if job == 5:
                break
    assert len(begun) <= 5 + 1 + 2


def test_small_ones_do_not_wait_for_a_large_one_nor_fill_the_memory() -> None:
    large_may_end = threading.Event()
    begun: list[int] = []

    def work(job: int) -> int:
        begun.append(job)
        if job == 0:
            assert large_may_end.wait(240)
        elif job == 18:
            large_may_end.set()  # 1 + 2 + 16: so many are under way with the first
        return job

    def size_bytes(job: int) -> int:
        return WHOLE_CHUNK_BYTES if job in (0, 30) else READ_SMALL_BYTES

    with ReadScheduler(1) as reads:
        for job, outcome in reads.in_order(range(40), work, size_bytes=size_bytes):
            assert outcome.result() == job
            assert max(begun) <= job + 1 + 2 + 16
    assert sorted(begun) == list(range(40))


def test_large_ones_behind_small_ones_are_as_few_as_ever() -> None:
    begun: list[int] = []
    with ReadScheduler(2) as reads:
        for job, outcome in reads.in_order(
            range(60), begun.append, size_bytes=lambda _: READ_SMALL_BYTES + 1
        ):
            outcome.result()
            assert max(begun) < job + 2 + 2


def test_a_result_larger_than_the_budget_is_made_alone() -> None:
    under_way: set[int] = set()
    beside: set[int] = set()

    def work(job: int) -> int:
        under_way.add(job)
        if job == 5:
            threading.Event().wait(0.05)  # long enough for others to begin, if they were to
            beside.update(under_way)
        return job

    def size_bytes(job: int) -> int:
        return 100 * WHOLE_CHUNK_BYTES if job == 5 else 1

    with ReadScheduler(2) as reads:
        for job, outcome in reads.in_order(range(10), work, size_bytes=size_bytes):
            assert outcome.result() == job
            under_way.discard(job)
    assert beside == {5}


def test_the_first_error_in_order_ends_the_results() -> None:
    def work(job: int) -> int:
        if job in (3, 4):
            raise KeyError(job)
        return job

    found = []
    with ReadScheduler.of_records() as reads, pytest.raises(KeyError, match="3"):
        for result in reads.results(range(9), work):
            found.append(result)
    assert found == [0, 1, 2]


def test_a_read_that_was_begun_is_over_when_the_context_is() -> None:
    ended = threading.Event()

    def read() -> str:
        ended.wait(0.05)
        ended.set()
        return "read"

    with ReadScheduler(1) as reads:
        outcome = reads.begin(read)
    assert ended.is_set() and outcome.result(0) == "read"


# --- writes --------------------------------------------------------------------------------------


class Counted:
    """Counts writes, how many were under way at most, and their bytes."""

    def __init__(self) -> None:
        self.done: list[int] = []
        self.most = self.most_bytes = self._now = self._now_bytes = 0
        self._lock = threading.Lock()

    def write(self, size_bytes: int) -> None:
        with self._lock:
            self._now += 1
            self._now_bytes += size_bytes
            self.most = max(self.most, self._now)
            self.most_bytes = max(self.most_bytes, self._now_bytes)
        threading.Event().wait(0.001)
        with self._lock:
            self._now -= 1
            self._now_bytes -= size_bytes
            self.done.append(size_bytes)


def put_all(counted: Counted, budget: WriteBudget, sizes: list[int]) -> None:
    with WriteScheduler(budget) as writes:
        for size in sizes:
            writes.begin(writes.reserve(size), partial(counted.write, size))
        writes.finish()


@pytest.mark.parametrize(("at_once", "budget_bytes"), [(3, 1000), (8, 5)])
def test_schedulers_that_share_a_budget_keep_within_it(at_once: int, budget_bytes: int) -> None:
    counted, budget = Counted(), WriteBudget(at_once, budget_bytes=budget_bytes)
    sizes = [1, 2, 3, 4] * 10
    others = [threading.Thread(target=put_all, args=(counted, budget, sizes)) for _ in range(3)]
    for other in others:
        other.start()
    put_all(counted, budget, sizes)
    for other in others:
        other.join()
    assert sorted(counted.done) == sorted(4 * sizes)
    assert 1 < counted.most <= at_once and counted.most_bytes <= budget_bytes


def test_a_write_larger_than_the_budget_goes_alone() -> None:
    counted = Counted()
    put_all(counted, WriteBudget(4, budget_bytes=10), [2, 2, 50, 2, 2])
    assert sorted(counted.done) == [2, 2, 2, 2, 50] and counted.most_bytes == 50


def test_after_an_error_no_write_is_begun_and_those_under_way_are_waited_for() -> None:
    done: list[int] = []
    failed = threading.Event()

    def write(number: int) -> None:
        if number == 1:
            failed.set()
            raise KeyError("the first")
        assert failed.wait(240)
        done.append(number)

    def begin_all(writes: WriteScheduler) -> None:
        for number in range(100):
            writes.begin(writes.reserve(1), partial(write, number))
        writes.finish()

    with pytest.raises(KeyError, match="the first"), WriteScheduler(WriteBudget(2)) as writes:
        begin_all(writes)
    assert done in ([0], [0, 2])  # 2 may have been begun just before 1 failed


def test_whoever_waits_for_the_room_of_others_hears_of_its_own_error() -> None:
    budget, other_may_end, may_fail = WriteBudget(2), threading.Event(), threading.Event()

    def fail() -> None:
        assert may_fail.wait(240)
        raise KeyError("mine")

    with WriteScheduler(budget) as other:
        other.begin(other.reserve(1), other_may_end.wait)
        with WriteScheduler(budget) as mine:
            mine.begin(mine.reserve(1), fail)
            may_fail.set()
            with pytest.raises(KeyError, match="mine"):
                mine.reserve(2 * WHOLE_CHUNK_BYTES)  # no room as long as the other is under way
            with pytest.raises(KeyError, match="mine"):
                mine.finish()
        other_may_end.set()
        other.finish()


def test_room_that_was_not_used_is_given_back_at_the_end() -> None:
    budget = WriteBudget(1)
    with pytest.raises(KeyError), WriteScheduler(budget) as writes:
        writes.reserve(1)
        raise KeyError("while the bytes were made")
    counted = Counted()
    put_all(counted, budget, [1, 1])
    assert counted.done == [1, 1]


def test_what_is_written_is_told_of_in_order_and_in_the_thread_of_the_caller() -> None:
    told: list[tuple[int, int]] = []
    second_is_done = threading.Event()

    def write(number: int) -> None:
        if number == 1:
            assert second_is_done.wait(240)
        elif number == 2:
            second_is_done.set()

    with WriteScheduler(
        WriteBudget(2), on_written=lambda size: told.append((size, threading.get_ident()))
    ) as writes:
        for number in (1, 2, 3, 4):
            writes.begin(writes.reserve(number), partial(write, number))
        writes.finish()
    assert told == [(number, threading.get_ident()) for number in (1, 2, 3, 4)]
