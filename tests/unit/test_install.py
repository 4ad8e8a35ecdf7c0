"""`make install` chooses torch's index, says what it installs, and shows why pip fails."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from build_backend import install

ROOT = Path(__file__).resolve().parents[2]


def wheel(directory: Path, name: str, version: str, requires: str = "") -> None:
    """Write an empty wheel."""
    info = f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{requires}"
    files = {
        f"{info}/METADATA": metadata,
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    with zipfile.ZipFile(directory / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
        archive.writestr(f"{info}/RECORD", "".join(f"{path},,\n" for path in files))


@pytest.fixture
def cpu_index(tmp_path: Path) -> Iterator[str]:
    """A server of an index that has a page for torch."""
    (tmp_path / "cpu" / "torch").mkdir(parents=True)
    handler = partial(SimpleHTTPRequestHandler, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}/cpu"
        server.shutdown()
        thread.join()


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only directory of PATH, empty."""
    directory = tmp_path / "programs"
    directory.mkdir()
    monkeypatch.setenv("PATH", str(directory))
    return directory


def test_a_failed_pip_shows_its_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With `--quiet`, pip would end with ResolutionImpossible and leave out the conflict."""
    wheel(tmp_path, "shared", "1")
    wheel(tmp_path, "shared", "2")
    wheel(tmp_path, "older", "1", "Requires-Dist: shared<2\n")
    wheel(tmp_path, "newer", "1", "Requires-Dist: shared>=2\n")
    installer = install.Installer(tmp_path, steps=1, python=Path(sys.executable))
    installer.announce("older and newer")
    links = ["--dry-run", "--no-index", "--find-links", str(tmp_path)]
    assert not installer.pip("install", *links, "older", "newer")
    shown = capsys.readouterr().out
    assert shown.startswith("[1/1] older and newer\nERROR: ")
    assert "older 1 depends on shared<2" in shown and "newer 1 depends on shared>=2" in shown
    assert f"pip failed (exit code 1); its whole output: {tmp_path / 'install.log'}" in shown
    assert "Processing" in (tmp_path / "install.log").read_text()


def test_lines_of_progress_name_large_downloads() -> None:
    lines = {
        "  Downloading torch-2.13.0-cp311-cp311-linux_x86_64.whl (903.1 MB)\n": (
            "downloads torch-2.13.0-cp311-cp311-linux_x86_64.whl, 903.1 MB"
        ),
        "Downloading a/b/cudnn.whl (1.2 GB)": "downloads cudnn.whl, 1.2 GB",
        "  Downloading six-1.17.0-py2.py3-none-any.whl (11 kB)": None,
        "  Downloading crc32c-2.9-cp311-abi3-linux_x86_64.whl (19.9 MB)": None,
        "  Building editable for recpoint (pyproject.toml): started": "builds recpoint",
        "Installing collected packages: six, torch": "unpacks 2 packages",
        "Collecting torch==2.13.0": None,
    }
    assert {line: install.progress(line) for line in lines} == lines


def test_the_build_for_cpus_is_chosen_without_nvidia_smi(programs: Path, cpu_index: str) -> None:
    source, options = install.torch_source(cpu_index)
    assert "for CPUs" in source and cpu_index in source
    assert options == ["--extra-index-url", cpu_index]


def test_the_users_index_is_chosen_with_nvidia_smi(programs: Path, cpu_index: str) -> None:
    (programs / "nvidia-smi").write_text("#!/bin/sh\n")
    (programs / "nvidia-smi").chmod(0o755)
    source, options = install.torch_source(cpu_index)
    assert not options and source == "with CUDA, since there is nvidia-smi: 4.7 GB of disk"


def test_pip_prefers_a_build_for_cpus_to_the_same_version(tmp_path: Path) -> None:
    """So an additional index is enough."""
    wheel(tmp_path, "example", "2.13.0")
    wheel(tmp_path, "example", "2.13.0+cpu")
    pip = [sys.executable, "-m", "pip", "install", "--dry-run", "--no-index"]
    done = subprocess.run(
        [*pip, "--find-links", str(tmp_path), "example==2.13.0"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "Would install example-2.13.0+cpu" in done.stdout


@pytest.mark.parametrize("index", ["", "file:///nowhere"])
def test_without_an_index_of_cpu_builds_the_size_is_named(programs: Path, index: str) -> None:
    source, options = install.torch_source(index)
    assert not options
    assert source.endswith("4.7 GB of disk if it has the build with CUDA")


def test_an_index_that_accepts_and_does_not_answer_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}/whl/cpu"
        assert not install.answers(address, seconds=0.05)


def test_a_python_that_is_too_old_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert install.missing_from_python(headers=True) is None
    monkeypatch.setattr(sys, "version_info", (3, 10, 12, "final", 0))
    refused = install.missing_from_python(headers=False)
    assert refused is not None
    assert "found Python 3.10.12" in refused and "Next: make PYTHON=python3.11" in refused


@pytest.mark.parametrize(("goal", "program"), [("install", "development"), ("matrix", "tests.m")])
def test_make_gives_an_index_that_its_caller_may_replace(goal: str, program: str) -> None:
    # Without what a `make` above these tests was given.
    given = ("MAKE", "MFLAGS", "TORCH_CPU_INDEX")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(given)}

    def command(*arguments: str) -> str:
        plan = ["make", "--dry-run", "--always-make", goal, *arguments]
        done = subprocess.run(
            plan, cwd=ROOT, env=environment, capture_output=True, text=True, check=True
        )
        return next(line for line in done.stdout.splitlines() if program in line).strip()

    assert command().endswith("--torch-cpu-index 'https://download.pytorch.org/whl/cpu'")
    assert command("TORCH_CPU_INDEX=").endswith("--torch-cpu-index ''")
