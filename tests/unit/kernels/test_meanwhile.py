"""The calling thread calls `meanwhile` once while others copy dirty rows, and nothing is lost."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable

import numpy as np
import pytest
import torch

from recpoint.kernels import dirty_bitmap, dirty_rows
from recpoint.kernels.dirty_rows import into
from tests.torch_interpreter import run_program

ROWS = 1_000_000


class _Copy:
    """A copy of every third row of a table, in 16 parts."""

    def __init__(self) -> None:
        self.table = torch.arange(2 * ROWS, dtype=torch.float32).view(ROWS, 2)
        self.wanted = torch.arange(0, ROWS, 3)
        self.bitmap = dirty_bitmap.new(ROWS)
        dirty_bitmap.mark(self.bitmap, self.wanted, rows=ROWS)
        self.ids, self.out = torch.zeros_like(self.wanted), torch.zeros(len(self.wanted), 2)

    def run(self, meanwhile: Callable[[], None]) -> None:
        tally = dirty_rows.count([self.bitmap], rows=[ROWS])
        tally.copy([into(self.ids, (self.table, self.out))], meanwhile=meanwhile)

    @property
    def is_done(self) -> bool:
        # numpy, because torch's operations have no threads in a forked child.
        wanted = self.wanted.numpy()
        return np.array_equal(self.ids.numpy(), wanted) and np.array_equal(
            self.out.numpy(), self.table.numpy()[wanted]
        )


def test_the_calling_thread_does_it_once_and_the_rows_are_copied(threads: int) -> None:
    copy = _Copy()
    called: list[threading.Thread] = []
    sums: list[float] = []

    def meanwhile() -> None:
        called.append(threading.current_thread())
        sums.append(float(torch.ones(1 << 20).sum()))  # torch splits this over threads

    for n in range(1, 6):
        copy.ids.zero_()
        copy.out.zero_()
        copy.run(meanwhile)
        assert copy.is_done
        assert called == [threading.current_thread()] * n
    assert sums == [float(1 << 20)] * 5
    assert float(torch.ones(1 << 20).sum()) == float(1 << 20)


@pytest.mark.parametrize("error", [ArithmeticError, SystemExit, KeyboardInterrupt])
def test_what_it_raises_is_raised_once_the_rows_are_copied(
    error: type[BaseException], threads: int
) -> None:
    copy = _Copy()

    def meanwhile() -> None:
        raise error("of my own")

    with pytest.raises(error, match="of my own"):
        copy.run(meanwhile)
    assert copy.is_done


def test_a_source_that_is_given_other_memory_meanwhile_is_copied_as_it_was(threads: int) -> None:
    """`vector_to_parameters` does so. The threads read memory that nobody else holds any more."""
    copy = _Copy()
    copy.table = copy.table.clone()  # no view, whose base would hold the memory
    rows, storage = copy.table[copy.wanted], weakref.ref(copy.table.untyped_storage())
    is_kept: list[bool] = []

    def meanwhile() -> None:
        copy.table.data = torch.zeros_like(copy.table)
        is_kept.append(storage() is not None)

    copy.run(meanwhile)
    is_kept.append(storage() is not None)
    assert is_kept == [True, False]
    assert torch.equal(copy.out, rows)


def test_it_is_done_where_nothing_is_to_be_copied() -> None:
    called: list[int] = []
    dirty_rows.count([], rows=[]).copy([], meanwhile=lambda: called.append(1))
    bitmap = dirty_bitmap.new(100)
    ids, table = torch.empty(0, dtype=torch.int64), torch.rand(100, 2)
    to = into(ids, (table, torch.empty(0, 2)))
    dirty_rows.count([bitmap], rows=[100]).copy([to], meanwhile=lambda: called.append(2))
    assert called == [1, 2]


def test_other_threads_copy_in_the_meantime() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        copy = _Copy()
        seen: list[bool] = []

        def meanwhile() -> None:
            deadline = time.monotonic() + 60
            while not copy.is_done and time.monotonic() < deadline:
                time.sleep(0.001)
            seen.append(copy.is_done)

        copy.run(meanwhile)
        assert seen == [True]
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("joined", [True, False])
def test_nobody_writes_to_memory_that_was_let_go_of(joined: bool, threads: int) -> None:
    """The memory that a copy reads is kept until the copy is done, and no longer."""
    copy = _Copy()
    given = copy.table.clone()
    kept = weakref.ref(given)
    tally = dirty_rows.count([copy.bitmap], rows=[ROWS])

    def meanwhile() -> None:
        nonlocal given
        del given
        assert kept() is not None

    tally.copy([into(copy.ids, (given, copy.out))], meanwhile=meanwhile if joined else None)
    if not joined:
        del given
    assert copy.is_done and kept() is None


def test_an_error_of_it_is_let_go_of(threads: int) -> None:
    """Its traceback would keep the slot that was written alive until a garbage collection."""
    copy = _Copy()
    kept: list[weakref.ref[_Copy]] = []

    def meanwhile() -> None:
        own = _Copy()
        kept.append(weakref.ref(own))
        raise ArithmeticError

    gc.disable()
    try:
        with contextlib.suppress(ArithmeticError):
            copy.run(meanwhile)
        assert [ref() for ref in kept] == [None]
    finally:
        gc.enable()


def test_ctrl_c_in_it_ends_training_once_the_rows_are_copied() -> None:
    code = (
        "import os, signal, torch\n"
        "from tests.unit.kernels.test_meanwhile import _Copy\n"
        "torch.set_num_threads(2)\n"
        "copy = _Copy()\n"
        "def meanwhile():\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    while True:\n"
        "        pass\n"
        "try:\n"
        "    copy.run(meanwhile)\n"
        "except KeyboardInterrupt:\n"
        "    print('interrupted', copy.is_done)\n"
    )
    ran = run_program(code)
    assert (ran.returncode, ran.stdout) == (0, "interrupted True\n"), ran.stderr


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_process_may_be_forked_in_it() -> None:
    """Readers start their worker processes when they are asked for their state."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        copy, own = _Copy(), _Copy()
        ended: list[int | None] = []

        def work() -> None:
            own.run(lambda: None)
            os._exit(0 if own.is_done else 1)

        def meanwhile() -> None:
            child = multiprocessing.get_context("fork").Process(target=work, daemon=True)
            child.start()
            child.join(60)
            ended.append(child.exitcode)
            if child.exitcode is None:
                os.kill(child.pid or 0, signal.SIGKILL)

        copy.run(meanwhile)
        assert ended == [0]
        assert copy.is_done
    finally:
        torch.set_num_threads(before)
