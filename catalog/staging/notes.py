"""Reads and writes the notes in a run's directory of the staging area (format §7)."""

from __future__ import annotations

import json
import os
import secrets
import threading
from contextlib import suppress
from typing import TypeVar

from recpoint.catalog.staging import owned
from recpoint.catalog.staging.area import StagedRun
from recpoint.catalog.store import durable
from recpoint.errors import StagingRefused
from recpoint.format.notes import MAX_NOTE_BYTES, Note, NoteKind

__all__ = ["read_note", "remove_note", "write_note", "write_note_durably", "write_status"]

NoteT = TypeVar("NoteT", bound=Note)


def read_note(staged_run: StagedRun, kind: NoteKind[NoteT]) -> NoteT | None:
    """Return a note; None if there is none that can be read, or it is not this user's own."""
    try:
        data = owned.read(staged_run.staging, staged_run.path / kind.file, MAX_NOTE_BYTES)
    except (OSError, StagingRefused):
        return None
    return kind.unpack(data)


def write_note(
    staged_run: StagedRun, kind: NoteKind[NoteT], note: NoteT, *, temporary: str | None = None
) -> None:
    """Replace a note so that it is whole at every moment, but not durably.

    Args:
        staged_run: the run.
        kind: the kind of the note.
        note: the note.
        temporary: name of the temporary file; None: a new one, which an agent's start removes.

    Raises:
        StagingRefused: the directory is not this user's own.
        OSError: it cannot be written.
    """
    name = temporary or f"{durable.TEMPORARY_PREFIX}{secrets.token_hex(16)}"
    path = staged_run.path / kind.file
    owned.replace(staged_run.staging, path, kind.pack(note), temporary=name)


def write_note_durably(staged_run: StagedRun, kind: NoteKind[NoteT], note: NoteT) -> None:
    """Replace a note so that it survives a reboot; raise as `write_note`."""
    owned.write_atomically(staged_run.staging, staged_run.path / kind.file, kind.pack(note))


def remove_note(staged_run: StagedRun, kind: NoteKind[NoteT]) -> None:
    """Remove a note, if there is one; raise as `write_note`."""
    with (
        suppress(FileNotFoundError),
        owned.directory(staged_run.staging, staged_run.path) as opened,
    ):
        os.unlink(kind.file, dir_fd=opened)


def write_status(staged_run: StagedRun, status: dict[str, object]) -> None:
    """Replace the run's status file so that it is whole at every moment, but not durably.

    If there is no room for a second file, the old one is overwritten, because just then it says
    what is wrong. A reader may then find it half written.

    Raises:
        StagingRefused: the directory is not this user's own.
        OSError: it could not be overwritten either.
    """
    area, path = staged_run.staging, staged_run.status_path
    data = (json.dumps(status, indent=1, sort_keys=True) + "\n").encode()
    try:
        temporary = f"{durable.TEMPORARY_PREFIX}status-{threading.get_ident()}"
        owned.replace(area, path, data, temporary=temporary)
    except OSError:
        if not path.is_file():
            raise
        # A file system in memory has pages for the old text. If the new text needs more and there
        # are none, the file stays as it is, because half a text says nothing. A shorter text is
        # padded with blanks, so that nothing of the old text is left.
        with open(owned.open_file(area, path, os.O_RDWR), "rb+", buffering=0) as file:
            size_before = os.fstat(file.fileno()).st_size
            if size_before < len(data):
                try:
                    os.posix_fallocate(file.fileno(), 0, len(data))
                except OSError:
                    file.truncate(size_before)
                    raise
            file.write(data.ljust(size_before))
