"""The number of uploads at once is found by measurement, in a simulated network."""

from __future__ import annotations

import heapq
import random
from pathlib import Path

import pytest

from recpoint.catalog.persist import upload as uploading
from recpoint.catalog.persist.upload import bound_uploads
from recpoint.catalog.store.local import LocalStore
from recpoint.catalog.store.scheduler import WriteBudget
from recpoint.catalog.store.streams import FIRST_STREAMS, StreamCount
from recpoint.errors import SettingsError, StoreThrottled, StoreUnavailable
from tests.interposed_store import InterposedStore, unavailable

_CHUNK = 8 << 20


def upload(
    count: StreamCount,
    *,
    each: float,
    total: float,
    seconds: float,
    refuses_above: int = 1_000,
    noise: float = 0.0,
    wanted: int = 1_000,
    began: float = 50.0,
) -> list[int]:
    """Upload chunks for so many seconds; return the number of streams after each.

    Args:
        count: says how many uploads run at once.
        each, total: bytes a second of one stream, and of all together.
        seconds: how long, in simulated time.
        refuses_above: more requests at once are answered 503, and made again later.
        noise: by which share an upload is faster or slower.
        wanted: most uploads that there is work for.
        began: the clock at the beginning.
    """
    chance = random.Random(7)
    now = began
    ends: list[tuple[float, bool]] = []
    history: list[int] = []
    while now < began + seconds:
        while len(ends) < min(count.streams, wanted):
            rate = min(each, total / min(count.streams, wanted))
            took = _CHUNK / rate * chance.uniform(1 - noise, 1 + noise)
            heapq.heappush(ends, (now + took, len(ends) >= refuses_above))
        now, is_refused = heapq.heappop(ends)
        if is_refused:
            count.refused(at_seconds=now)
        else:
            all_used = len(ends) + 1 >= count.streams
            count.wrote(_CHUNK, at_seconds=now, all_used=all_used)
        history.append(count.streams)
    return history


def most_often(history: list[int]) -> int:
    late = history[len(history) // 2 :]
    return max(set(late), key=late.count)


@pytest.mark.parametrize("knee", [4, 6, 9, 16, 25])
@pytest.mark.parametrize("noise", [0.0, 0.2])
def test_the_knee_is_found_from_below(knee: int, noise: float) -> None:
    count = StreamCount(64)
    history = upload(count, each=20e6, total=knee * 20e6, seconds=600, noise=noise)
    # The steps from below do not meet each number: the last one below may be a fifth too few.
    assert 0.8 * knee - 1 <= most_often(history) <= 1.25 * knee + 1
    assert max(history) <= 1.6 * knee + 2


def test_the_setting_bounds_it() -> None:
    count = StreamCount(10)
    assert max(upload(count, each=20e6, total=1e12, seconds=300)) == 10
    assert count.streams == 10
    assert set(upload(StreamCount(1), each=20e6, total=1e12, seconds=100)) == {1}
    assert StreamCount(2).streams == 2 and StreamCount(99).streams == FIRST_STREAMS


def test_a_network_that_grows_is_noticed() -> None:
    count = StreamCount(64)
    upload(count, each=20e6, total=5 * 20e6, seconds=200)
    assert count.streams <= 7
    history = upload(count, each=20e6, total=20 * 20e6, seconds=600, began=1e3)
    assert most_often(history) >= 15


def test_a_store_that_refuses_is_asked_for_less() -> None:
    count = StreamCount(64)
    history = upload(count, each=20e6, total=1e12, seconds=600, refuses_above=12)
    assert max(history) <= 15, "no more than a step above what the store takes"
    halves = [(a, b) for a, b in zip(history, history[1:], strict=False) if b < a - 1]
    assert halves and all(b == a // 2 for a, b in halves)
    assert sum(history) / len(history) >= 5, "it comes back after each refusal"


def test_refusals_that_come_together_count_once() -> None:
    count = StreamCount(64)
    upload(count, each=20e6, total=1e12, seconds=60)
    before = count.streams
    for at_seconds in (200.0, 200.5, 201.9, 203.8):
        count.refused(at_seconds=at_seconds)
    assert count.streams == before // 2
    count.refused(at_seconds=206.0)
    assert count.streams == before // 4
    for at_seconds in range(300, 400, 10):
        count.refused(at_seconds=at_seconds)
    assert count.streams == 1


def test_uploads_that_wait_for_work_say_nothing() -> None:
    """An encoder that is slower than the network does not use the streams that there are."""
    assert set(upload(StreamCount(64), each=20e6, total=1e12, seconds=200, wanted=3)) == {4}


def test_a_budget_allows_more_and_fewer_writes() -> None:
    budget = WriteBudget(2, budget_bytes=100, most_at_once=3)
    holders = [object() for _ in range(4)]
    assert budget.take(holders[0], 1, given_up=lambda: False) and not budget.is_full
    assert budget.take(holders[1], 1, given_up=lambda: False) and budget.is_full
    budget.allow(9)
    assert budget.at_once == 3 and not budget.is_full
    assert budget.take(holders[2], 1, given_up=lambda: False) and budget.is_full
    budget.allow(1)
    budget.give_back(holders[0], 1)
    assert budget.is_full, "those under way go on"


def test_an_upload_that_is_refused_halves_the_streams_and_no_other_failure_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploading, "_uploads", uploading._uploads)
    bound_uploads(8)
    uploads = uploading._uploads
    assert uploads.budget.at_once == FIRST_STREAMS and uploads.budget.most_at_once == 8

    def fail(call: str, key: str) -> None:
        if key == "away":
            raise unavailable(key)
        if key == "throttled":
            raise StoreThrottled(key, found="503", expected="an answer", next_step="later")

    store = InterposedStore(LocalStore(tmp_path), before=fail)
    uploads.put(store, "good", b"1")
    with pytest.raises(StoreUnavailable):
        uploads.put(store, "away", b"1")
    assert uploads.budget.at_once == FIRST_STREAMS
    with pytest.raises(StoreThrottled):
        uploads.put(store, "throttled", b"1")
    assert uploads.budget.at_once == FIRST_STREAMS // 2
    assert [info.key for info in store.list()] == ["good"]


@pytest.mark.parametrize("most", [0, -1, 33])
def test_numbers_of_uploads_that_cannot_work_are_refused(most: int) -> None:
    with pytest.raises(SettingsError, match=f"upload_streams: found {most}"):
        bound_uploads(most)
