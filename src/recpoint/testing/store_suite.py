"""Tests that an implementation of `recpoint.catalog.store.store.Store` keeps the contract.

    class TestMyStore(StoreSuite):
        @pytest.fixture
        def store(self) -> Store:
            return MyStore(...)  # empty

The fixture must return a fresh, empty store for each test. The suite also passes for a
`RetryingStore` around a store whose every call fails once (`Fault.once_for_each_call`), and
contains some tests of that for each store.
"""

from __future__ import annotations

import multiprocessing
import pickle
import secrets
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection

import pytest

from recpoint.catalog.store.contract import now_ms
from recpoint.catalog.store.retrying import Retries, RetryingStore
from recpoint.catalog.store.store import Store
from recpoint.errors import MalformedObject, ObjectExists, ObjectNotFound, StoreError
from recpoint.testing.faults import OPERATIONS, Fault, FaultStore

__all__ = ["StoreSuite"]

_MIB = 1 << 20

_BAD_KEYS = [
    "", "/", "/absolute", "a//b", "a/", ".", "..", "a/../b", "../a", "a/..", "a/./b",
    "back\\slash", "nul\0", "new\nline", "a b", "\u00e9", "\u65e5\u672c", "\ud800",
    ".tmp-1", "a/.tmp-1", "x" * 201, "a/" * 400 + "a",
]  # fmt: skip


