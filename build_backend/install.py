"""Makes the environments that the Makefile uses, with the versions of constraints.txt.

    python build_backend/install.py development .venv [--torch-cpu-index URL]
    python build_backend/install.py documentation .venv-docs
    python build_backend/install.py kernels .venv

A line says what each step installs, and more lines name large downloads. If a step fails, pip's
reason is shown. All that pip prints is in `install.log` in the environment.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
import urllib.request
from collections.abc import Sequence
from http.client import HTTPException
from pathlib import Path
from typing import Any, Final

__all__ = [
    "Installer",
    "answers",
    "main",
    "missing_from_python",
    "pip_reason",
    "progress",
    "torch_source",
]

ROOT: Final = Path(__file__).resolve().parents[1]

#: Disk that torch 2.13.0 of PyPI takes on x86-64 with the CUDA libraries that it requires.
_CUDA_SIZE: Final = "4.7 GB of disk"

#: TorchRec without its requirements, which would be another torch and the CUDA build of FBGEMM.
_TORCHREC: Final = (
    "torchrec", "fbgemm-gpu-cpu", "torchmetrics", "tensordict", "pyre-extensions", "pyvers",
    "typing-inspect", "tqdm", "cloudpickle", "lightning-utilities", "mypy-extensions", "packaging",
)  # fmt: skip

_ANSWER_SECONDS: Final = 5.0
_LARGE_MB: Final = 20.0
_DOWNLOAD: Final = re.compile(r"\s*Downloading (\S+) \(([\d.]+) (MB|GB)\)")
_BUILDS: Final = re.compile(r"\s*Building (?:editable|wheel) for (\S+) .*: started")
_UNPACKS: Final = re.compile(r"\s*Installing collected packages: (.*)")
_LAST_LINES: Final = 40


class Installer:
    """Runs pip in a virtual environment, and says what it does.

    Args:
        environment: directory of the virtual environment.
        steps: number of steps that will be announced.
        python: the program that runs pip; None: the environment's.
    """

    def __init__(self, environment: Path, *, steps: int, python: Path | None = None) -> None:
        self._python = python or environment / "bin" / "python"
        self._log = environment / "install.log"
        self._steps = steps
        self._step = 0

    def announce(self, title: str) -> None:
        """Print a line for the next step."""
        self._step += 1
        print(f"[{self._step}/{self._steps}] {title}", flush=True)

    def pip(self, *arguments: str) -> bool:
        """Run pip with these arguments; print its reason if it fails.

        Returns:
            Whether it succeeded.
        """
        start_s = time.monotonic()
        command = [str(self._python), "-m", "pip", "--disable-pip-version-check", *arguments]
        lines: list[str] = []
        with (
            self._log.open("a", encoding="utf-8") as log,
            subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
                encoding="utf-8",
                errors="replace",
            ) as process,
        ):
            assert process.stdout is not None
            for line in process.stdout:
                log.write(line)
                lines.append(line.rstrip())
                if shown := progress(line):
                    print(f"      {shown}", flush=True)
        if process.returncode:
            print("\n".join(pip_reason(lines)))
            print(f"pip failed (exit code {process.returncode}); its whole output: {self._log}")
        else:
            print(f"      took {time.monotonic() - start_s:.0f} s", flush=True)
        return process.returncode == 0


def progress(line: str) -> str | None:
    """What to show of a line of pip while it works; None: nothing."""
    if download := _DOWNLOAD.match(line):
        name, size, unit = download.groups()
        is_large = unit == "GB" or float(size) >= _LARGE_MB
        return f"downloads {name.rpartition('/')[2]}, {size} {unit}" if is_large else None
    if built := _BUILDS.match(line):
        return f"builds {built[1]}"
    if unpacked := _UNPACKS.match(line):
        return f"unpacks {unpacked[1].count(',') + 1} packages"
    return None


def pip_reason(lines: Sequence[str]) -> Sequence[str]:
    """The lines of a failed pip from its first error on; without an error, its last lines."""
    for number, line in enumerate(lines):
        if re.match(r"\s*(ERROR|error):", line):
            return lines[number:]
    return lines[-_LAST_LINES:]


def answers(index: str, *, seconds: float = _ANSWER_SECONDS) -> bool:
    """Whether an index has a page for torch, and begins to answer in time."""
    try:
        with urllib.request.urlopen(f"{index.rstrip('/')}/torch/", timeout=seconds):
            return True
    except (OSError, ValueError, HTTPException):  # ValueError: it is no URL
        return False


def torch_source(cpu_index: str) -> tuple[str, list[str]]:
    """Choose the index for torch: with nvidia-smi the user's own, else one of CPU builds.

    Args:
        cpu_index: URL of the index of CPU builds; empty: none.

    Returns:
        What to tell the user, and pip's options. pip prefers `2.13.0+cpu` to `2.13.0`, so an
        additional index is enough, and torch's requirements still come from the user's own.
    """
    if shutil.which("nvidia-smi"):
        return f"with CUDA, since there is nvidia-smi: {_CUDA_SIZE}", []
    if cpu_index and answers(cpu_index):
        options = ["--extra-index-url", cpu_index]
        return f"for CPUs, since there is no nvidia-smi: from {cpu_index}", options
    reason = f"{cpu_index} does not answer" if cpu_index else "TORCH_CPU_INDEX is empty"
    return f"from pip's own index, since {reason}: {_CUDA_SIZE} if it has the build with CUDA", []


def _pinned(name: str) -> str:
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith(f"{name}=="):
            return line
    raise LookupError(f"constraints.txt: found no pin of {name}")


def _project() -> dict[str, Any]:
    import tomllib

    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    project: dict[str, Any] = tomllib.loads(text)["project"]
    return project


def missing_from_python(*, headers: bool) -> str | None:
    """What this Python lacks to make an environment, and what to do; None: nothing.

    Args:
        headers: whether the kernels will be compiled.
    """
    version = ".".join(map(str, sys.version_info[:3]))
    if not (3, 11) <= sys.version_info[:2] <= (3, 13):
        return (
            f"found Python {version} ({sys.executable}), expected 3.11 to 3.13. "
            "Next: make PYTHON=python3.11, or where another one is"
        )
    missing = {
        "ensurepip (Debian: python3-venv)": importlib.util.find_spec("ensurepip") is None,
        "Python.h (Debian: python3-dev)": headers
        and not Path(sysconfig.get_path("include"), "Python.h").exists(),
    }
    names = [name for name, is_missing in missing.items() if is_missing]
    if not names:
        return None
    return (
        f"{sys.executable} lacks {' and '.join(names)}. "
        "Next: on Debian, apt-get install python3-venv python3-dev"
    )


def _make_environment(installer: Installer, environment: Path) -> bool:
    installer.announce(f"{environment}: Python {sys.version.split()[0]}")
    process = subprocess.run([sys.executable, "-m", "venv", str(environment)], check=False)
    return process.returncode == 0


def _install_development(environment: Path, cpu_index: str) -> bool:
    installer = Installer(environment, steps=4)
    if not _make_environment(installer, environment):
        return False
    install = ["install", "-c", str(ROOT / "constraints.txt")]
    torch = _pinned("torch")
    source, options = torch_source(cpu_index)
    installer.announce(f"{torch.replace('==', ' ')} {source}")
    if not installer.pip(*install, *options, torch):
        return False
    installer.announce("recpoint, its kernels, and what the demo, the tests and the types need")
    if not installer.pip(*install, "-e", f"{ROOT}[dev]"):
        return False
    installer.announce(f"{_pinned('torchrec').replace('==', ' ')} and FBGEMM for CPUs")
    if not installer.pip(*install, "--no-deps", *_TORCHREC):
        print("TorchRec does not install here: its tests are skipped")
    return True


def _install_documentation(environment: Path) -> bool:
    installer = Installer(environment, steps=2)
    if not _make_environment(installer, environment):
        return False
    project = _project()
    # The pages show the command line, so recpoint has to be imported. Only training needs torch.
    needed = [text for text in project["dependencies"] if not text.startswith("torch")]
    installer.announce("mkdocs, and what recpoint's command line imports; no torch")
    requirements = [*needed, *project["optional-dependencies"]["docs"]]
    return installer.pip("install", "-c", str(ROOT / "constraints.txt"), *requirements)


def _compile_kernels(environment: Path) -> bool:
    installer = Installer(environment, steps=1)
    installer.announce("the kernels, compiled anew")
    return installer.pip("install", "--no-deps", "-e", str(ROOT))


def main(arguments: Sequence[str]) -> int:
    """Make the environment that the arguments name; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["development", "documentation", "kernels"])
    parser.add_argument("environment", type=Path)
    parser.add_argument("--torch-cpu-index", default="", metavar="URL")
    chosen = parser.parse_args(arguments)
    if missing := missing_from_python(headers=chosen.what != "documentation"):
        print(missing, file=sys.stderr)
        return 1
    chosen.environment.mkdir(exist_ok=True)
    if chosen.what == "development":
        succeeded = _install_development(chosen.environment, chosen.torch_cpu_index)
    elif chosen.what == "documentation":
        succeeded = _install_documentation(chosen.environment)
    else:
        succeeded = _compile_kernels(chosen.environment)
    return 0 if succeeded else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
