from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from recpoint import kernels
from recpoint.kernels import threads as kernel_threads
from tests.torch_interpreter import run_program


def test_the_kernels_import_without_triton() -> None:
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "from recpoint import kernels\n"
        "kernels.warm_up()\n"
        "names = [name for name in sys.modules if name.startswith('recpoint.')]\n"
        "assert not [name for name in names if name.endswith('.triton')]\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=240)


def test_after_warming_up_nothing_is_compiled() -> None:
    code = (
        "import warnings\n"
        "warnings.simplefilter('error')\n"
        "import torch\n"
        "from numba.core.dispatcher import Dispatcher\n"
        "import sys\n"
        "from recpoint import kernels\n"
        "kernels.warm_up()\n"
        "found = {f'{m}.{n}': v for m in list(sys.modules) if m.startswith('recpoint.kernels')\n"
        "         for n, v in vars(sys.modules[m]).items()\n"
        "         if isinstance(v, Dispatcher) and n.startswith('_')}\n"
        "assert len(found) >= 15, found\n"
        "cold = [name for name, kernel in found.items() if not kernel.signatures]\n"
        "assert not cold, cold\n"
    )
    ran = run_program(code)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_has_threads_of_its_own() -> None:
    code = (
        "import os, torch\n"
        "from recpoint.kernels import row_gather, threads\n"
        "torch.set_num_threads(2)\n"
        "threads.SPLIT_BYTES = 1\n"
        "table, ids = torch.randn(100, 4), torch.arange(99, -1, -1)\n"
        "def work():\n"
        "    out = torch.zeros(100, 4)\n"
        "    row_gather.gather(table, ids, out)\n"
        "    return torch.equal(out, table.flip(0))\n"
        "assert work()\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    os._exit(0 if work() else 3)\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0\n"
    )
    ran = run_program(code)
    assert ran.returncode == 0, ran.stderr


def test_a_part_that_fails_is_reported_after_all_have_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kernel_threads, "SPLIT_BYTES", 1)
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    running: set[int] = set()

    def part(start: int, stop: int) -> None:
        running.add(start)
        try:
            if start == 50:
                raise ArithmeticError("this part")
            sum(range(20_000))
        finally:
            running.discard(start)

    try:
        with pytest.raises(ArithmeticError, match="this part"):
            kernel_threads.over_rows(part, 100, row_bytes=8)
        assert running == set()
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("then", ["pass", "raise ArithmeticError"])
def test_an_interrupt_waits_for_the_threads_that_write_to_the_callers_memory(then: str) -> None:
    code = (
        "import signal, threading, time, torch\n"
        "from recpoint.kernels import threads\n"
        "torch.set_num_threads(2)\n"
        "threads.SPLIT_BYTES = 1\n"
        "begun, ended = threading.Event(), threading.Event()\n"
        "main = threading.main_thread()\n"
        "def part(start, stop):\n"
        "    if threading.current_thread() is main:\n"
        "        begun.wait(60)\n"
        f"        {then}\n"
        "    elif not begun.is_set():\n"
        "        begun.set()\n"
        "        for _ in range(3):\n"
        "            time.sleep(0.2)\n"
        "            signal.pthread_kill(main.ident, signal.SIGINT)\n"
        "        time.sleep(0.2)\n"
        "        ended.set()\n"
        "try:\n"
        "    threads.over_rows(part, 100, row_bytes=8)\n"
        "except KeyboardInterrupt:\n"
        "    print('interrupted', ended.is_set())\n"
    )
    ran = run_program(code)
    assert (ran.returncode, ran.stdout) == (0, "interrupted True\n"), ran.stderr


def test_an_interrupt_while_work_is_handed_over_waits_for_it_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun, ended = threading.Event(), threading.Event()

    class Interrupted(ThreadPoolExecutor):
        def submit(self, *args: Any, **kwargs: Any) -> Any:
            super().submit(*args, **kwargs)
            begun.wait(60)
            raise KeyboardInterrupt

    def part(start: int, stop: int) -> None:
        begun.set()
        time.sleep(0.01)
        if stop == 100:
            ended.set()

    monkeypatch.setattr(kernel_threads, "SPLIT_BYTES", 1)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with Interrupted(1) as pool:
            monkeypatch.setattr(kernel_threads, "_pool", (1, pool))
            with pytest.raises(KeyboardInterrupt):
                kernel_threads.over_rows(part, 100, row_bytes=8)
            assert ended.is_set()
    finally:
        torch.set_num_threads(before)


def test_every_part_runs_once_also_while_all_other_threads_are_busy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kernel_threads, "SPLIT_BYTES", 1)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    release = threading.Event()
    pool = kernel_threads._workers(2)
    blocked = [pool.submit(release.wait, 60) for _ in range(pool._max_workers)]
    try:
        spans = kernel_threads.over_rows(lambda a, b: (a, b), 100, row_bytes=8)
    finally:
        release.set()
        torch.set_num_threads(before)
    assert all(future.result() for future in blocked)
    assert len(spans) > 3
    assert [row for a, b in spans for row in range(a, b)] == list(range(100))


def test_tensors_on_other_devices_are_refused_by_name() -> None:
    elsewhere = torch.zeros(4, 4, device="meta")
    with pytest.raises(ValueError, match="rows: device meta, expected cpu or cuda"):
        kernels.quantize.quantize(elsewhere, 4)
    with pytest.raises(ValueError, match="source: device meta"):
        kernels.row_gather.gather(elsewhere, elsewhere, elsewhere)
