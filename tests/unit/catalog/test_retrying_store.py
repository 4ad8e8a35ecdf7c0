"""Which calls of a store are made again, which are not, how long, and what is said of it."""

from __future__ import annotations

import builtins
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from recpoint.catalog.store.contract import ObjectInfo, for_answer
from recpoint.catalog.store.local import LocalStore
from recpoint.catalog.store.retrying import Retries, RetryingStore
from recpoint.catalog.store.store import Store
from recpoint.errors import (
    MalformedObject,
    ObjectExists,
    ObjectNotFound,
    StoreAccessDenied,
    StoreError,
    StoreFull,
    StoreThrottled,
    StoreUnavailable,
)
from recpoint.testing.faults import OPERATIONS, Fault, FaultStore, Operation
from recpoint.testing.store_suite import StoreSuite
from tests.interposed_store import InterposedStore, unavailable

_QUICK = Retries(first_pause_seconds=0.001)


class TestRetryingStoreContract(StoreSuite):
    """Around a directory of which each call fails once."""

    many_objects = 105

    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        faults = [
            Fault.once_for_each_call(on=OPERATIONS - {"list"}),
            Fault.once_for_each_call(on=frozenset({"list"}), kind="break_off"),
        ]
        return RetryingStore(FaultStore(LocalStore(tmp_path / "run"), faults), _QUICK)


class TestContractBesideLostAnswers(StoreSuite):
    """Around a directory that does at once what it is asked to, and says so at the second try."""

    many_objects = 105

    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        on: frozenset[Operation] = frozenset({"put", "delete", "delete_unfinished"})
        lost = Fault.once_for_each_call(on=on, kind="lost_reply")
        return RetryingStore(FaultStore(LocalStore(tmp_path / "run"), [lost]), _QUICK)


@pytest.fixture
def local(tmp_path: Path) -> LocalStore:
    store = LocalStore(tmp_path / "run")
    store.put("old", b"old")
    return store


_CALLS: dict[Operation, Callable[[Store], object]] = {
    "get": lambda store: store.get("old", max_bytes=9),
    "get_range": lambda store: store.get_range("old", start=0, end=1),
    "put": lambda store: store.put("new", b"new"),
    "create": lambda store: store.create("new", b"new"),
    "list": lambda store: list(store.list()),
    "size": lambda store: store.size("old"),
    "delete": lambda store: store.delete("old"),
    "list_unfinished": lambda store: list(store.list_unfinished()),
    "delete_unfinished": lambda store: store.delete_unfinished(".tmp-1"),
    "probe": lambda store: store.probe(),
}


@pytest.mark.parametrize("operation", _CALLS)
@pytest.mark.parametrize("error", [StoreThrottled, StoreUnavailable])
def test_what_may_heal_ends_after_as_many_tries_as_were_asked_for(
    local: LocalStore, operation: Operation, error: type[StoreError]
) -> None:
    fault = Fault(kind="fail", on=frozenset({operation}), times=None, error=error)
    faulty = FaultStore(local, [fault])
    with pytest.raises(error, match="a planned fault"):
        _CALLS[operation](RetryingStore(faulty, Retries(tries=3, first_pause_seconds=0.001)))
    assert [call for call, _ in faulty.calls if call == operation] == [operation] * 3


@pytest.mark.parametrize("operation", _CALLS)
@pytest.mark.parametrize("error", [StoreAccessDenied, StoreFull, ObjectNotFound, ObjectExists])
def test_an_answer_is_not_asked_for_again(
    local: LocalStore, operation: Operation, error: type[StoreError]
) -> None:
    faulty = FaultStore(local, [Fault(kind="fail", on=frozenset({operation}), error=error)])
    with pytest.raises(error):
        _CALLS[operation](RetryingStore(faulty, _QUICK))
    assert [call for call, _ in faulty.calls] == [operation]


@pytest.mark.parametrize("operation", _CALLS)
@pytest.mark.parametrize("status", [401, 403, 409, 429, 500])
def test_who_waits_out_refusals_waits_for_nothing_else(
    local: LocalStore, operation: Operation, status: int
) -> None:
    refusals = [True, True]

    def refuse(call: str, key: str) -> None:
        if refusals:
            refusals.pop()
            raise for_answer(key, status=status, code="X", message="no", doing="trying", bucket="b")

    class Refusing(InterposedStore):
        def probe(self) -> None:
            self._around("probe", "")
            self.inner.probe()

        def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
            self._around("list", prefix)
            return self.inner.list(prefix)

    store = Refusing(local, before=refuse)
    waiting = RetryingStore(store, Retries.of_refusals(60))
    if status in (403, 409) and operation != "put":
        _CALLS[operation](waiting)
        # A look, where it was open whether a create had written, takes one of the refusals.
        assert len(store.calls) == 3
    else:
        with pytest.raises(StoreError, match=f"{status} X"):
            _CALLS[operation](waiting)
        assert store.calls[0][0] == operation
        assert [call for call, _ in store.calls].count(operation) == 1


