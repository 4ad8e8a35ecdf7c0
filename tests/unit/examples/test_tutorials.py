"""The tutorials' scripts: pages show what is in the repository, and a killed training goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from subprocess import Popen
from typing import NamedTuple

import pytest
import torch
from psutil import Process

from tests.forked_program import ForkedProgram, be_script
from tests.polling import until
from tests.torchrec_model import MISSING
from tests.training_builder import InlineAgent
from tests.tutorials import PAGES, ROOT, blocks, missing_line, pip_installs

SCRIPTS = ROOT / "examples" / "tutorials"


class Started(NamedTuple):
    """A script at work, and the file with what it prints.

    Its imports are done already: `make tutorials` runs all scripts in interpreters of their own.
    """

    process: ForkedProgram
    said: Path


class Tutorial:
    """A reader's directory, whose agent is at hand; scripts are started in it.

    Args:
        directory: of the test.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.staging = directory / "staging"
        self._started = 0

    def start(self, script: str, *arguments: str, **variables: str) -> Started:
        """Start a script, with these variables set."""
        self._started += 1
        said = self.directory / f"said-{self._started}"
        process = ForkedProgram(
            be_script,
            [str(SCRIPTS / script), *arguments],
            environment={**os.environ, "RECPOINT_STAGING": str(self.staging), **variables},
            output=(said, said),
            directory=self.directory,
        )
        return Started(process, said)

    def committed(self, run: str) -> int:
        """How many checkpoints of a run are in the store."""
        return len(list((self.directory / run / "manifests").glob("*.json")))


def ended(started: Started) -> str:
    """What a script printed, once it has ended well."""
    code, said = started.process.wait(300), started.said.read_text()
    assert code == 0, said
    return said


@pytest.fixture
def tutorial(tmp_path: Path) -> Tutorial:
    return Tutorial(tmp_path)


@pytest.mark.nightly("tutorials")
@pytest.mark.parametrize(
    ("script", "run", "batches"),
    [
        ("first_checkpoint.py", "runs/first", 3000),
        pytest.param(
            "lightning_callback.py",
            "runs/lightning",
            2000,
            marks=pytest.mark.skipif(not find_spec("lightning"), reason="it needs lightning"),
        ),
    ],
)
def test_a_killed_training_ends_as_one_that_was_not(
    tutorial: Tutorial, script: str, run: str, batches: int
) -> None:
    with InlineAgent(tutorial.staging):
        whole = tutorial.start(script, RUN="runs/whole")
        killed = tutorial.start(script).process
        until(lambda: tutorial.committed(run) >= 2)
        killed.send_signal(signal.SIGKILL)
        assert killed.wait() == -signal.SIGKILL
        resumed = ended(tutorial.start(script))
        assert missing_line([f"{run} is restored: step …"], resumed) is None, resumed
        last = resumed.splitlines()[-1]
        assert last.startswith(f"{batches} batches, SHA-256 ")
        assert last == ended(whole).splitlines()[-1]


@pytest.mark.nightly("tutorials")
def test_rows_are_read_from_the_store(tutorial: Tutorial) -> None:
    with InlineAgent(tutorial.staging):
        said = ended(tutorial.start("s3_store.py", RUN="runs/s3"))
    assert said.splitlines()[-1].endswith("are the trained ones: True"), said


@pytest.mark.nightly("tutorials")
def test_a_follower_serves_the_last_version(tutorial: Tutorial) -> None:
    with InlineAgent(tutorial.staging):
        follower = tutorial.start("serving_follow.py", "newest", "1600")
        ended(tutorial.start("serving_train.py"))
        assert missing_line(["step 1600: score …"], ended(follower)) is None


@pytest.mark.nightly("tutorials")
def test_a_training_for_months_ends_after_its_seconds(tutorial: Tutorial) -> None:
    with InlineAgent(tutorial.staging):
        ended(tutorial.start("prefect_months.py", "6"))
    assert tutorial.committed("runs/months") >= 1


