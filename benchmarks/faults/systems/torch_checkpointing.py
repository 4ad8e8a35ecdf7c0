"""torch-checkpointing, by its `CheckpointManager`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.faults.system import (
    Begin,
    Hostile,
    NotApplicable,
    Restored,
    Tags,
    Trainer,
    template,
    truth,
)
from benchmarks.faults.systems.dcp import LACKS
from benchmarks.faults.systems.step_folders import StepFolders
from benchmarks.faults.systems.torch_save import falsified_zip

__all__ = ["TorchCheckpointing"]


class _Managed(Trainer):
    def __init__(self, manager: Any, folder: Path) -> None:
        self._manager = manager
        self._folder = folder

    def save(self, tags: Tags) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        path = str(self._folder / f"step_{len(tags)}")
        written = self._manager.save(path, {"model": truth(tags), "step": len(tags)})
        if written is not None:
            written.result()


class TorchCheckpointing(StepFolders):
    """`CheckpointManager.save` into a new folder for each step."""

    name = "torch_checkpointing"
    title = "torch-checkpointing"
    distributions = ("torch-checkpointing",)
    modules = ("torch_checkpointing",)
    used = (
        "`CheckpointManager`, a new folder for each step, `use_direct_io=False` (the default fails "
        "on ext4); saves in a subprocess (the default) where a writer is struck or killed, else "
        "`with_sync_save()`"
    )
    lacks = {
        **LACKS,
        "503, throttling, time-outs, resets": "has only a local file system",
        "store dies in an upload": "has only a local file system",
        "path traversal": "its files name no others",
    }

    def _manager(self) -> Any:
        from torch_checkpointing import CheckpointManager
        from torch_checkpointing.config import (
            AsyncCheckpointSaverConfig,
            SyncCheckpointSaverConfig,
        )
        from torch_checkpointing.staging import CheckpointStagerConfig
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        on_cpu = CheckpointStagerConfig(use_pinned_memory=False, use_non_blocking_copy=False)
        apart = AsyncCheckpointSaverConfig(staging_config=on_cpu)
        return CheckpointManager(
            CheckpointManager.Config(
                save=apart if self.worker or self.threaded else SyncCheckpointSaverConfig(),
                storage_config=LocalFileSystemStorageConfig(use_direct_io=False),
            )
        )

    @contextmanager
    def trainer(
        self, begin: Begin = "newest", *, keep: int | None = None, overwrite: bool = False
    ) -> Iterator[Trainer]:
        """See `System.trainer`."""
        manager = self._manager()
        yield _Managed(manager, self.place.store)
        manager.close()

    def restore(self) -> Restored:
        """See `System.restore`."""
        from torch_checkpointing import CheckpointManager

        manager = CheckpointManager(CheckpointManager.Config.with_sync_save())
        folder = str(self.folder(self.newest()))
        restored = manager.load(folder, into={"model": template(), "step": 0}, strict=True)
        return restored["step"], restored["model"]

    def falsify(self, what: Hostile, step: int) -> list[Path]:
        """See `System.falsify`."""
        if what == "path traversal":
            raise NotApplicable(self.lacks[what])
        path = self.folder(step) / "model_0.pt"
        falsified_zip(path, what)
        return [path]
