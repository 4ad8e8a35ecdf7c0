"""Slots: reserved before they are written, reused, replaced when someone removed them."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from recpoint.catalog.staging.slot import Slot, array_view
from recpoint.errors import StagingError, StagingFull

TMPFS_BYTES = 1 << 20


@pytest.fixture
def small_tmpfs(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB, full when it is full."""
    place = tmp_path / "tmpfs"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={TMPFS_BYTES}", "tmpfs", str(place)]
    mounted = subprocess.run(command, capture_output=True, text=True)
    if mounted.returncode != 0:
        # Without the right to mount: no file may grow past the same size, also an OSError.
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (TMPFS_BYTES, hard))
        yield place
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    else:
        yield place
        subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_slot_holds_what_is_written_and_is_reused(tmp_path: Path) -> None:
    slot = Slot(tmp_path / "slots" / "r00000-0.bin")
    slot.reserve(1000)
    first = slot.data
    array_view(first, 64, torch.float32, (2, 3)).copy_(torch.arange(6.0).view(2, 3))
    slot.sync()
    assert slot.path.read_bytes()[64:88] == torch.arange(6.0).numpy().tobytes()
    slot.reserve(500)
    assert slot.data is first, "nothing to do: it is large enough"
    slot.reserve(10_000)
    assert slot.data.numel() == 10_000
    assert array_view(slot.data, 64, torch.float32, (6,)).tolist() == [0, 1, 2, 3, 4, 5]
    assert array_view(slot.data, 128, torch.int64, (0,)).numel() == 0
    slot.close()
    assert slot.path.stat().st_size == 10_000


def test_a_full_disk_is_an_error_and_leaves_what_was_there(small_tmpfs: Path) -> None:
    slot = Slot(small_tmpfs / "r00000-0.bin")
    slot.reserve(1000)
    slot.data.fill_(7)
    with pytest.raises(StagingFull) as caught:
        slot.reserve(4 * TMPFS_BYTES)
    assert "r00000-0.bin" in caught.value.subject and "staging=" in caught.value.next_step
    assert slot.data.numel() == 1000 and slot.data.sum() == 7000
    other = Slot(small_tmpfs / "r00000-1.bin")
    other.reserve(TMPFS_BYTES // 2)  # the failed reservation was given back
    slot.close()
    other.close()


def test_a_removed_slot_is_made_again(tmp_path: Path) -> None:
    slot = Slot(tmp_path / "slots" / "r00000-0.bin")
    slot.reserve(100)
    slot.data.fill_(1)
    slot.path.unlink()
    slot.reserve(100)
    slot.data.fill_(2)
    assert slot.path.read_bytes() == b"\2" * 100
    os.truncate(slot.path, 10)
    slot.reserve(100)
    slot.data.fill_(3)
    assert slot.path.read_bytes() == b"\3" * 100
    slot.close()


def test_a_slot_that_grows_keeps_what_was_written(small_tmpfs: Path) -> None:
    slot = Slot(small_tmpfs / "r00000-0.bin")
    slot.reserve(100)
    slot.data.fill_(1)
    before = slot.data
    slot.grow(100)
    assert slot.data is before
    slot.grow(300)
    slot.data[100:].fill_(2)
    assert slot.path.read_bytes() == b"\1" * 100 + b"\2" * 200
    with pytest.raises(StagingFull, match="r00000-0.bin"):
        slot.grow(4 * TMPFS_BYTES)
    assert slot.path.read_bytes() == b"\1" * 100 + b"\2" * 200
    slot.close()


@pytest.mark.parametrize("instead", ["nothing", "another file"])
def test_a_slot_that_is_removed_does_not_grow(instead: str, tmp_path: Path) -> None:
    """A new file would not have what was written to the old one."""
    slot = Slot(tmp_path / "r00000-0.bin")
    slot.reserve(100)
    slot.data.fill_(1)
    slot.path.unlink()
    if instead == "another file":
        slot.path.write_bytes(bytes(1000))
    with pytest.raises(StagingError, match="r00000-0.bin: found another file, or no file"):
        slot.grow(300)
    slot.reserve(300)
    slot.data.fill_(3)
    assert slot.path.read_bytes()[:300] == b"\3" * 300
    slot.close()


def test_a_link_in_place_of_a_slot_is_refused(tmp_path: Path) -> None:
    (tmp_path / "victim").write_bytes(b"precious")
    slot = Slot(tmp_path / "r00000-0.bin")
    slot.path.symlink_to(tmp_path / "victim")
    with pytest.raises(StagingError):
        slot.reserve(100)
    assert (tmp_path / "victim").read_bytes() == b"precious"
