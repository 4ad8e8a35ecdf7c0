"""What the S3 store makes of a network and a server that fail: errors, time, healing.

Each fault is made on the way to a real server. "Heals" means that the same store object works
again as soon as the fault is over.
"""

from __future__ import annotations

import json
import re
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load

from recpoint.catalog.restore.files import restore_shards
from recpoint.catalog.restore.shard_plan import INDEX
from recpoint.catalog.store import s3
from recpoint.catalog.store.store import S3Timeouts, Store, open_store
from recpoint.errors import (
    ObjectExists,
    StoreAccessDenied,
    StoreError,
    StoreFull,
    StoreThrottled,
    StoreUnavailable,
)
from recpoint.testing.faults import READS, Fault, FaultStore
from recpoint.testing.seaweed import SeaweedServer
from tests.catalog_builder import Table, build, new_run, publish
from tests.fault.proxy import Break, FaultProxy
from tests.polling import PATIENCE_SECONDS, until
from tests.training_builder import Place, checkpointer, simple_training

#: Of clients that are to give up: a server that is alive may take longer than that for an answer.
_QUICK = S3Timeouts(connect_seconds=1, read_seconds=1, attempts=2, call_seconds=6)
#: Of all others.
_PATIENT = S3Timeouts(attempts=2)
# Two attempts of a second each, a pause of at most one, and room for a busy machine: a call without
# these limits takes two minutes.
_BOUND_SECONDS = 60.0


@pytest.fixture
def proxy(s3_environment: SeaweedServer) -> Iterator[FaultProxy]:
    with FaultProxy(s3_environment.port) as proxy:
        yield proxy


@pytest.fixture
def store(
    proxy: FaultProxy, s3_environment: SeaweedServer, monkeypatch: pytest.MonkeyPatch
) -> Store:
    """A store whose requests go through the proxy; it has been used already."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
    store = open_store(s3_environment.run_url(), timeouts=_PATIENT)
    store.put("old", b"old")
    proxy.requests.clear()
    return store


@pytest.fixture
def quick(store: Store, proxy: FaultProxy) -> Store:
    """The same objects, by a client that soon gives up; it has been used already."""
    quick = open_store(store.url, timeouts=_QUICK)
    until(lambda: _works(quick))
    proxy.requests.clear()
    return quick


def _calls(store: Store) -> list[Callable[[], object]]:
    return [
        lambda: store.get("old", max_bytes=9),
        lambda: store.get_range("old", start=0, end=1),
        lambda: store.put("new", b"new"),
        lambda: store.create("new", b"new"),
        lambda: list(store.list()),
        lambda: store.size("old"),
        lambda: store.delete("new"),
        lambda: list(store.delete_many(["new", "new-2"])),
        lambda: list(store.list_unfinished()),
        lambda: store.probe(),
    ]


#: Which of `_calls` is `put`.
_PUT = 2


def _check_error(error: StoreError, store: Store) -> None:
    assert store.url in error.subject
    assert error.found and error.expected and error.next_step


def _read_old(store: Store) -> None:
    assert store.get("old", max_bytes=9) == b"old"


def _check_healed(store: Store) -> None:
    key = f"healed-{secrets.token_hex(4)}"
    store.create(key, b"1")
    assert store.get(key, max_bytes=1) == b"1"
    _read_old(store)


def _works(store: Store, check: Callable[[Store], object] = _read_old) -> bool:
    """Whether it does; one that is quick to give up may have to be asked again."""
    try:
        check(store)
    except StoreUnavailable:
        return False
    return True


def test_a_refusal_is_access_denied_at_once(store: Store, proxy: FaultProxy) -> None:
    proxy.plan = [Break(status=403)]
    for call in _calls(store):
        proxy.requests.clear()
        with pytest.raises(StoreAccessDenied) as caught:
            call()
        _check_error(caught.value, store)
        assert not caught.value.retryable
        assert len(proxy.requests) == 1  # what cannot heal is not asked for again
    proxy.plan = []
    _check_healed(store)


@pytest.mark.parametrize("status", [403, 409])
def test_who_waits_out_refusals_is_refused_by_none_that_passes(
    store: Store, proxy: FaultProxy, status: int
) -> None:
    patient = open_store(store.url, timeouts=S3Timeouts(attempts=2, refused_seconds=60))
    for number, call in enumerate(_calls(patient)):
        proxy.plan = [Break(status=status, times=2, latency_seconds=number / 1000)]
        proxy.requests.clear()
        if number == _PUT:
            with pytest.raises((StoreAccessDenied, StoreUnavailable)):
                call()
            assert len(proxy.requests) == 1
            continue
        call()
        assert len(proxy.requests) > 2
    proxy.plan = []
    _check_healed(patient)


def test_who_waits_out_refusals_hears_of_one_that_stays(store: Store, proxy: FaultProxy) -> None:
    patient = open_store(store.url, timeouts=S3Timeouts(attempts=2, refused_seconds=1))
    proxy.plan = [Break(status=403)]
    for call in (_calls(patient)[0], _calls(patient)[3], _calls(patient)[4]):
        proxy.requests.clear()
        started = time.monotonic()
        with pytest.raises(StoreAccessDenied, match="AccessDenied") as caught:
            call()
        assert time.monotonic() - started < _BOUND_SECONDS
        _check_error(caught.value, patient)
        assert len(proxy.requests) > 1


@pytest.mark.parametrize(
    ("status", "is_sampled"),
    [
        (409, True),
        pytest.param(409, False, marks=pytest.mark.nightly("kills")),
        pytest.param(403, False, marks=pytest.mark.nightly("kills")),
    ],
)
def test_a_trainer_starts_whichever_of_its_requests_is_refused_once(
    s3_environment: SeaweedServer,
    proxy: FaultProxy,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    status: int,
    is_sampled: bool,
) -> None:
    """Sampled: the first request of each kind."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
    place = Place(s3_environment.run_url(), tmp_path / "staging")
    training = simple_training()
    ckpt = checkpointer(training, place, drain_seconds=0, close_seconds=0)
    ckpt.restore()
    training.batch()
    ckpt.step()
    assert ckpt.checkpoint()
    ckpt.close()
    place.persist_all()

    def start() -> list[str]:
        """Begin a trainer; return the requests that it made until it had its generation."""
        proxy.requests.clear()
        ckpt = checkpointer(simple_training(), place, drain_seconds=0, close_seconds=0)
        report = ckpt.restore()
        requests = list(proxy.requests)
        proxy.plan = []
        ckpt.close()
        assert report is not None and report.restored.step == 1
        return requests

    kinds = [re.sub(r"[0-9a-f]*[0-9][0-9a-f]*", "#", request) for request in start()]
    assert len(kinds) > 10
    numbers = [number for number, kind in enumerate(kinds) if kind not in kinds[:number]]
    assert len(numbers) > 4
    for number in numbers if is_sampled else range(len(kinds)):
        proxy.plan = [Break(status=status, after=number, times=1)]
        assert len(start()) > number


