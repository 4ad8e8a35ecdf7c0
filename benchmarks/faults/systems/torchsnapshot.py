"""torchsnapshot, which is no longer maintained."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

from benchmarks.faults.system import (
    Begin,
    Hostile,
    NotApplicable,
    Restored,
    Trainer,
    template,
)
from benchmarks.faults.systems.dcp import LACKS, DcpTrainer
from benchmarks.faults.systems.step_folders import StepFolders

__all__ = ["Torchsnapshot"]


class Torchsnapshot(StepFolders):
    """`Snapshot.take` into a new folder for each step; asynchronous where a writer is struck."""

    name = "torchsnapshot"
    title = "torchsnapshot"
    distributions = ("torchsnapshot",)
    modules = ("torchsnapshot",)
    used = (
        "`Snapshot.take`, a new folder for each step; `Snapshot.async_take(...).wait()` where a "
        "writer thread is struck"
    )
    mark: ClassVar[str] = ".snapshot_metadata"
    lacks = {
        **LACKS,
        "worker killed": "threads of the trainer write",
        "503, throttling, time-outs, resets": "not tried: its S3 plugin takes no end point",
        "store dies in an upload": "not tried: its S3 plugin takes no end point",
        "wrong digest": "stores no digests",
    }

    @contextmanager
    def trainer(
        self, begin: Begin = "newest", *, keep: int | None = None, overwrite: bool = False
    ) -> Iterator[Trainer]:
        """See `System.trainer`."""
        yield DcpTrainer(self._save)

    def _save(self, step: int, state: dict[str, Any]) -> None:
        from torchsnapshot import Snapshot, StateDict

        app_state = {"state": StateDict(step=step, **state["model"])}
        if self.threaded:
            Snapshot.async_take(str(self.folder(step)), app_state).wait()
        else:
            Snapshot.take(str(self.folder(step)), app_state)

    def restore(self) -> Restored:
        """See `System.restore`."""
        from torchsnapshot import Snapshot, StateDict

        app_state = StateDict(step=0, **template())
        Snapshot(str(self.folder(self.newest()))).restore({"state": app_state})
        return app_state["step"], {name: app_state[name] for name in template()}

    def falsify(self, what: Hostile, step: int) -> list[Path]:
        """See `System.falsify`."""
        path = self.folder(step) / self.mark
        fields = json.loads(path.read_text())
        first, second = (fields["manifest"][f"0/state/{t}.weight"] for t in ("items", "users"))
        if what == "path traversal":
            outside = self.place.store / "outside"
            outside.write_bytes((self.folder(step) / second["location"]).read_bytes())
            first.update(location="../outside", byte_range=second["byte_range"])
        elif what == "huge sizes":
            first["shape"] = [1 << 40, first["shape"][1]]
        elif what == "negative offsets":
            begin, end = first["byte_range"]
            first["byte_range"] = [begin - end - 8, -8]
        elif what == "overlapping ranges":
            first.update(location=second["location"], byte_range=second["byte_range"])
        elif what == "unknown version":
            fields["version"] = "999.0.0"
        else:
            raise NotApplicable(self.lacks[what])
        path.write_text(json.dumps(fields))
        return [path]
