"""Makes homes of embedding rows."""

from __future__ import annotations

from os import PathLike

from recpoint.embeddings.home.contract import Home
from recpoint.embeddings.home.files import FileHome, FileLimits
from recpoint.embeddings.home.memory import MemoryHome
from recpoint.errors import SettingsError

__all__ = ["FileLimits", "local"]


def local(
    directory: str | PathLike[str] | None = None, *, limits: FileLimits | None = None
) -> Home:
    """Make a home on this machine, for one process.

    Args:
        directory: where the files of a home in files go: on a local disk, and used by no other
            home. Made with mode 0700 if it does not exist. None: all rows stay in memory.
        limits: bounds of a home in files.

    Raises:
        HomeError: the directory is used by another home or holds other files, or the system
            refuses a call.
        SettingsError: limits without a directory.
    """
    if directory is not None:
        return FileHome(directory, limits=limits)
    if limits is not None:
        raise SettingsError(
            "limits",
            found="limits for a home in memory",
            expected="limits with a directory only",
            next_step="pass a directory, or no limits",
        )
    return MemoryHome()