def test_throttling_is_waited_out(store: Store, proxy: FaultProxy) -> None:
    proxy.plan = [Break(match="GET", status=503, times=1), Break(match="PUT", status=503, times=1)]
    assert store.get("old", max_bytes=9) == b"old"
    store.create("new", b"new")
    assert store.get("new", max_bytes=9) == b"new"


def test_throttling_that_was_waited_out_is_counted(store: Store, proxy: FaultProxy) -> None:
    refusals_before = store.refusals
    proxy.plan = [Break(match="PUT", status=503, times=1)]
    store.put("new", b"new")
    assert store.refusals == refusals_before + 1
    store.put("new", b"new")
    assert store.refusals == refusals_before + 1


def test_throttling_without_end_is_said_to_be_that(store: Store, proxy: FaultProxy) -> None:
    proxy.plan = [Break(status=503)]
    for call in _calls(store)[:4]:
        proxy.requests.clear()
        with pytest.raises(StoreThrottled) as caught:
            call()
        _check_error(caught.value, store)
        assert caught.value.retryable
        assert len(proxy.requests) == _PATIENT.attempts
    proxy.plan = []
    _check_healed(store)


@pytest.mark.parametrize("number", range(6))
def test_a_black_hole_ends_in_time(quick: Store, proxy: FaultProxy, number: int) -> None:
    proxy.plan = [Break(silent=True)]
    started = time.monotonic()
    with pytest.raises(StoreUnavailable) as caught:
        _calls(quick)[number]()
    assert time.monotonic() - started < _BOUND_SECONDS
    _check_error(caught.value, quick)
    assert proxy.endpoint in str(caught.value)
    proxy.plan = []
    until(lambda: _works(quick, _check_healed))


def test_a_large_upload_into_a_black_hole_ends_in_time(
    store: Store, quick: Store, proxy: FaultProxy
) -> None:
    proxy.plan = [Break(match="PUT", silent=True)]
    started = time.monotonic()
    with pytest.raises(StoreUnavailable):
        quick.put("new", bytes(8 << 20))
    # The whole call's limit counts here: 6 s, and 8 s for 8 MiB.
    assert time.monotonic() - started < 14 + _BOUND_SECONDS
    proxy.plan = []
    assert [info.key for info in store.list()] == ["old"]


