"""`torch.save` to a temporary name, a sync, and a rename."""

from __future__ import annotations

import os
import re
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.faults.system import (
    Begin,
    Hostile,
    NotApplicable,
    Restored,
    System,
    Tags,
    Trainer,
    truth,
)
from benchmarks.faults.systems.dcp import LACKS
from benchmarks.faults.systems.step_folders import NoCheckpoint

__all__ = ["TorchSave", "falsified_zip"]

_NAME = re.compile(r"step_(\d+)\.pt")


class _Writer(Trainer):
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def save(self, tags: Tags) -> None:
        import torch

        self._folder.mkdir(parents=True, exist_ok=True)
        final = self._folder / f"step_{len(tags)}.pt"
        beside = final.with_suffix(".tmp")
        with beside.open("wb") as file:
            torch.save({"model": truth(tags), "step": len(tags)}, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, final)
        directory = os.open(self._folder, os.O_RDONLY)
        os.fsync(directory)
        os.close(directory)


class TorchSave(System):
    """A file for each step; `torch.load(weights_only=True)` of the one with the highest step."""

    name = "torch_save"
    title = "torch.save"
    distributions = ("torch",)
    modules = ()
    used = (
        "`torch.save` to a temporary name, fsync, `os.replace`, fsync of the folder; "
        "`torch.load(weights_only=True)`"
    )
    lacks = {
        **LACKS,
        "worker killed": "the trainer itself writes",
        "503, throttling, time-outs, resets": "a rename needs a file system",
        "store dies in an upload": "a rename needs a file system",
        "path traversal": "a checkpoint is one file, and names no other",
    }

    @contextmanager
    def trainer(
        self, begin: Begin = "newest", *, keep: int | None = None, overwrite: bool = False
    ) -> Iterator[Trainer]:
        """See `System.trainer`."""
        yield _Writer(self.place.store)

    def restore(self) -> Restored:
        """See `System.restore`."""
        import torch

        files = {
            int(name[1]): path
            for path in self.place.store.glob("step_*.pt")
            if (name := _NAME.fullmatch(path.name))
        }
        if not files:
            raise NoCheckpoint(f"{self.place.store}: no step_N.pt")
        state = torch.load(files[max(files)], weights_only=True)
        return state["step"], state["model"]

    def files(self, step: int) -> list[Path]:
        """See `System.files`."""
        return [self.place.store / f"step_{step}.pt"]

    def names(self, step: int) -> list[str]:
        """See `System.names`."""
        return [f"step_{step}.pt"]

    def falsify(self, what: Hostile, step: int) -> list[Path]:
        """See `System.falsify`."""
        path = self.files(step)[0]
        falsified_zip(path, what)
        return [path]


def falsified_zip(path: Path, what: Hostile) -> None:
    """Change the central directory of a zip file that `torch.save` wrote.

    Raises:
        NotApplicable: a zip file has nothing of that kind.
    """
    if what == "unknown version":
        _replace_member(path, ".format_version", b"999999")
        _replace_member(path, "/version", b"999999\n")
        return
    data = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        infos = [info for info in archive.infolist() if "/data/" in info.filename]
        start = archive.start_dir
    first, second = infos[0], next(i for i in infos[1:] if i.file_size == infos[0].file_size)
    entry = _central_entry(data, start, first.filename)
    if what == "wrong digest":
        data[entry + 16] ^= 1  # the CRC-32
    elif what == "huge sizes":
        data[entry + 20 : entry + 28] = (0x7FFFFFFF).to_bytes(4, "little") * 2
    elif what == "negative offsets":
        data[entry + 42 : entry + 46] = (-64 & 0xFFFFFFFF).to_bytes(4, "little")
    elif what == "overlapping ranges":
        data[entry + 42 : entry + 46] = second.header_offset.to_bytes(4, "little")
    else:
        raise NotApplicable("a checkpoint is one file, and names no other")
    path.write_bytes(data)


def _central_entry(data: bytes | bytearray, start: int, name: str) -> int:
    """Return the offset of a member's entry in the central directory."""
    entry = start
    while data[entry : entry + 4] == b"PK\x01\x02":
        length = int.from_bytes(data[entry + 28 : entry + 30], "little")
        variable_bytes = sum(
            int.from_bytes(data[entry + k : entry + k + 2], "little") for k in (30, 32)
        )
        if data[entry + 46 : entry + 46 + length].decode() == name:
            return entry
        entry += 46 + length + variable_bytes
    raise ValueError(f"no member {name}")


def _replace_member(path: Path, ending: str, text: bytes) -> None:
    """Write the file anew with another content of one member."""
    with zipfile.ZipFile(path) as archive:
        members = [(info.filename, archive.read(info)) for info in archive.infolist()]
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, data in members:
            archive.writestr(name, text if name.endswith(ending) else data)
