"""What is freed goes back to the system, where it would stay with the process."""

from __future__ import annotations

import sys

import psutil
import pytest

from recpoint.flows.agent.agent import FreedMemory

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only glibc can be asked")

_BLOCKS, _BYTES = 50_000, 2_000


def _resident() -> int:
    size: int = psutil.Process().memory_info().rss
    return size


def test_what_lies_between_blocks_in_use_is_given_back() -> None:
    freed = FreedMemory(every_seconds=0.0)
    blocks = [bytes([number % 256]) * _BYTES for number in range(_BLOCKS)]
    # Every fiftieth lives on, the last one too: nothing behind it is free.
    kept = blocks[::-50]
    blocks.clear()
    before = _resident()
    assert freed.give_back(1)
    assert before - _resident() > _BLOCKS * _BYTES / 4
    assert len(kept) == _BLOCKS / 50


def test_only_now_and_then_and_after_something_was_done() -> None:
    often, seldom = FreedMemory(every_seconds=0.0), FreedMemory(every_seconds=3600.0)
    assert not often.give_back(0)
    assert [often.give_back(done) for done in (1, 1, 2)] == [True, False, True]
    assert not seldom.give_back(1)