def test_an_upload_that_nobody_reads_ends_in_time(store: Store, proxy: FaultProxy) -> None:
    timeouts = S3Timeouts(read_seconds=1, call_seconds=3, slowest_mib_per_second=1_000)
    short = open_store(store.url, timeouts=timeouts)
    proxy.plan = [Break(match="PUT", unread=True)]
    started = time.monotonic()
    with pytest.raises(StoreUnavailable, match="no answer within 3 s"):
        short.put("new", bytes(32 << 20))  # more than the sockets between them hold
    assert time.monotonic() - started < _BOUND_SECONDS
    proxy.plan = []
    until(lambda: _works(short, _check_healed))


def test_a_writer_killed_in_mid_upload_leaves_an_upload_and_no_object(
    store: Store, proxy: FaultProxy
) -> None:
    program = (
        "import sys\n"
        "from recpoint.catalog.store.store import open_store\n"
        "open_store(sys.argv[1]).create('new', bytes(80 << 20))\n"
    )
    proxy.plan = [Break(match="partNumber=2", silent=True)]
    with subprocess.Popen([sys.executable, "-c", program, store.url]) as writer:
        try:
            until(lambda: any("partNumber=2" in line for line in proxy.requests))
            assert writer.poll() is None
        finally:
            writer.kill()
    assert [info.key for info in store.list()] == ["old"]
    unfinished = list(store.list_unfinished())
    assert [info.key.partition("?")[0] for info in unfinished] == ["new"]
    store.delete_unfinished(unfinished[0].key)
    assert list(store.list_unfinished()) == []
    proxy.plan = []
    store.create("new", b"again")


def test_no_server_at_all_ends_in_time(quick: Store, proxy: FaultProxy) -> None:
    proxy.__exit__()
    started = time.monotonic()
    for call in _calls(quick)[:2]:
        with pytest.raises(StoreUnavailable, match=str(proxy.port)) as caught:
            call()
        _check_error(caught.value, quick)
    assert time.monotonic() - started < 2 * _BOUND_SECONDS


@pytest.mark.parametrize(
    "broken",
    [
        Break(match="GET", reset_after_bytes=10, times=1),
        Break(match="GET", reset_after_bytes=300_000, times=1),
        Break(match="GET", cut_body_after=100_000, times=1),
        Break(match="GET", lose_reply=True, times=1),
    ],
)
def test_a_read_that_breaks_off_is_made_again(
    store: Store, proxy: FaultProxy, broken: Break
) -> None:
    data = secrets.token_bytes(1 << 20)
    store.put("new", data)
    proxy.plan = [broken]
    assert store.get("new", max_bytes=len(data)) == data
    proxy.plan = [Break(**{**vars(broken), "latency_seconds": 0.01})]  # counted afresh
    assert store.get_range("new", start=5, end=900_000) == data[5:900_000]


@pytest.mark.parametrize(
    "broken",
    [Break(match="GET", reset_after_bytes=300_000), Break(match="GET", cut_body_after=100_000)],
)
def test_a_read_that_always_breaks_off_is_unavailable(
    store: Store, proxy: FaultProxy, broken: Break
) -> None:
    data = secrets.token_bytes(1 << 20)
    store.put("new", data)
    proxy.plan = [broken]
    started = time.monotonic()
    with pytest.raises(StoreUnavailable) as caught:
        store.get("new", max_bytes=len(data))
    assert time.monotonic() - started < _BOUND_SECONDS
    _check_error(caught.value, store)
    proxy.plan = []
    assert store.get("new", max_bytes=len(data)) == data


def test_a_break_in_one_of_many_ranges_costs_only_that(
    store: Store, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3, "_RANGE_BYTES", 200_000)
    data = secrets.token_bytes(1_000_001)
    store.put("new", data)
    proxy.plan = [Break(match="GET", reset_after_bytes=100_000, times=1)]
    proxy.requests.clear()
    assert store.get("new", max_bytes=len(data)) == data
    assert len(proxy.requests) == 6 + 1


def test_flipped_bytes_arrive_silently(store: Store, proxy: FaultProxy) -> None:
    """So every byte that is read is checked against the manifest (format §6.3, read order)."""
    data = secrets.token_bytes(10_000)
    store.put("new", data)
    proxy.plan = [Break(match="GET", flip_body_byte=5_000)]
    for found in [
        store.get("new", max_bytes=10_000),
        store.get_range("new", start=0, end=10_000),
    ]:
        assert len(found) == len(data)
        assert [at for at in range(len(data)) if found[at] != data[at]] == [5_000]


