"""Runs a trainer's first steps in a staging area as another user, in a separate process."""

from __future__ import annotations

import os
from pathlib import Path

from recpoint.errors import StagingError
from recpoint.trainer_plugin.snapshot.staging import StagingArea
from tests.forked import ForkedProcess
from tests.polling import PATIENCE_SECONDS

__all__ = ["area_of"]


def area_of(user: int, root: Path, run_url: str) -> str:
    """Let a user take a run's staging area and reserve a slot; return `taken` or the error."""
    message_path = root.with_name(root.name + f"-said-to-{user}")
    process = ForkedProcess(target=_take, args=(user, root, run_url, message_path))
    message_path.touch()
    message_path.chmod(0o666)
    process.start()
    process.join(PATIENCE_SECONDS)
    try:
        assert process.exitcode == 0
        return message_path.read_text(encoding="utf-8")
    finally:
        message_path.unlink()


def _take(user: int, root: Path, run_url: str, message_path: Path) -> None:
    os.setgroups([])
    os.setgid(user)
    os.setuid(user)
    area = StagingArea(root, run_url)
    try:
        area.create()
        area.lock()
        area.free_slot(set()).reserve(4096)
    except StagingError as error:
        message_path.write_text(str(error), encoding="utf-8")
        return
    message_path.write_text("taken", encoding="utf-8")
    area.close()
