"""The local store keeps the contract, and what is special about directories."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from recpoint.catalog.store import durable
from recpoint.catalog.store.local import LocalStore
from recpoint.catalog.store.store import Store, open_store
from recpoint.errors import (
    MalformedObject,
    ObjectExists,
    ObjectNotFound,
    StoreAccessDenied,
    StoreError,
    StoreFull,
    StoreUnavailable,
    StoreUnsupported,
)
from recpoint.testing.store_suite import StoreSuite


class TestLocalStoreContract(StoreSuite):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return open_store(str(tmp_path / "not" / "there" / "yet"))


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "run")


def _root(store: LocalStore) -> Path:
    return Path(store.url)


def _fail_at(monkeypatch: pytest.MonkeyPatch, name: str, number: int) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, name, fail)


def test_reading_what_is_not_there_makes_nothing(store: LocalStore) -> None:
    assert list(store.list()) == []
    assert list(store.list("a/b")) == []
    store.delete("a/b")
    with pytest.raises(ObjectNotFound):
        store.get("k", max_bytes=1)
    assert not _root(store).exists()


@pytest.mark.parametrize(
    ("number", "kind", "retryable"),
    [
        (errno.ENOSPC, StoreFull, False),
        (errno.EDQUOT, StoreFull, False),
        (errno.EACCES, StoreAccessDenied, False),
        (errno.EROFS, StoreAccessDenied, False),
        (errno.EIO, StoreUnavailable, True),
        (errno.ESTALE, StoreUnavailable, True),
        (errno.EMFILE, StoreUnavailable, True),
        (errno.EOPNOTSUPP, StoreUnsupported, False),
        (errno.ENAMETOOLONG, StoreError, False),
    ],
)
@pytest.mark.parametrize("call", ["write", "fsync", "replace"])
def test_a_failed_write_says_why_and_leaves_the_old_object(
    store: LocalStore,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    kind: type[StoreError],
    retryable: bool,
    call: str,
) -> None:
    store.put("a/k", b"old")
    with monkeypatch.context() as patch:
        _fail_at(patch, call, number)
        with pytest.raises(kind) as caught:
            store.put("a/k", b"new")
    assert type(caught.value) is kind
    assert caught.value.retryable is retryable
    assert caught.value.subject == f"{store.url}/a/k"
    assert store.get("a/k", max_bytes=9) == b"old"
    assert list(store.list_unfinished()) == []


def test_a_directory_that_may_not_be_written_is_access_denied(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    _fail_at(monkeypatch, "mkdir", errno.EACCES)
    with pytest.raises(StoreAccessDenied, match="read-only"):
        store.create("a/k", b"1")


def test_a_file_where_a_directory_has_to_be_is_named(store: LocalStore) -> None:
    store.put("a", b"1")
    with pytest.raises(StoreError, match="a/k") as caught:
        store.put("a/k", b"1")
    assert not caught.value.retryable
    store.put("d/k", b"1")
    with pytest.raises(StoreError):
        store.put("d", b"1")
    with pytest.raises(ObjectNotFound):
        store.get("d", max_bytes=9)


def test_a_file_system_without_hard_links_is_refused(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    _fail_at(monkeypatch, "link", errno.EPERM)
    with pytest.raises(StoreUnsupported, match="hard links"):
        store.probe()
    assert list(store.list()) == []
    assert list(store.list_unfinished()) == []


def test_a_link_that_replaces_is_found_by_the_probe(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def replacing_link(source: str, target: str) -> None:
        Path(target).write_bytes(Path(source).read_bytes())

    monkeypatch.setattr(os, "link", replacing_link)
    with pytest.raises(StoreUnsupported, match="replaced the first"):
        store.probe()
    assert list(store.list()) == []


def test_what_a_killed_writer_left_is_listed_apart(store: LocalStore) -> None:
    store.put("a/k", b"1")
    (_root(store) / "a" / ".tmp-00ff").write_bytes(b"half")
    (_root(store) / ".tmp-01").write_bytes(b"")
    assert [info.key for info in store.list()] == ["a/k"]
    assert [(info.key, info.size_bytes) for info in store.list_unfinished()] == [
        (".tmp-01", 0),
        ("a/.tmp-00ff", 4),
    ]
    for info in list(store.list_unfinished()):
        store.delete_unfinished(info.key)
        store.delete_unfinished(info.key)
    assert list(store.list_unfinished()) == []
    assert store.get("a/k", max_bytes=9) == b"1"


@pytest.mark.parametrize("key", ["../.tmp-1", "/.tmp-1", "a/../../.tmp-1", ".tmp-1/k", ".tmp-\0"])
def test_unfinished_keys_do_not_lead_out(store: LocalStore, key: str, tmp_path: Path) -> None:
    outside = tmp_path / ".tmp-1"
    outside.write_bytes(b"not ours")
    store.put("k", b"1")
    with pytest.raises(ValueError):
        store.delete_unfinished(key)
    assert outside.exists()


def test_links_and_pipes_are_no_objects(store: LocalStore, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"secret")
    store.put("a/k", b"1")
    os.symlink(secret, _root(store) / "a" / "link")
    os.mkfifo(_root(store) / "a" / "pipe")
    assert [info.key for info in store.list()] == ["a/k"]
    for key in ["a/link", "a/pipe"]:
        with pytest.raises(ObjectNotFound):
            store.get(key, max_bytes=99)
        with pytest.raises(ObjectNotFound):
            store.get_range(key, start=0, end=1)
        with pytest.raises(ObjectNotFound):
            store.size(key)


def test_a_huge_object_is_refused_before_it_is_read(store: LocalStore) -> None:
    store.put("k", b"")
    os.truncate(_root(store) / "k", 1 << 43)
    with pytest.raises(MalformedObject):
        store.get("k", max_bytes=1 << 20)
    with pytest.raises(StoreUnavailable):
        store.get_range("k", start=0, end=1 << 44)


def test_empty_directories_go_with_their_last_object(store: LocalStore) -> None:
    store.put("a/b/c/k", b"1")
    store.put("a/k", b"1")
    store.delete("a/b/c/k")
    assert not (_root(store) / "a" / "b").exists()
    store.delete("a/k")
    assert list(_root(store).iterdir()) == []
    store.put("a/b/c/k", b"1")
    assert store.get("a/b/c/k", max_bytes=1) == b"1"


def test_a_directory_removed_under_a_writer_is_made_again(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    removed: list[str] = []

    def remove_once(name: str) -> None:
        if name == "write k" and not removed:
            removed.append(name)
            (_root(store) / "a").rmdir()

    durable.set_observer(remove_once)
    try:
        store.create("a/k", b"1")
    finally:
        durable.set_observer(None)
    assert removed
    assert store.get("a/k", max_bytes=1) == b"1"


def test_a_lost_race_leaves_no_temporary_file(store: LocalStore) -> None:
    store.create("k", b"1")
    with pytest.raises(ObjectExists):
        store.create("k", b"2")
    assert [path.name for path in _root(store).iterdir()] == ["k"]


def test_errors_name_object_found_expected_and_next_step(store: LocalStore) -> None:
    with pytest.raises(ObjectNotFound) as caught:
        store.get("manifests/x", max_bytes=1)
    for part in [store.url, "manifests/x", "no such object", "recpoint check"]:
        assert part in str(caught.value)


def _listed(store: LocalStore, prefix: str) -> list[str]:
    return [info.key for info in store.list(prefix)]


def test_no_link_below_the_directory_of_the_run_is_followed(
    store: LocalStore, tmp_path: Path
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "k").write_bytes(b"theirs")
    (outside / ".tmp-k").write_bytes(b"")
    store.put("top/deep/own", b"own")
    (_root(store) / "top" / "link").symlink_to(outside)
    (_root(store) / "linked").symlink_to(outside)
    for directory in ("linked", "top/link"):
        key, named = f"{directory}/k", f"a symbolic link at .*/{directory};"
        reads: list[Callable[[], object]] = [
            partial(store.get, key, max_bytes=9),
            partial(store.get_range, key, start=0, end=1),
            partial(store.size, key),
            partial(_listed, store, f"{directory}/"),
        ]
        for read in reads:
            with pytest.raises(ObjectNotFound, match=named):
                read()
        changes: list[Callable[[], object]] = [
            partial(store.put, key, b"ours"),
            partial(store.create, f"{directory}/d/k", b"ours"),
            partial(store.delete, key),
            partial(store.delete_unfinished, f"{directory}/.tmp-k"),
        ]
        for change in changes:
            with pytest.raises(StoreError, match=named) as caught:
                change()
            assert not caught.value.retryable
    assert [info.key for info in store.list()] == ["top/deep/own"]
    assert sorted(path.name for path in outside.iterdir()) == [".tmp-k", "k"]
    assert (outside / "k").read_bytes() == b"theirs"


def test_the_directory_of_the_run_may_be_reached_through_links(tmp_path: Path) -> None:
    (tmp_path / "disk" / "run").mkdir(parents=True)
    (tmp_path / "data").symlink_to(tmp_path / "disk")
    (tmp_path / "current").symlink_to(tmp_path / "data" / "run")
    store = LocalStore(tmp_path / "current")
    store.create("a/k", b"1")
    assert store.get("a/k", max_bytes=1) == b"1"
    assert [info.key for info in store.list("a/")] == ["a/k"]
    store.delete("a/k")
    assert not (tmp_path / "disk" / "run" / "a").exists()