def test_a_put_whose_reply_is_lost_is_made_again(store: Store, proxy: FaultProxy) -> None:
    proxy.plan = [Break(match="PUT", lose_reply=True, times=1)]
    store.put("new", b"new")
    assert store.get("new", max_bytes=9) == b"new"


def test_a_delete_of_many_whose_reply_is_lost_is_made_again(
    store: Store, proxy: FaultProxy
) -> None:
    keys = [f"new/{number}" for number in range(3)]
    for key in keys:
        store.put(key, b"new")
    proxy.plan = [Break(match="POST ", lose_reply=True, times=1)]
    assert list(store.delete_many(keys)) == [tuple(keys)]
    assert [info.key for info in store.list()] == ["old"]


def test_a_delete_of_many_that_never_hears_back_is_unknown(store: Store, proxy: FaultProxy) -> None:
    once = open_store(store.url, timeouts=S3Timeouts(attempts=1, read_seconds=1))
    proxy.plan = [Break(match="POST ", lose_reply=True)]
    with pytest.raises(StoreUnavailable) as caught:
        list(once.delete_many(["new", "old"]))
    _check_error(caught.value, store)
    proxy.plan = []
    assert list(store.list()) == []


@pytest.mark.parametrize("status", [400, 405, 501])
def test_a_store_without_deletes_of_many_is_asked_once(
    store: Store, proxy: FaultProxy, status: int
) -> None:
    proxy.plan = [Break(match="POST ", status=status)]
    for _ in range(2):
        store.put("new", b"new")
        assert list(store.delete_many(["new", "new-2"])) == [("new",), ("new-2",)]
        assert [info.key for info in store.list()] == ["old"]
    assert [line.split()[0] for line in proxy.requests if "POST" in line] == ["POST"]


@pytest.mark.parametrize("status", [403, 503])
def test_what_is_no_answer_about_deletes_of_many_is_raised(
    store: Store, proxy: FaultProxy, status: int
) -> None:
    """A refusal or a throttled store says nothing about what it can; one by one is no way out."""
    proxy.plan = [Break(match="POST ", status=status)]
    with pytest.raises(StoreAccessDenied if status == 403 else StoreThrottled):
        list(store.delete_many(["old", "new"]))
    _read_old(store)
    assert not [line for line in proxy.requests if line.startswith("DELETE")]


def test_a_create_whose_reply_is_lost_meets_its_own_object(store: Store, proxy: FaultProxy) -> None:
    proxy.plan = [Break(match="PUT", lose_reply=True, times=1)]
    with pytest.raises(ObjectExists, match="read it back"):
        store.create("new", b"unique token")
    assert store.get("new", max_bytes=99) == b"unique token"


def test_a_create_that_never_hears_back_is_unknown(store: Store, proxy: FaultProxy) -> None:
    once = open_store(store.url, timeouts=S3Timeouts(attempts=1, read_seconds=1))
    proxy.plan = [Break(match="PUT", lose_reply=True)]
    with pytest.raises(StoreUnavailable) as caught:
        once.create("new", b"unique token")
    _check_error(caught.value, store)
    assert store.get("new", max_bytes=99) == b"unique token"


def test_an_upload_in_parts_that_stalls_leaves_nothing(
    store: Store, quick: Store, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3, "_SINGLE_PUT_BYTES", 0)
    monkeypatch.setattr(s3, "_PART_BYTES", 5 << 20)
    proxy.plan = [Break(match="partNumber=2", silent=True)]
    with pytest.raises(StoreUnavailable):
        quick.create("new", bytes(11 << 20))
    # The abort may end a moment after the call.
    until(lambda: not list(store.list_unfinished()))
    assert [info.key for info in store.list()] == ["old"]


def test_a_completion_whose_reply_is_lost_is_unknown_and_done(
    store: Store, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3, "_SINGLE_PUT_BYTES", 0)
    monkeypatch.setattr(s3, "_PART_BYTES", 5 << 20)
    data = secrets.token_bytes(6 << 20)
    proxy.plan = [
        Break(match="?uploads"),  # nothing: only the completion is to be struck
        Break(match="POST ", lose_reply=True, times=1),
    ]
    try:
        store.create("new", data)
    except (ObjectExists, StoreUnavailable):
        pass  # both say: read it back
    assert store.get("new", max_bytes=len(data)) == data
    assert list(store.list_unfinished()) == []


