"""docs/how-to as a program: the commands of a page, and what they have to print."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from tests.forked_shell import forked_programs

__all__ = ["HOW_TO", "TRAIN", "Site", "Step", "entries"]

ROOT = Path(__file__).resolve().parents[2]
HOW_TO = ROOT / "docs" / "how-to"
#: Pages that begin in a situation which a test has to make. Other pages make their own.
PAGES = (
    "restore-now",
    "check-failed",
    "validation-failed",
    "lag-alarm",
    "agent-dead",
    "rank-missing",
    "disk-full",
    "store-gone",
    "credentials-rotated",
    "prefect-gone",
    "roll-back-serving",
    "move-a-run",
    "upgrade",
    "export",
)
_SECONDS = 240

#: A training script as a user has it; `python train.py 30` ends after so many batches in all.
TRAIN = """
import logging, os, sys
import torch
from torch import nn
from recpoint import Checkpointer, Staging

logging.basicConfig(level=logging.INFO, format="%(message)s")
torch.manual_seed(1)
torch.set_num_threads(1)
torch.sparse.check_sparse_tensor_invariants.disable()

class Reader:
    def __init__(self):
        self.generator = torch.Generator().manual_seed(2)
    def __iter__(self):
        while True:
            yield torch.randint(0, 400, (16,), generator=self.generator)
    def state_dict(self):
        return {"generator": self.generator.get_state()}
    def load_state_dict(self, state):
        self.generator.set_state(state["generator"])

model = nn.ModuleDict({"goods": nn.Embedding(4000, 8, sparse=True), "top": nn.Linear(8, 1)})
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
reader = Reader()
end = int(sys.argv[1]) if len(sys.argv) > 1 else 0
with Checkpointer(model, optimizer, reader=reader, run=os.environ["RUN"], interval_batches=10,
                  staging=Staging(when_busy="wait")) as checkpoints:
    checkpoints.restore()
    for goods in reader:
        if checkpoints.batches_done >= end:
            break
        optimizer.zero_grad()
        (model["top"](model["goods"](goods)) ** 2).mean().backward()
        optimizer.step()
        checkpoints.step()
"""


class Step(NamedTuple):
    """One command, and the lines that its output must have, in this order."""

    command: str
    lines: tuple[str, ...]


def entries() -> dict[str, list[list[Step]]]:
    """The console blocks of each page that is played here, by the name of its file."""
    return {page: _blocks((HOW_TO / f"{page}.md").read_text("utf-8")) for page in PAGES}


def _blocks(page: str) -> list[list[Step]]:
    found: list[list[Step]] = []
    block: list[Step] | None = None
    for line in page.splitlines():
        if line == "```console":
            found.append(block := [])
        elif line.startswith("```"):
            block = None
        elif block is not None and line.startswith("$ "):
            block.append(Step(line[2:], ()))
        elif block is not None:
            block[-1] = block[-1]._replace(lines=(*block[-1].lines, line))
    return found


class Site:
    """A place where an entry is played: a directory, an environment, the programs on the path.

    Args:
        directory: of the test; commands are run in it.
        run: the run URL.
        variables: added to the environment.
        forked: run `recpoint` and `python` in forked processes, which are there at once; else the
            installed programs.
    """

    def __init__(
        self, directory: Path, run: str, variables: Mapping[str, str] = {}, *, forked: bool = True
    ) -> None:
        self.directory = directory
        self.staging = Path(variables.get("RECPOINT_STAGING", directory / "staging"))
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("PREFECT_", "AWS_"))}
        clean.pop("COLUMNS", None)  # of the terminal that the tests were started in, or of xdist
        programs = [Path(sys.executable).parent]
        if forked and (there := forked_programs()) is not None:
            programs.insert(0, there)
        self.environment = {
            **clean,
            "PATH": os.pathsep.join([*map(str, programs), os.environ["PATH"]]),
            "PYTHONPATH": str(ROOT / "src"),
            "RECPOINT_STAGING": str(self.staging),
            "RECPOINT_HOME": str(directory / "home"),
            "RUN": run,
            **variables,
        }
        (directory / "train.py").write_text(TRAIN)

    def play(self, block: list[Step]) -> None:
        """Run the commands of a block in one shell each, in which `export` of earlier ones holds.

        An assertion error when a line is missing; the message has the whole output.
        """
        exports: list[str] = []
        for step in block:
            said = self.shell("\n".join([*exports, step.command]))
            if step.command.startswith("export "):
                exports.append(step.command)
            rest = re.sub(r"[ \t]+", " ", said)
            for line in step.lines:
                pattern = ".*".join(
                    re.escape(" ".join(part.split())) for part in line.split("…")
                ).replace(".*", "[^\n]*")
                match = re.search(pattern, rest)
                assert match, f"$ {step.command}\nnot printed: {line}\nprinted:\n{said}"
                rest = rest[match.end() :]

    def shell(self, command: str) -> str:
        """What a command prints, stderr too."""
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=self.directory,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_SECONDS,
            check=False,
        )
        return done.stdout
