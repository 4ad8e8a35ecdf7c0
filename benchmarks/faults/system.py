"""What the benchmark asks of a system that saves checkpoints, and the states that are saved.

A state is named by its tags: one number for each batch that was trained, which seeds that batch.
So the step of a state is the number of its tags, and whoever trains the same tags has the same
bits.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal, TypeAlias

import torch
from torch import Tensor, nn

__all__ = [
    "DIM",
    "ROWS",
    "Begin",
    "Hostile",
    "Model",
    "NotApplicable",
    "Place",
    "Restored",
    "System",
    "Tags",
    "Trainer",
    "digest",
    "normal",
    "template",
    "train",
    "truth",
]

Tags: TypeAlias = tuple[int, ...]
#: The step that was restored, and all its tensors.
Restored: TypeAlias = tuple[int, dict[str, Tensor]]
Begin: TypeAlias = Literal["newest", "anew"]
Hostile: TypeAlias = Literal[
    "path traversal",
    "huge sizes",
    "negative offsets",
    "overlapping ranges",
    "wrong digest",
    "unknown version",
]

#: Of each table.
ROWS, DIM = 96, 8
_TOUCHED = 12


class NotApplicable(Exception):
    """A system has no part that the fault could strike; the text says why."""


class Model(nn.Module):
    """Two embedding tables and a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.users = nn.Embedding(ROWS, DIM)
        self.items = nn.Embedding(ROWS, DIM)
        self.top = nn.Linear(2 * DIM, 1)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        """Return a score for each pair."""
        features = torch.cat([self.users(users), self.items(items)], dim=1)
        scores: Tensor = self.top(features).squeeze(1)
        return scores


def train(model: Model, optimizer: torch.optim.Optimizer, tag: int) -> None:
    """Train one batch."""
    generator = torch.Generator().manual_seed(tag)
    users, items = torch.randint(0, ROWS, (2, _TOUCHED), generator=generator)
    target = torch.rand(_TOUCHED, generator=generator)
    optimizer.zero_grad()
    nn.functional.mse_loss(model(users, items), target).backward()
    optimizer.step()


def truth(tags: Tags) -> dict[str, Tensor]:
    """Return the tensors of a state."""
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for tag in tags:
        train(model, optimizer, tag)
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def template() -> dict[str, Tensor]:
    """Return tensors of the right shapes that hold no state, to restore into."""
    return {name: torch.zeros_like(tensor) for name, tensor in Model().state_dict().items()}


def digest(tensors: Mapping[str, Tensor]) -> str:
    """Return a digest of every bit of a state."""
    sha256 = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().contiguous()
        sha256.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        sha256.update(tensor.view(-1).view(torch.uint8).numpy().tobytes())
    return sha256.hexdigest()


def normal() -> Tags:
    """Return the tags of the longest state that trials use."""
    return (1, 2, 3, 4, 5, 6, 7, 8)


@dataclass(frozen=True)
class Place:
    """Where a system keeps its files: `store` for checkpoints, `staging` for all else."""

    folder: Path
    url: str | None = None

    @property
    def store(self) -> Path:
        """Return the directory of the checkpoints, if they are not on S3."""
        return self.folder / "store"

    @property
    def staging(self) -> Path:
        """Return the directory for what is not yet stored."""
        return self.folder / "staging"


class Trainer(ABC):
    """One life of a training process."""

    @abstractmethod
    def save(self, tags: Tags) -> None:
        """Save a state, and return when the system says that it is saved.

        Raises:
            Exception: the system says that it is not.
        """


class System(ABC):
    """One system in one place; its methods run in processes of their own.

    Attributes:
        name: for the command line.
        title: for people.
        distributions: packages whose versions the table names.
        modules: modules to import before a trial: all acts are forked from the process that has
            imported them.
        used: how it is used, for the docs.
        lacks: fault -> why the system has no part that it could strike.
        retention: who deletes old checkpoints: `save` itself, a `call` of its own, or nobody.
        on_s3: whether its documentation stores on S3.
        threaded: a trial wants several writer threads, where the system can have them.
        worker: a trial wants that another process writes, where the system can have one.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    distributions: ClassVar[tuple[str, ...]]
    modules: ClassVar[tuple[str, ...]]
    used: ClassVar[str]
    lacks: ClassVar[Mapping[str, str]] = {}
    retention: ClassVar[Literal["save", "call", "none"]] = "none"
    on_s3: ClassVar[bool] = False

    def __init__(self, place: Place, *, threaded: bool = False, worker: bool = False) -> None:
        self.place = place
        self.threaded = threaded
        self.worker = worker

    @abstractmethod
    def trainer(
        self, begin: Begin = "newest", *, keep: int | None = None, overwrite: bool = False
    ) -> AbstractContextManager[Trainer]:
        """Begin a training process.

        Args:
            begin: from the newest state, or anew although there may be files of an earlier run.
            keep: how many of the newest checkpoints are kept, where saves delete older ones.
            overwrite: let a save write over a checkpoint of the same step.
        """

    @abstractmethod
    def restore(self) -> Restored:
        """Restore the newest state, as the documentation says."""

    @abstractmethod
    def files(self, step: int) -> list[Path]:
        """Return the local files that hold the checkpoint of a step."""

    @abstractmethod
    def names(self, step: int) -> list[str]:
        """Return what an error may call the checkpoint of a step."""

    def falsify(self, what: Hostile, step: int) -> list[Path]:
        """Change the description of a checkpoint as an adversary would; return what changed.

        Raises:
            NotApplicable: the description has nothing of that kind.
        """
        raise NotApplicable("not tried")

    def retain(self, keep: int) -> None:
        """Delete all but the newest checkpoints, where that is a call of its own."""
        raise NotApplicable("deletes nothing")

    def disturb(self, what: str) -> None:
        """Take away, repeat or exchange stored increments of the steps 3 and 4."""
        raise NotApplicable("stores no increments")

    def consolidate(self) -> None:
        """Shorten the chain of the newest checkpoint."""
        raise NotApplicable("has no consolidation")
