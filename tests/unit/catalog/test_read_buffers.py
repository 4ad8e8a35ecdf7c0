"""Memory that is lent for reading: never to two at once, and not more of it than is in use."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from recpoint.catalog.restore.chunks import ReadBuffers
from recpoint.catalog.store.local import LocalStore
from recpoint.errors import MalformedObject, ObjectNotFound

MIB = 1 << 20


def address(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data)


def test_what_is_lent_is_not_lent_again_while_a_part_of_it_is_looked_at() -> None:
    buffers = ReadBuffers()
    lent = buffers.lend(MIB)
    lent[:] = b"\1" * MIB
    part = np.frombuffer(lent.toreadonly()[10:20], np.uint8)
    del lent
    other = buffers.lend(MIB)
    other[:] = b"\2" * MIB
    assert part.tolist() == [1] * 10


def test_what_nobody_looks_at_is_lent_again() -> None:
    buffers = ReadBuffers()
    lent = buffers.lend(MIB + 1)
    where = address(lent)
    del lent
    again = buffers.lend(2 * MIB)
    assert (address(again), len(again)) == (where, 2 * MIB)
    assert address(buffers.lend(5)) != where


def test_a_larger_one_takes_the_place_of_one_that_is_too_small() -> None:
    buffers = ReadBuffers()
    small = buffers.lend(1)
    del small
    large = buffers.lend(3 * MIB)
    assert len(large) == 3 * MIB
    where = address(large)
    del large
    assert address(buffers.lend(1)) == where


def test_an_object_is_read_into_lent_memory(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    data = bytes(range(256)) * 5000
    store.create("k", data)
    store.create("empty", b"")
    buffers = ReadBuffers()
    read = store.get_lent("k", max_bytes=len(data), lend=buffers.lend)
    assert read == data
    where = address(read)
    del read
    read = store.get_lent("k", max_bytes=len(data), lend=buffers.lend)
    assert bytes(read) == data
    assert address(read) == where
    assert store.get_lent("empty", max_bytes=9, lend=buffers.lend).nbytes == 0
    with pytest.raises(MalformedObject):
        store.get_lent("k", max_bytes=len(data) - 1, lend=buffers.lend)
    with pytest.raises(ObjectNotFound):
        store.get_lent("other", max_bytes=9, lend=buffers.lend)
