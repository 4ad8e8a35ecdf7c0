"""The compiled module: how it is loaded, which version runs, and what its threads must not do."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import recpoint.kernels
from recpoint import kernels
from recpoint.kernels import native
from tests.torch_interpreter import run_program

KERNELS = Path(recpoint.kernels.__file__).parent


def test_the_kernels_import_without_triton_and_compile_nothing() -> None:
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import recpoint, recpoint.kernels\n"
        "recpoint.Checkpointer\n"
        "names = [name for name in sys.modules if name.startswith('recpoint.')]\n"
        "assert not [name for name in names if name.endswith('.triton')]\n"
        "assert not {'numba', 'llvmlite'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=240)


@pytest.mark.parametrize("name", native.INSTRUCTION_SETS)
def test_an_environment_variable_forces_an_instruction_set(name: str) -> None:
    code = (
        "from recpoint.kernels import native, implementation\n"
        "name = native.instruction_set()\n"
        "print(name, implementation.on_cpu().endswith(name))\n"
    )
    ran = run_program(code, environment=os.environ | {"RECPOINT_INSTRUCTION_SET": name})
    assert (ran.returncode, ran.stdout) == (0, f"{name} True\n"), ran.stderr


def test_an_instruction_set_that_is_not_here_is_refused_by_name() -> None:
    ran = run_program(
        "import recpoint.kernels", environment=os.environ | {"RECPOINT_INSTRUCTION_SET": "sse9"}
    )
    assert ran.returncode != 0
    expected = f"'sse9', expected one of {', '.join(native.INSTRUCTION_SETS)}"
    assert f"RECPOINT_INSTRUCTION_SET: {expected}" in ran.stderr
    before = native.instruction_set()
    with pytest.raises(ValueError, match="sse9"), native.use("sse9"):
        pass
    assert native.instruction_set() == before


def test_a_library_older_than_its_sources_names_the_command(tmp_path: Path) -> None:
    copy = tmp_path / "kernels"
    shutil.copytree(KERNELS, copy, ignore=shutil.ignore_patterns("__pycache__"))
    native._refuse_stale(copy)
    source = copy / "row_digest" / "native.cpp"
    source.write_text(source.read_text().replace("29", "28"))
    with pytest.raises(ImportError, match="older than their C.. sources.*Next: make install"):
        native._refuse_stale(copy)
    for kind in ("*.cpp", "*.h"):
        for file in copy.rglob(kind):
            file.unlink()
    native._refuse_stale(copy)  # a wheel has no sources


def test_a_call_with_other_arguments_is_refused() -> None:
    with pytest.raises(TypeError, match="1 arguments, expected 2"):
        native.library.clear_bits(0)
    with pytest.raises(TypeError):
        native.library.clear_bits("0", 0)
    with pytest.raises(TypeError):
        native.library.clear_bits(0, 1.5)
    with pytest.raises(OverflowError):
        native.library.clear_bits(0, 1 << 70)
    with pytest.raises(TypeError):
        native.library.mark_tables(None, 0, 0, 0)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_has_threads_of_its_own() -> None:
    code = (
        "import os, torch\n"
        "from recpoint.kernels import native, row_gather\n"
        "torch.set_num_threads(2)\n"
        "native.SPLIT_BYTES = 1\n"
        "table, ids = torch.randn(100, 4), torch.arange(99, -1, -1)\n"
        "def work():\n"
        "    out = torch.zeros(100, 4)\n"
        "    row_gather.gather(table, ids, out)\n"
        "    return torch.equal(out, table.flip(0))\n"
        "assert work()\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    os._exit(0 if work() and work() else 3)\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0\n"
    )
    ran = run_program(code)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="no /proc here")
def test_no_signal_goes_to_a_thread_of_the_pool() -> None:
    """A signal that arrived there would not interrupt a sleep in one of Python's threads."""
    code = (
        "import os, signal, torch\n"
        "from pathlib import Path\n"
        "from recpoint.kernels import native, row_gather\n"
        "torch.set_num_threads(3)\n"
        "native.SPLIT_BYTES = 1\n"
        "table, ids = torch.randn(100, 4), torch.arange(100)\n"
        "out = torch.empty(100, 4)\n"
        "before = set(os.listdir('/proc/self/task'))\n"
        "row_gather.gather(table, ids, out)\n"
        "own = set(os.listdir('/proc/self/task')) - before\n"
        "assert len(own) == 2, own\n"
        "for task in own:\n"
        "    status = Path('/proc/self/task', task, 'status').read_text()\n"
        "    blocked = int(status.split('SigBlk:')[1].split()[0], 16)\n"
        "    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGUSR1):\n"
        "        assert blocked >> number - 1 & 1, (task, number)\n"
    )
    ran = run_program(code)
    assert ran.returncode == 0, ran.stderr


def test_threads_of_the_pool_treat_subnormal_numbers_as_their_caller_does() -> None:
    """A new thread inherits that from its maker. The first caller makes the pool's threads."""
    code = (
        "import threading, torch\n"
        "from recpoint.kernels import native, quantize\n"
        "torch.set_num_threads(4)\n"
        "native.SPLIT_BYTES = 1\n"
        "codes = torch.ones(20_000, 16, dtype=torch.uint8)\n"
        "scale = torch.full((20_000,), 1.5 * 2.0**-126)\n"
        "offset = torch.full((20_000,), -(2.0**-126))\n"
        "def flushing():\n"
        "    torch.set_flush_denormal(True)\n"
        "    quantize.dequantize(codes, scale, offset)\n"
        "first = threading.Thread(target=flushing)\n"
        "first.start(); first.join()\n"
        "for _ in range(20):\n"
        "    found = quantize.dequantize(codes, scale, offset)\n"
        "    assert (found.view(torch.int32) == 0x00400000).all()\n"  # 2^-127
    )
    ran = run_program(code)
    assert ran.returncode == 0, ran.stderr


def test_tensors_on_other_devices_are_refused_by_name() -> None:
    elsewhere = torch.zeros(4, 4, device="meta")
    with pytest.raises(ValueError, match="rows: device meta, expected cpu or cuda"):
        kernels.quantize.quantize(elsewhere, 4)
    with pytest.raises(ValueError, match="source: device meta"):
        kernels.row_gather.gather(elsewhere, elsewhere, elsewhere)
    table, ids = torch.zeros(4, 4), torch.zeros(3, dtype=torch.int64)
    with pytest.raises(ValueError, match="positions: device meta, expected cpu"):
        kernels.row_gather.move(table, ids.to("meta"), table.clone(), torch.arange(3))
