"""torch's distributed checkpoint (DCP), synchronous and asynchronous."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

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
from benchmarks.faults.systems.step_folders import NoCheckpoint, StepFolders

__all__ = ["DcpAsync", "DcpSync", "DcpTrainer", "falsified_metadata"]

_NO_INCREMENTS = "stores no increments"
LACKS = {
    "missing increment": _NO_INCREMENTS,
    "duplicate increment": _NO_INCREMENTS,
    "out-of-order increment": _NO_INCREMENTS,
    "retention racing a save": "has no retention",
    "retention racing a restore": "has no retention",
    "retention racing a consolidation": "has neither retention nor consolidation",
    "workflow engine down": "has no workflow engine",
}


class DcpTrainer(Trainer):
    """Saves states with `write(step, state)`."""

    def __init__(self, write: Callable[[int, dict[str, Any]], None]) -> None:
        self._write = write

    def save(self, tags: Tags) -> None:
        """See `Trainer.save`."""
        self._write(len(tags), {"model": truth(tags), "step": len(tags)})


class DcpSync(StepFolders):
    """`dcp.save` into a new folder for each step, with `overwrite=False` and synced files."""

    name = "dcp_sync"
    title = "DCP"
    distributions: ClassVar[tuple[str, ...]] = ("torch",)
    modules: ClassVar[tuple[str, ...]] = ("torch.distributed.checkpoint",)
    used = (
        "`dcp.save`, a new folder for each step, `overwrite=False` unless the fault is an "
        "overwrite, files synced (the default); two writer threads where writer threads are struck"
    )
    mark: ClassVar[str] = ".metadata"
    lacks = {**LACKS, "worker killed": "the trainer itself writes"}
    on_s3 = True

    @contextmanager
    def trainer(
        self, begin: Begin = "newest", *, keep: int | None = None, overwrite: bool = False
    ) -> Iterator[Trainer]:
        """See `System.trainer`."""
        warnings.filterwarnings("ignore")  # one process is intended
        yield DcpTrainer(lambda step, state: self._save(step, state, overwrite))

    def _save(self, step: int, state: dict[str, Any], overwrite: bool) -> None:
        from torch.distributed.checkpoint.state_dict_saver import save

        save(state, storage_writer=self.writer(step, overwrite), no_dist=True)

    def writer(self, step: int, overwrite: bool) -> Any:
        """Return DCP's writer of a step's checkpoint."""
        if self.place.url is not None:
            from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

            return FsspecWriter(
                f"{self.place.url}/step_{step}", overwrite=overwrite, **s3_settings()
            )
        from torch.distributed.checkpoint.filesystem import FileSystemWriter

        threads = 2 if self.threaded else 1
        return FileSystemWriter(self.folder(step), thread_count=threads, overwrite=overwrite)

    def restore(self) -> Restored:
        """See `System.restore`."""
        from torch.distributed.checkpoint.filesystem import FileSystemReader
        from torch.distributed.checkpoint.state_dict_loader import load

        warnings.filterwarnings("ignore")
        state: dict[str, Any] = {"model": template(), "step": 0}
        reader: Any
        if self.place.url is not None:
            from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

            reader = FsspecReader(f"{self.place.url}/step_{self._newest_on_s3()}", **s3_settings())
        else:
            reader = FileSystemReader(self.folder(self.newest()))
        load(state, storage_reader=reader, no_dist=True)
        return state["step"], state["model"]

    def _newest_on_s3(self) -> int:
        import fsspec

        assert self.place.url is not None
        files = fsspec.filesystem("s3", **s3_settings())
        keys = files.find(self.place.url)
        steps = [
            int(key.split("step_")[1].split("/")[0]) for key in keys if key.endswith(self.mark)
        ]
        if not steps:
            raise NoCheckpoint(f"{self.place.url}: no complete step_N")
        return max(steps)

    def falsify(self, what: Hostile, step: int) -> list[Path]:
        """See `System.falsify`."""
        return [falsified_metadata(self.folder(step), what)]


def s3_settings() -> dict[str, Any]:
    """Return settings of s3fs with which a server that does not answer is given up soon."""
    import os

    return {
        "client_kwargs": {"endpoint_url": os.environ["AWS_ENDPOINT_URL"]},
        "config_kwargs": {
            "connect_timeout": 3,
            "read_timeout": 3,
            "retries": {"max_attempts": 3, "mode": "standard"},
        },
        "skip_instance_cache": True,
        "use_listings_cache": False,
    }


def falsified_metadata(folder: Path, what: Hostile) -> Path:
    """Change the pickled metadata of a checkpoint of DCP."""
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    stored = metadata.storage_data
    tensors = sorted(
        (index for index in stored if index.fqn.endswith(("users.weight", "items.weight"))),
        key=lambda index: str(index.fqn),
    )
    first, second = tensors[0], tensors[1]
    if what == "path traversal":
        outside = folder.parent / "outside" / Path(stored[first].relative_path).name
        outside.parent.mkdir(exist_ok=True)
        outside.write_bytes((folder / stored[second].relative_path).read_bytes())
        stored[first] = replace(stored[second], relative_path=f"../outside/{outside.name}")
    elif what == "huge sizes":
        stored[first] = replace(stored[first], length=1 << 50)
    elif what == "negative offsets":
        stored[first] = replace(stored[first], offset=-stored[first].length)
    elif what == "overlapping ranges":
        stored[first] = replace(stored[second])
    elif what == "unknown version":
        if not hasattr(metadata, "version"):
            raise NotApplicable("its metadata has no version")
        metadata.version = "v999"
    else:
        raise NotApplicable("stores no digests")
    path.write_bytes(pickle.dumps(metadata))
    return path


class DcpAsync(DcpSync):
    """`dcp.async_save`, whose future is waited for."""

    name = "dcp_async"
    title = "DCP async"
    used = (
        "`dcp.async_save(...).result()`, in a thread; in a process where a worker is killed; else "
        "as DCP"
    )
    lacks = LACKS

    def _save(self, step: int, state: dict[str, Any], overwrite: bool) -> None:
        import torch.distributed as dist
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save

        writer = self.writer(step, overwrite)
        if not self.worker:
            _wait(async_save(state, storage_writer=writer, no_dist=True))
            return
        if not dist.is_initialized():
            meeting = self.place.staging / "meeting"
            meeting.parent.mkdir(parents=True, exist_ok=True)
            meeting.unlink(missing_ok=True)
            dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=0, world_size=1)
        in_process = AsyncCheckpointerType.PROCESS
        _wait(async_save(state, storage_writer=writer, async_checkpointer_type=in_process))


def _wait(saving: Any) -> None:
    """Wait until an asynchronous save has ended; raise its error."""
    saving.result()