def test_no_try_begins_after_the_time_that_there_is(local: LocalStore) -> None:
    faulty = FaultStore(local, [Fault(kind="fail", on=OPERATIONS, times=None)])
    retries = Retries(tries=1_000, seconds=0.2, first_pause_seconds=0.05)
    started = time.monotonic()
    with pytest.raises(StoreUnavailable):
        RetryingStore(faulty, retries).size("old")
    assert time.monotonic() - started < 30
    # Pauses of 0.05, 0.1 and 0.2 s, each at least half of that.
    assert 2 <= len(faulty.calls) <= 4


def test_the_first_failure_of_a_call_is_logged(
    local: LocalStore, caplog: pytest.LogCaptureFixture
) -> None:
    faulty = FaultStore(local, [Fault(kind="fail", on=frozenset({"size"}), times=3)])
    RetryingStore(faulty, _QUICK).size("old")
    (line,) = caplog.records
    assert line.levelno == logging.WARNING and line.name == "recpoint"
    assert line.getMessage().startswith(f"trying again 4 times at most: {local.url}/old: found")
    caplog.clear()
    retries = Retries(tries=1, first_pause_seconds=0.001)
    with pytest.raises(StoreUnavailable):
        RetryingStore(FaultStore(local, [Fault.stop_after(0)]), retries).put("new", b"new")
    assert not caplog.records  # what is not tried again is raised, and that is enough


def test_a_listing_tells_nothing_twice(local: LocalStore) -> None:
    keys = [f"a/{number}" for number in range(10)] + ["old"]
    for key in keys:
        local.put(key, b"1")

    class Breaking(InterposedStore):
        def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
            self._around("list", prefix)
            for number, info in enumerate(self.inner.list(prefix)):
                if number == 3 * len(self.calls):
                    local.delete("a/1")  # told already
                    local.put("a/95", b"1")
                    raise unavailable(info.key)
                yield info

    store = Breaking(local)
    told = [info.key for info in RetryingStore(store, _QUICK).list()]
    assert told == sorted([*keys, "a/95"])
    assert len(store.calls) == 4


def _create_beside(local: LocalStore, do: Callable[[int], None]) -> RetryingStore:
    """A store whose n-th create of a key does `do(n)` first."""
    tries = builtins.list[int]()

    def before(call: str, key: str) -> None:
        if call == "create":
            tries.append(1)
            do(len(tries))

    return RetryingStore(InterposedStore(local, before=before), _QUICK)


def test_who_was_slower_than_another_writer_is_told(local: LocalStore) -> None:
    def win(number: int) -> None:
        local.put("new", b"winner")
        raise unavailable("new")

    with pytest.raises(ObjectExists, match="new"):
        _create_beside(local, win).create("new", b"loser")
    assert local.get("new", max_bytes=9) == b"winner"
    assert _create_beside(local, win).create_or_read("new", b"loser", max_bytes=9) == b"winner"
    with pytest.raises(MalformedObject):
        _create_beside(local, win).create_or_read("new", b"loser", max_bytes=3)


def test_what_was_met_and_is_gone_is_written(local: LocalStore) -> None:
    local.put("new", b"winner")

    def remove(call: str, key: str) -> None:
        if call == "get":
            local.delete("new")

    store = InterposedStore(local, before=remove)
    assert RetryingStore(store, _QUICK).create_or_read("new", b"mine", max_bytes=9) is None
    assert local.get("new", max_bytes=9) == b"mine"


def test_where_no_look_is_possible_the_create_is_made_again(local: LocalStore) -> None:
    faults = [
        Fault(kind="lost_reply", on=frozenset({"create"})),
        Fault(kind="fail", on=frozenset({"size"}), times=None, error=StoreAccessDenied),
    ]
    faulty = FaultStore(local, faults)
    with pytest.raises(ObjectExists):
        RetryingStore(faulty, _QUICK).create("new", b"mine")
    assert [call for call, _ in faulty.calls] == ["create", "size", "create"]


def test_a_file_is_linked_into_a_directory_behind_it(local: LocalStore) -> None:
    retried = RetryingStore(local, _QUICK)
    assert retried.scratch_directory() == Path(local.url)
    assert retried.scratch_mode == local.scratch_mode != Store.scratch_mode
    (file := retried.scratch_directory() / ".tmp-1").write_bytes(b"1")
    retried.create_from_file("new", file)
    assert (retried.scratch_directory() / "new").samefile(file)