def torchrun(tutorial: Tutorial, script: str, ranks: int = 2, **variables: str) -> Popen[str]:
    """Start a script on several ranks."""
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--"]
    return subprocess.Popen(
        [sys.executable, *launcher, *meeting, str(SCRIPTS / script)],
        cwd=tutorial.directory,
        env={**os.environ, "RECPOINT_STAGING": str(tutorial.staging), **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def ranks_ended(job: Popen[str]) -> str:
    """Return what ranks printed, once they have ended well."""
    printed, _ = job.communicate(timeout=300)
    assert job.returncode == 0, printed
    return printed


@pytest.mark.nightly("tutorials")
@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
def test_sharded_tables_go_on_with_another_number_of_ranks(tutorial: Tutorial) -> None:
    script = "torchrec_tables.py"
    with InlineAgent(tutorial.staging):
        ranks_ended(torchrun(tutorial, script, BATCHES="200"))
        said = ranks_ended(torchrun(tutorial, script, ranks=1, BATCHES="300"))
    assert missing_line(["is restored: step 200 …", "batch 300: loss …"], said) is None, said


@pytest.mark.nightly("tutorials")
@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
def test_a_killed_pipeline_of_torchrec_ends_as_one_that_was_not(tutorial: Tutorial) -> None:
    script, batches = "torchrec_pipelines.py", "400"
    with InlineAgent(tutorial.staging):
        whole = ranks_ended(torchrun(tutorial, script, BATCHES=batches, RUN="runs/whole"))
        killed = torchrun(tutorial, script, BATCHES=batches)
        until(lambda: tutorial.committed("runs/pipelines") >= 2)
        assert killed.poll() is None
        for rank in Process(killed.pid).children():
            rank.kill()
        killed.kill()
        killed.communicate()
        resumed = ranks_ended(torchrun(tutorial, script, BATCHES=batches))
    assert missing_line(["is restored: step …", "batch 400: loss …"], resumed) is None, resumed
    (expected,) = (line for line in whole.splitlines() if "SHA-256" in line)
    assert expected.startswith("400 batches, SHA-256 ") and expected in resumed, resumed


@pytest.mark.nightly("tutorials")
@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
@pytest.mark.skipif(torch.cuda.is_available(), reason="these pipelines run on a GPU")
def test_pipelines_that_need_a_gpu_are_refused_without_one(tutorial: Tutorial) -> None:
    for name, kind in (
        ("semi-sync", "TrainPipelineSemiSync"),
        ("prefetch", "PrefetchTrainPipelineSparseDist"),
    ):
        refused = tutorial.start("torchrec_pipelines.py", "--pipeline", name)
        assert refused.process.wait(300) == 1
        said = refused.said.read_text()
        assert f"--pipeline {name}: found no GPU, expected one: TorchRec's {kind}" in said


def test_without_torchrec_the_script_says_so() -> None:
    program = (
        "import importlib.util, runpy\n"
        "importlib.util.find_spec = lambda name: None\n"
        f"runpy.run_path({str(SCRIPTS / 'torchrec_tables.py')!r})\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=240
    )
    assert done.returncode == 1
    assert done.stderr == "skipped: torchrec and fbgemm-gpu-cpu are not installed\n"


def test_pages_show_the_scripts_as_they_are() -> None:
    shown = {
        block.title: block.text
        for page in PAGES.glob("*.md")
        for block in blocks(page)
        if block.title is not None and (SCRIPTS / block.title).exists()
    }
    assert shown == {path.name: path.read_text() for path in SCRIPTS.glob("*.py")}


def test_each_command_of_a_page_is_run_by_make_tutorials() -> None:
    pages = [path for path in PAGES.glob("*.md") if path.stem != "index"]
    assert len(pages) == 6
    for page in pages:
        found = blocks(page)
        installed = [words[-1] for words in pip_installs(found)]
        assert "torch==2.13.0" in installed, page
        assert any(what.startswith("./recpoint") for what in installed), page
        for block in found:
            if block.tag in ("console", "sh") and block.title is None:
                assert block.terminal is not None or "pip install" in block.text, block.text


@pytest.mark.parametrize(
    ("expected", "said", "missing"),
    [
        (["step …: a b"], "step 3:  a   b\n", None),
        (["one", "two"], "two\none\n", "two"),
        (["a … c"], "a\nc\n", "a … c"),
    ],
)
def test_lines_are_looked_for_in_their_order(
    expected: list[str], said: str, missing: str | None
) -> None:
    assert missing_line(expected, said) == missing
