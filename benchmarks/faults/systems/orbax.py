"""Orbax, with trees of numpy arrays."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.faults.system import (
    Begin,
    Hostile,
    NotApplicable,
    Restored,
    System,
    Tags,
    Trainer,
    template,
    truth,
)
from benchmarks.faults.systems.dcp import LACKS

__all__ = ["Orbax"]


class _Managed(Trainer):
    def __init__(self, manager: Any, overwrite: bool) -> None:
        self._manager = manager
        self._overwrite = overwrite

    def save(self, tags: Tags) -> None:
        import orbax.checkpoint as ocp

        step = len(tags)
        tree = {name: tensor.numpy() for name, tensor in truth(tags).items()}
        if self._overwrite and step in self._manager.all_steps():
            self._manager.delete(step)  # a manager writes over no step
        saved = self._manager.save(step, args=ocp.args.StandardSave(tree))
        self._manager.wait_until_finished()
        self._manager.check_for_errors()
        if not saved:
            raise RuntimeError(f"step {step}: save() returned False")


class Orbax(System):
    """`CheckpointManager`, asynchronous, whose `latest_step` is restored."""

    name = "orbax"
    title = "Orbax"
    distributions = ("orbax-checkpoint", "jax")
    modules = ("orbax.checkpoint",)
    used = (
        "`CheckpointManager` with `StandardSave` of numpy arrays, asynchronous, waited for, "
        "`check_for_errors()`; an overwrite is `delete(step)` and `save(step)`; `max_to_keep=1` "
        "where retention is tried"
    )
    retention = "save"
    lacks = {
        **{
            fault: reason
            for fault, reason in LACKS.items()
            if not reason.startswith("has no retention")
        },
        "retention racing a consolidation": "has no consolidation",
        "worker killed": "threads of the trainer write",
        "503, throttling, time-outs, resets": "not tried: its documentation names Google's "
        "storage, not a server of one's own",
        "store dies in an upload": "not tried, as for 503",
        "negative offsets": "not tried: offsets are in OCDBT's binary files",
        "overlapping ranges": "not tried: ranges are in OCDBT's binary files",
    }

    def _manager(self, keep: int | None = None) -> Any:
        import orbax.checkpoint as ocp

        options = ocp.CheckpointManagerOptions(max_to_keep=keep, enable_async_checkpointing=True)
        self.place.store.mkdir(parents=True, exist_ok=True)
        return ocp.CheckpointManager(self.place.store, options=options)

    @contextmanager
    def trainer(
        self, begin: Begin = "newest", *, keep: int | None = None, overwrite: bool = False
    ) -> Iterator[Trainer]:
        """See `System.trainer`."""
        with self._manager(keep) as manager:
            yield _Managed(manager, overwrite)

    def restore(self) -> Restored:
        """See `System.restore`."""
        import orbax.checkpoint as ocp
        import torch

        with self._manager() as manager:
            step = manager.latest_step()
            if step is None:
                raise FileNotFoundError(f"{self.place.store}: no checkpoint")
            tree = {name: tensor.numpy() for name, tensor in template().items()}
            restored = manager.restore(step, args=ocp.args.StandardRestore(tree))
            return step, {name: torch.tensor(array) for name, array in restored.items()}

    def files(self, step: int) -> list[Path]:
        """See `System.files`."""
        folder = self.place.store / str(step)
        return sorted(path for path in folder.rglob("*") if path.is_file())

    def names(self, step: int) -> list[str]:
        """See `System.names`."""
        return [f"/{step}/", f"step {step}", f"step={step}", f"store/{step}"]

    def falsify(self, what: Hostile, step: int) -> list[Path]:
        """See `System.falsify`."""
        folder = self.place.store / str(step)
        if what == "wrong digest":  # the last four bytes of a manifest of OCDBT are its crc32c
            path = folder / "default" / "manifest.ocdbt"
            data = bytearray(path.read_bytes())
            data[-1] ^= 1
            path.write_bytes(data)
            return [path]
        path = folder / "default" / "_METADATA"
        fields = json.loads(path.read_bytes())
        tree = fields["tree_metadata"]
        key = next(key for key in tree if "users" in key)
        if what == "path traversal":
            named = {"key": "../../outside/x", "key_type": 2}
            tree["('../../outside/x',)"] = {**tree.pop(key), "key_metadata": [named]}
        elif what == "huge sizes":
            tree[key]["value_metadata"]["write_shape"] = [1 << 50, 1 << 50]
        elif what == "unknown version":
            raise NotApplicable("its metadata has no version")
        else:
            raise NotApplicable(self.lacks[what])
        path.write_text(json.dumps(fields))
        return [path]
