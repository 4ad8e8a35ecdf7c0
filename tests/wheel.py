"""Builds the wheel of this repository, and runs programs from it as if the source was not there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from zipfile import ZipFile

__all__ = ["ROOT", "InstalledWheel"]

ROOT = Path(__file__).resolve().parents[1]
_NO_SOURCES = shutil.ignore_patterns("__pycache__", "*.egg-info", "*.so")


class InstalledWheel:
    """The files that a wheel of this repository installs.

    Args:
        folder: a new directory for them.
    """

    def __init__(self, folder: Path) -> None:
        self.site = folder / "site"
        self.path = _build(folder / "sources", folder)
        with ZipFile(self.path) as wheel:
            wheel.extractall(self.site)

    def run(
        self, arguments: Sequence[str], *, directory: Path, home: Path
    ) -> subprocess.CompletedProcess[str]:
        """Run Python with `arguments` in `directory`, where `import recpoint` imports the wheel's.

        Args:
            arguments: of Python.
            directory: the working directory.
            home: for recpoint's files about the host, such as those of its Prefect server.
        """
        environment = {name: v for name, v in os.environ.items() if "PREFECT" not in name}
        environment |= {"PYTHONPATH": str(self.site), "RECPOINT_HOME": str(home)}
        return subprocess.run(
            [sys.executable, *arguments],
            capture_output=True,
            text=True,
            timeout=240,
            cwd=directory,
            env=environment,
            check=False,
        )


def _build(sources: Path, folder: Path) -> Path:
    """Build a wheel from a copy: files that a build leaves behind get into the next wheel."""
    links = [path for path in (ROOT / "src" / "recpoint").iterdir() if path.is_symlink()]
    for name in ("src", "build_backend", *(link.name for link in links)):
        shutil.copytree(ROOT / name, sources / name, symlinks=True, ignore=_NO_SOURCES)
    for name in ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, sources / name)
    # Without a network connection: uses the installed setuptools.
    build = ["-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "--quiet"]
    process = subprocess.run(
        [sys.executable, *build, "--disable-pip-version-check", f"--wheel-dir={folder}", sources],
        capture_output=True,
        text=True,
        timeout=900,  # it compiles; a busy machine takes minutes
        check=False,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    (wheel,) = folder.glob("recpoint-*.whl")
    return wheel
