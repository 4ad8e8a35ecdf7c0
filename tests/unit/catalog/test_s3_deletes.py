"""What is made of the answers to requests that delete many objects of an S3 bucket."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from recpoint.catalog.retention.sweep import execute, plan_sweep
from recpoint.catalog.run.run import Run
from recpoint.catalog.store import deletes, s3_deletes
from recpoint.catalog.store.contract import Store
from recpoint.catalog.store.deletes import delete_objects, deletions
from recpoint.catalog.store.s3 import S3Store
from recpoint.catalog.store.s3_deletes import delete_in_requests
from recpoint.catalog.store.store import open_store
from recpoint.errors import StoreAccessDenied, StoreError, StoreThrottled, StoreUnavailable
from recpoint.format.naming import PART_KEY, AttemptName, row_chunk_key
from tests.interposed_store import InterposedStore

Answer = Mapping[str, Sequence[Mapping[str, str]]]


class Bucket:
    """Answers requests as planned: each plan maps keys to error codes; "" names no answer."""

    def __init__(self, *plans: Mapping[str, str]) -> None:
        self.plans = list(plans)
        self.requests: list[list[str]] = []

    def send(self, keys: Sequence[str]) -> Answer:
        self.requests.append(list(keys))
        plan = self.plans.pop(0) if self.plans else {}
        return {
            "Deleted": [{"Key": key} for key in keys if key not in plan],
            "Errors": [
                {"Key": key, "Code": code, "Message": "on purpose"}
                for key, code in plan.items()
                if code and key in keys
            ],
        }

    def delete(self, keys: Sequence[str], *, attempts: int = 3) -> list[tuple[str, ...]]:
        return list(
            delete_in_requests(
                keys, send=self.send, attempts=attempts, url="s3://b/run", bucket="b"
            )
        )


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3_deletes, "_FIRST_PAUSE_SECONDS", 0.0)


def test_a_request_names_a_thousand_keys_at_most() -> None:
    bucket = Bucket()
    keys = [str(number) for number in range(2_500)]
    assert [len(removed) for removed in bucket.delete(keys)] == [1_000, 1_000, 500]
    assert sum(bucket.requests, []) == keys


def test_what_may_still_go_is_asked_for_again_alone() -> None:
    bucket = Bucket({"b": "SlowDown", "c": ""}, {"c": "InternalError"})
    assert bucket.delete(["a", "b", "c"]) == [("a",), ("b",), ("c",)]
    assert bucket.requests == [["a", "b", "c"], ["b", "c"], ["c"]]


def test_an_object_that_is_gone_already_counts_as_removed() -> None:
    assert Bucket({"a": "NoSuchKey"}).delete(["a", "b"]) == [("a", "b")]


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("SlowDown", StoreThrottled),
        ("InternalError", StoreUnavailable),
        ("", StoreUnavailable),
        ("AccessDenied", StoreAccessDenied),
        ("SomethingNew", StoreError),
    ],
)
def test_what_stays_is_named(code: str, error: type[StoreError]) -> None:
    plan = dict.fromkeys(["b", "c", "d", "e"], code)
    bucket = Bucket(plan, plan)
    removed: list[str] = []
    with pytest.raises(error, match="4 objects stay: b, c, d and 1 more") as caught:
        for keys in delete_in_requests(
            ["a", *plan], send=bucket.send, attempts=2, url="s3://b/run", bucket="b"
        ):
            removed += keys
    assert removed == ["a"] and caught.value.subject == "s3://b/run/b"
    assert caught.value.retryable == (code in ("SlowDown", "InternalError", ""))
    assert caught.value.refused == (code == "AccessDenied")
    assert len(bucket.requests) == (2 if caught.value.retryable else 1)


def test_a_failure_for_good_is_told_before_one_that_may_pass() -> None:
    with pytest.raises(StoreAccessDenied, match="run/b: .*2 objects stay: a, b"):
        Bucket({"a": "SlowDown", "b": "AccessDenied"}).delete(["a", "b"])


def _objects(store: Store, count: int) -> list[str]:
    keys = [f"d/{number}" for number in range(count)]
    for key in keys:
        store.put(key, b"x")
    return keys


def test_each_request_is_allowed_by_itself(s3_run_url: str, monkeypatch: Any) -> None:
    """A sweep may remove no more once its look is too old."""
    monkeypatch.setattr(s3_deletes, "KEYS_OF_A_REQUEST", 2)
    store = open_store(s3_run_url)
    keys = _objects(store, 5)
    answers = iter([True, True, False])
    assert list(deletions(store, keys, may_begin=lambda: next(answers))) == keys[:4]
    assert [info.key for info in store.list()] == keys[4:]
    assert list(deletions(store, [], may_begin=lambda: next(answers))) == []


def test_many_objects_go_with_several_requests_at_once(
    s3_run_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deletes, "_OBJECTS_EACH", 3)
    store = open_store(s3_run_url)
    assert isinstance(store, S3Store)
    keys = _objects(store, 10)
    calls: list[str] = []
    call = S3Store._call

    async def counted(self: S3Store, method: str, **arguments: object) -> Any:
        calls.append(method)
        return await call(self, method, **arguments)

    monkeypatch.setattr(S3Store, "_call", counted)
    assert list(deletions(store, keys)) == keys
    assert sorted(calls) == ["delete_object"] + 3 * ["delete_objects"]
    assert list(store.list()) == []


def test_a_failure_in_one_of_several_threads_is_raised(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deletes, "_OBJECTS_EACH", 2)
    inner = open_store(str(tmp_path))
    keys = _objects(inner, 6)

    def fail(call: str, key: str) -> None:
        if (call, key) == ("delete", "d/4"):
            raise StoreUnavailable(key, found="a fault", expected="none", next_step="again")

    with pytest.raises(StoreUnavailable, match="d/4"):
        delete_objects(InterposedStore(inner, before=fail), keys)
    assert {info.key for info in inner.list()} <= {"d/4", "d/5"}


def test_a_sweep_asks_for_chunks_when_the_parts_are_gone(
    s3_run_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3_deletes, "KEYS_OF_A_REQUEST", 3)
    run = Run.create(open_store(s3_run_url))
    for _ in range(2):  # the trainer of generation 1 is superseded
        run.claim(None)
    attempt = AttemptName(7, 1, 32 * "a")
    parts = [PART_KEY.of(*attempt, rank=rank) for rank in range(4)]
    chunks = [
        row_chunk_key(*attempt, rank=0, table=table, number=number)
        for table in range(2)
        for number in range(4)
    ]
    for key in (*parts, *chunks):
        run.store.put(key, b"x")
    plan = plan_sweep(run, grace_seconds=0)
    assert plan.kept == ()
    requests: list[list[str]] = []
    send = S3Store._send_deletes

    def noted(self: S3Store, keys: Sequence[str]) -> Mapping[str, Any]:
        requests.append(list(keys))
        return send(self, keys)

    monkeypatch.setattr(S3Store, "_send_deletes", noted)
    result = execute(run, plan)
    assert [swept.key for swept in result.removed] == parts + chunks
    assert requests == [parts[:3], parts[3:], chunks[:3], chunks[3:6], chunks[6:]]
    assert not list(run.store.list("chunks/")) and not list(run.store.list("parts/"))


def test_a_request_about_many_objects_has_their_md5(s3_run_url: str) -> None:
    """Older stores refuse it without."""
    store = open_store(s3_run_url)
    assert isinstance(store, S3Store)
    store.put("stays", b"x")
    heads: list[Mapping[str, Any]] = []
    client: Any = store._client.get()
    client._file_system._s3.meta.events.register(
        "before-send.s3.DeleteObjects", lambda request, **_: heads.append(dict(request.headers))
    )
    assert list(store.delete_many(["a", "b"])) == [("a", "b")]
    (head,) = heads
    named = {name.lower() for name in head}
    assert {"content-md5", "x-amz-checksum-crc32"} <= named