class StoreSuite:
    """Tests of the contract; subclass it and provide the fixture `store`."""

    #: False for a store that only one process can use.
    shared_between_processes = True
    #: Number of objects that takes more than one page of a listing.
    many_objects = 1_005

    @pytest.fixture
    def store(self) -> Store:
        """Return an empty store; the subclass overrides this."""
        raise NotImplementedError("provide a fixture `store`")

    @pytest.mark.parametrize("size_bytes", [0, 1, 4_095, 100_003])
    def test_what_is_put_comes_back(self, store: Store, size_bytes: int) -> None:
        """`put` and `get` keep every byte; an empty object works too."""
        data = secrets.token_bytes(size_bytes)
        store.put("a/b.bin", data)
        assert store.get("a/b.bin", max_bytes=size_bytes) == data
        assert store.size("a/b.bin") == size_bytes
        assert [(info.key, info.size_bytes) for info in store.list()] == [("a/b.bin", size_bytes)]

    @pytest.mark.parametrize("size_bytes", [0, 1, 4_095])
    def test_what_is_created_comes_back(self, store: Store, size_bytes: int) -> None:
        """`create` and `get` keep every byte; a second create fails, also of an empty object."""
        data = secrets.token_bytes(size_bytes)
        store.create("a/b.bin", data)
        assert store.get("a/b.bin", max_bytes=size_bytes) == data
        with pytest.raises(ObjectExists, match="a/b.bin"):
            store.create("a/b.bin", b"other")
        assert store.get("a/b.bin", max_bytes=size_bytes) == data

    def test_a_large_object_in_several_requests(self, store: Store) -> None:
        """Objects and ranges larger than recpoint's stores move in one request come back whole."""
        data = secrets.token_bytes(65 * _MIB + 3)
        store.create("big", data)
        assert store.get("big", max_bytes=len(data)) == data
        lent = store.get_lent("big", max_bytes=len(data), lend=lambda n: memoryview(bytearray(n)))
        assert bytes(lent) == data
        for start, end in [(0, len(data)), (1, 17 * _MIB), (16 * _MIB - 1, 48 * _MIB + 1)]:
            assert store.get_range("big", start=start, end=end) == data[start:end]
        with pytest.raises(ObjectExists):
            store.create("big", data)
        assert list(store.list_unfinished()) == []

    @pytest.mark.parametrize("size_bytes", [1, 65 * _MIB + 1])
    def test_a_file_is_created_once(self, store: Store, size_bytes: int) -> None:
        """A file is stored byte for byte, and may be deleted afterwards."""
        data = secrets.token_bytes(1_000) * (size_bytes // 1_000) or b"1"
        path = store.scratch_directory() / f".tmp-{secrets.token_hex(16)}"
        path.write_bytes(data)
        try:
            store.create_from_file("a/file", path)
            with pytest.raises(ObjectExists):
                store.create_from_file("a/file", path)
        finally:
            path.unlink()
        assert store.get("a/file", max_bytes=len(data)) == data

    def test_create_does_not_replace_what_put_wrote(self, store: Store) -> None:
        """`create` does not replace an object; `put` does."""
        store.put("k", b"put")
        with pytest.raises(ObjectExists):
            store.create("k", b"created")
        assert store.get("k", max_bytes=9) == b"put"
        store.put("k", b"again")
        assert store.get("k", max_bytes=9) == b"again"
        assert store.size("k") == 5

    def test_a_deleted_object_can_be_created_again(self, store: Store) -> None:
        """A deleted object leaves nothing behind; deleting a missing object is no error."""
        store.delete("a/b/k")
        store.create("a/b/k", b"1")
        store.delete("a/b/k")
        store.delete("a/b/k")
        assert list(store.list()) == []
        with pytest.raises(ObjectNotFound):
            store.get("a/b/k", max_bytes=9)
        store.create("a/b/k", b"2")
        assert store.get("a/b/k", max_bytes=9) == b"2"

    def test_many_objects_are_deleted_by_one_call(self, store: Store) -> None:
        """All named objects are gone and reported once, missing ones too; no other object is."""
        keys = [f"d/x{chr(code)}y" for code in range(0x21, 0x7F) if chr(code) not in "/\\"]
        for key in [*keys, "stays"]:
            store.put(key, b"x")
        # Most are not there, so that the test is short.
        doomed = [*keys, *(f"never/{number}" for number in range(2 * self.many_objects)), "d"]
        removed = [key for request in store.delete_many(doomed) for key in request]
        assert sorted(removed) == sorted(doomed)
        assert [info.key for info in store.list()] == ["stays"]
        assert list(store.delete_many([])) == []

    def test_deletes_of_many_end_with_their_caller(self, store: Store) -> None:
        """No object is deleted that was not asked for, and none if one of the keys is bad."""
        keys = [f"d/{number}" for number in range(3)]
        for key in keys:
            store.put(key, b"x")
        requests = store.delete_many(keys)
        assert [info.key for info in store.list()] == keys
        removed = next(requests)
        assert [info.key for info in store.list()] == sorted({*keys} - {*removed})
        with pytest.raises(ValueError):
            store.delete_many(["d/2", "../outside"])
        assert [info.key for info in store.list()] == sorted({*keys} - {*removed})

    def test_what_is_not_there_is_said_to_be_not_there(self, store: Store) -> None:
        """Missing keys raise ObjectNotFound, also below an object or if other keys begin alike."""
        store.put("a/b", b"1")
        for key in ["k", "a", "a/b/c", "a/bb"]:
            with pytest.raises(ObjectNotFound, match=key):
                store.get(key, max_bytes=9)
            with pytest.raises(ObjectNotFound, match=key):
                store.get_range(key, start=0, end=1)
            with pytest.raises(ObjectNotFound, match=key):
                store.size(key)

    def test_ranges_are_exact(self, store: Store) -> None:
        """Every range inside an object comes back whole; a range past the end is an error."""
        data = bytes(range(100))
        store.put("k", data)
        for start, end in [(0, 100), (0, 1), (99, 100), (7, 31), (0, 0), (50, 50), (100, 100)]:
            assert store.get_range("k", start=start, end=end) == data[start:end]
        for start, end in [(0, 101), (99, 101), (100, 101), (200, 300), (101, 101)]:
            with pytest.raises(StoreError) as caught:
                store.get_range("k", start=start, end=end)
            assert caught.value.retryable
        for start, end in [(-1, 3), (3, 2), (-3, -1)]:
            with pytest.raises(ValueError):
                store.get_range("k", start=start, end=end)

    def test_too_large_an_object_is_refused(self, store: Store) -> None:
        """An object above `max_bytes` is refused by its length, before it is read."""
        store.put("k", bytes(1_000))
        assert len(store.get("k", max_bytes=1_000)) == 1_000
        with pytest.raises(MalformedObject, match="1000 bytes"):
            store.get("k", max_bytes=999)

    @pytest.mark.parametrize("key", _BAD_KEYS)
    def test_bad_keys_are_refused(self, store: Store, key: str) -> None:
        """Every operation refuses bad keys before it does anything."""
        with pytest.raises(ValueError):
            store.put(key, b"")
        with pytest.raises(ValueError):
            store.create(key, b"")
        with pytest.raises(ValueError):
            store.get(key, max_bytes=1)
        with pytest.raises(ValueError):
            store.get_range(key, start=0, end=0)
        with pytest.raises(ValueError):
            store.size(key)
        with pytest.raises(ValueError):
            store.delete(key)
        if ".tmp-" not in key:  # local stores keep unfinished writes under such names
            with pytest.raises(ValueError):
                store.delete_unfinished(key)
        assert list(store.list()) == []

    @pytest.mark.parametrize("prefix", ["/", "../", "..", "a/../", "a//", "\u00e9", "a\0"])
    def test_bad_prefixes_are_refused(self, store: Store, prefix: str) -> None:
        """`list` refuses a bad prefix at the call, not when the first object is read."""
        with pytest.raises(ValueError):
            store.list(prefix)

    def test_all_characters_of_keys_mean_themselves(self, store: Store) -> None:
        """No character of a key is decoded, expanded or taken for a query."""
        keys = sorted(f"d/x{chr(code)}y" for code in range(0x21, 0x7F) if chr(code) not in "/\\")
        for key in keys:
            store.create(key, key.encode())
        assert [info.key for info in store.list("d/")] == keys
        for key in keys:
            assert store.get(key, max_bytes=99) == key.encode()

    def test_listing_is_by_prefix_and_ascending(self, store: Store) -> None:
        """A prefix matches characters, not directories; listings are in the order of keys."""
        keys = ["a-b", "a.json", "a/b.c", "a/b/c", "a/c", "a0", "b/a", "b/ab/c"]
        for key in reversed(keys):
            store.put(key, key.encode())
        assert [info.key for info in store.list()] == keys
        for prefix in ["a", "a/", "a/b", "b/a", "b/ab/", "c", "a/b/c", "a/b/c/", "a/b/cd"]:
            assert [info.key for info in store.list(prefix)] == [
                key for key in keys if key.startswith(prefix)
            ]
        assert all(abs(info.modified_ms - now_ms()) < 3_600_000 for info in store.list())
        assert all(info.size_bytes == len(info.key) for info in store.list())

    def test_listings_of_many_objects_are_whole(self, store: Store) -> None:
        """A listing of more than one page is complete, with and without a prefix."""
        keys = [f"m/{number:06d}" for number in range(self.many_objects)]
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(lambda key: store.put(key, b"x"), keys))
        assert [info.key for info in store.list()] == keys
        assert [info.key for info in store.list("m/0000")] == keys[:100]

    def test_nothing_is_cached(self, store: Store) -> None:
        """An object that another instance writes or removes appears or disappears at once."""
        second_store = self.other_instance(store)
        assert list(store.list()) == []
        second_store.put("k", b"1")
        assert [info.key for info in store.list()] == ["k"]
        assert store.get("k", max_bytes=9) == b"1"
        second_store.put("k", b"22")
        assert store.get("k", max_bytes=9) == b"22"
        assert store.size("k") == 2
        second_store.delete("k")
        assert list(store.list()) == []
        with pytest.raises(ObjectNotFound):
            store.size("k")

    def test_one_of_many_threads_creates(self, store: Store) -> None:
        """Exactly one thread creates the object, and the object has that thread's bytes."""
        store.probe()
        for round_number in range(3):
            key = f"race/{round_number}"
            bodies = [bytes([number]) * 10_000 for number in range(8)]
            with ThreadPoolExecutor(8) as threads:
                won = list(threads.map(lambda body, key=key: _create(store, key, body), bodies))
            assert sum(won) == 1
            assert store.get(key, max_bytes=10_000) == bodies[won.index(True)]

    def test_one_of_many_processes_creates(self, store: Store) -> None:
        """Exactly one process creates the object; the processes get the store as a pickle."""
        if not self.shared_between_processes:
            assert _create(store, "race", b"0" * 1_000)
            return
        spawn = multiprocessing.get_context("spawn")
        pipes = [spawn.Pipe() for _ in range(3)]
        processes = [
            spawn.Process(target=_create_when_told, args=(store, str(number), their_end))
            for number, (_, their_end) in enumerate(pipes)
        ]
        for process in processes:
            process.start()
        for our_end, _ in pipes:
            assert our_end.poll(240) and our_end.recv() == "ready"
        for our_end, _ in pipes:
            our_end.send("go")
        won = [bool(our_end.poll(240) and our_end.recv()) for our_end, _ in pipes]
        for process in processes:
            process.join(240)
            assert process.exitcode == 0
        assert sum(won) == 1
        assert store.get("race", max_bytes=1_000) == str(won.index(True)).encode() * 1_000

    def test_threads_read_and_write_at_once(self, store: Store) -> None:
        """Each thread reads its own objects, whole."""

        def work(number: int) -> bool:
            data = bytes([number]) * (10_000 + number)
            for repeat in range(5):
                store.put(f"{number}/{repeat}", data)
                if store.get(f"{number}/{repeat}", max_bytes=20_000) != data:
                    return False
                store.delete(f"{number}/{repeat}")
            return True

        with ThreadPoolExecutor(8) as threads:
            assert all(threads.map(work, range(8)))
        assert list(store.list()) == []

    def test_a_reader_sees_old_or_new_never_a_mixture(self, store: Store) -> None:
        """While an object is replaced, each read returns all old or all new bytes."""
        versions = [bytes([number]) * 50_000 for number in range(4)]
        store.put("k", versions[0])
        with ThreadPoolExecutor(1) as threads:
            writing = threads.submit(
                lambda: [store.put("k", versions[number % 4]) for number in range(40)]
            )
            while not writing.done():
                assert store.get("k", max_bytes=50_000) in versions
            writing.result()

    def test_a_probe_passes_and_leaves_nothing(self, store: Store) -> None:
        """Two probes in a row pass and leave no object behind."""
        store.probe()
        store.probe()
        assert list(store.list()) == []
        assert list(store.list_unfinished()) == []

    def test_only_unfinished_things_are_deleted_as_such(self, store: Store) -> None:
        """`delete_unfinished` deletes only unfinished writes, never an object."""
        store.put("k", b"1")
        assert list(store.list_unfinished()) == []
        with pytest.raises(ValueError):
            store.delete_unfinished("k")
        assert store.get("k", max_bytes=9) == b"1"

    def test_a_pickle_is_the_same_store(self, store: Store) -> None:
        """A pickled store has the same URL, which is printable."""
        store.put("k", b"1")
        copy: Store = pickle.loads(pickle.dumps(store))
        assert copy.url == store.url
        assert copy.get("k", max_bytes=9) == b"1"
        assert store.url.isprintable() and store.url in repr(store)

    def test_retries_heal_what_fails_once(self, store: Store) -> None:
        """Retries succeed if each call fails once before the store, and listings in the middle."""
        faulty = FaultStore(
            store,
            [
                Fault.once_for_each_call(on=OPERATIONS - {"list"}),
                Fault.once_for_each_call(on=frozenset({"list"}), kind="break_off"),
            ],
        )
        retried = RetryingStore(faulty, Retries(first_pause_seconds=0.001))
        retried.probe()
        retried.create("a/1", b"one")
        for key in ("a/1", "a/2", "b"):
            retried.put(key, key.encode())
        with pytest.raises(ObjectExists):
            retried.create("a/2", b"other")
        assert [info.key for info in retried.list()] == ["a/1", "a/2", "b"]
        assert [info.key for info in retried.list("a")] == ["a/1", "a/2"]
        assert retried.get("a/2", max_bytes=9) == b"a/2"
        assert retried.get_range("a/2", start=1, end=3) == b"/2"
        assert retried.size("a/2") == 3
        retried.delete("a/2")
        with pytest.raises(ObjectNotFound):
            retried.get("a/2", max_bytes=9)
        removed = [key for request in retried.delete_many(["a/1", "c"]) for key in request]
        assert removed == ["a/1", "c"]
        assert [info.key for info in retried.list()] == ["b"]
        assert list(retried.list_unfinished()) == []

    def test_a_lost_answer_is_told_from_another_writer(self, store: Store) -> None:
        """A writer whose reply was lost is told that the object exists, and finds its own bytes.

        A later writer is told the same, and finds the other writer's bytes.
        """
        faulty = FaultStore(store, [Fault.lost_reply(key_contains=key) for key in ("k1", "k2")])
        retried = RetryingStore(faulty, Retries(first_pause_seconds=0.001))
        with pytest.raises(ObjectExists, match="k1"):
            retried.create("k1", b"mine")
        assert retried.get("k1", max_bytes=9) == b"mine"
        assert retried.create_or_read("k2", b"mine", max_bytes=9) == b"mine"
        assert retried.create_or_read("k2", b"other", max_bytes=9) == b"mine"
        assert retried.create_or_read("k3", b"mine", max_bytes=9) is None

    def other_instance(self, store: Store) -> Store:
        """Return another instance that sees the same objects."""
        copy: Store = pickle.loads(pickle.dumps(store))
        return copy


def _create(store: Store, key: str, data: bytes) -> bool:
    try:
        store.create(key, data)
    except ObjectExists:
        return False
    return True


def _create_when_told(store: Store, name: str, pipe: Connection) -> None:
    list(store.list("race"))  # so that whatever the first use sets up is ready
    pipe.send("ready")
    pipe.recv()
    pipe.send(_create(store, "race", name.encode() * 1_000))