@pytest.mark.parametrize("times", [1, None], ids=["once", "always"])
def test_a_completion_that_fails_in_the_body_of_a_good_answer(
    store: Store,
    proxy: FaultProxy,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    times: int | None,
) -> None:
    """S3 may answer 200 before the parts are joined, and put the error into the body."""
    monkeypatch.setattr(s3, "_SINGLE_PUT_BYTES", 0)
    monkeypatch.setattr(s3, "_PART_BYTES", 5 << 20)
    run = new_run(tmp_path / "run")
    run.claim(None)
    tables = [Table("users", torch.rand(400_000, 4))]
    publish(run, build(run, tables, step=1, generation=1, rows_per_chunk=400_000))
    failed = Break(match="POST ", status=200, times=times)
    proxy.plan = [Break(match="?uploads"), failed]
    if times is None:
        with pytest.raises(StoreUnavailable, match="InternalError"):
            restore_shards(run, store)
        assert [info.key for info in store.list()] == ["old"], "no index without its files"
        proxy.plan = []
    restore_shards(run, store)
    index = json.loads(store.get(INDEX, max_bytes=1 << 20))
    for key in {*index["weight_map"].values()}:
        tensors = load(store.get(key, max_bytes=10 << 20))
        assert tensors["users.weight"].shape == (400_000, 4)
    assert list(store.list_unfinished()) == []


def test_latency_only_takes_time(store: Store, proxy: FaultProxy) -> None:
    proxy.plan = [Break(latency_seconds=0.3)]
    started = time.monotonic()
    _check_healed(store)
    assert time.monotonic() - started >= 0.9
    assert [info.key for info in store.list()][-1] == "old"


def test_a_server_that_dies_and_comes_back(own_seaweed: SeaweedServer) -> None:
    url = own_seaweed.run_url()
    open_store(url).create("old", b"old")
    store = open_store(url, timeouts=_QUICK)
    own_seaweed.kill()
    started = time.monotonic()
    with pytest.raises(StoreUnavailable) as caught:
        store.create("new", b"new")
    assert time.monotonic() - started < _BOUND_SECONDS
    _check_error(caught.value, store)
    own_seaweed.start()
    until(lambda: _works(store, _check_healed))
    # And a call that is under way while it is gone ends well, once it is there again.
    own_seaweed.kill()
    timeouts = S3Timeouts(attempts=200, call_seconds=2 * PATIENCE_SECONDS)
    patient = open_store(store.url, timeouts=timeouts)
    found: list[bytes] = []
    reading = threading.Thread(target=lambda: found.append(patient.get("old", max_bytes=9)))
    reading.start()
    own_seaweed.start()
    reading.join(2 * PATIENCE_SECONDS)
    assert found == [b"old"]


@pytest.fixture
def local(tmp_path: Path) -> Store:
    store = open_store(str(tmp_path / "run"))
    store.put("a/old", b"0123456789")
    return store


def test_planned_damage_is_done_to_reads(local: Store) -> None:
    faulty = FaultStore(local, [Fault.flip(key_contains="old"), Fault.short(after=2)])
    assert faulty.get("a/old", max_bytes=10) == b"01234%6789"
    assert faulty.get_range("a/old", start=0, end=10) == b"0123456789"
    assert faulty.get_range("a/old", start=0, end=10) == b"01234"
    assert faulty.get("a/old", max_bytes=10) == b"0123456789"
    assert faulty.calls[0] == ("get", "a/old")


def test_planned_failures_are_counted(local: Store) -> None:
    faulty = FaultStore(local, [Fault.throttle(2), Fault.stop_after(1, error=StoreFull)])
    for _ in range(2):
        with pytest.raises(StoreThrottled):
            faulty.get("a/old", max_bytes=10)
    faulty.put("b", b"1")
    for _ in range(3):
        with pytest.raises(StoreFull):
            faulty.delete("b")
    assert faulty.get("b", max_bytes=1) == b"1"


def test_a_planned_lost_reply_comes_after_the_deed(local: Store) -> None:
    faulty = FaultStore(local, [Fault.lost_reply(key_contains="new")])
    faulty.create("b", b"1")
    with pytest.raises(StoreUnavailable):
        faulty.create("new", b"1")
    assert local.get("new", max_bytes=1) == b"1"
    with pytest.raises(ObjectExists):
        faulty.create("new", b"2")


def test_a_planned_failure_on_one_operation_leaves_the_others(local: Store) -> None:
    fault = Fault(kind="fail", on=READS, times=None, error=StoreAccessDenied)
    faulty = FaultStore(local, [fault])
    with pytest.raises(StoreAccessDenied):
        faulty.get("a/old", max_bytes=10)
    assert [info.key for info in faulty.list()] == ["a/old"]
    assert faulty.size("a/old") == 10
    faulty.probe()
