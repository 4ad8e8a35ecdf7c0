"""Reading ahead: in order, bounded, and over when the caller is."""

from __future__ import annotations

import threading

import pytest

from recpoint.catalog.chunks.chunk_pool import ChunkPool


def test_outcomes_come_in_the_order_of_the_jobs() -> None:
    first_may_end = threading.Event()

    def work(job: int) -> int:
        if job == 0:
            assert first_may_end.wait(240)
        elif job == 1:
            first_may_end.set()  # the second job ends before the first
        return job * job

    with ChunkPool(2) as pool:
        found = [(job, outcome.result()) for job, outcome in pool.in_order(range(20), work)]
    assert found == [(job, job * job) for job in range(20)]


def test_no_more_is_begun_than_threads_and_two() -> None:
    begun: list[int] = []
    with ChunkPool(3) as pool:
        for job, outcome in pool.in_order(range(50), begun.append):
            outcome.result()
            assert max(begun) < job + 3 + 2
    assert sorted(begun) == list(range(50))


def test_an_error_belongs_to_its_job() -> None:
    def work(job: int) -> int:
        if job == 3:
            raise KeyError("three")
        return job

    with ChunkPool(2) as pool:
        for job, outcome in pool.in_order(range(6), work):
            if job == 3:
                with pytest.raises(KeyError, match="three"):
                    outcome.result()
            else:
                assert outcome.result() == job


def test_a_caller_that_stops_drops_what_is_not_begun() -> None:
    begun: list[int] = []
    with ChunkPool(1) as pool:
        for job, _ in pool.in_order(range(1000), begun.append):
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

    def is_small(job: int) -> bool:
        return job not in (0, 30)

    with ChunkPool(1) as pool:
        for job, outcome in pool.in_order(range(40), work, is_small=is_small):
            assert outcome.result() == job
            assert max(begun) <= job + 1 + 2 + 16
    assert sorted(begun) == list(range(40))


def test_large_ones_behind_small_ones_are_as_few_as_ever() -> None:
    begun: list[int] = []
    with ChunkPool(2) as pool:
        for job, outcome in pool.in_order(range(60), begun.append, is_small=lambda _: False):
            outcome.result()
            assert max(begun) < job + 2 + 2
