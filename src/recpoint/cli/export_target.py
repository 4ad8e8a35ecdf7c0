"""Checks what `recpoint restore --to` names, and puts a file or directory there when it is whole.

Nothing here imports torch, so that a wrong name is refused at once.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from recpoint.catalog.store import durable
from recpoint.errors import SettingsError
from recpoint.installation import install_command

__all__ = [
    "TABLE_ENDINGS",
    "WHOLE_ENDINGS",
    "check_ending",
    "check_place",
    "is_for_shards",
    "replacing",
]

#: Endings of file names for a whole checkpoint.
WHOLE_ENDINGS: Final = (".pt", ".safetensors", ".dcp")
#: Endings of file names for one table.
TABLE_ENDINGS: Final = (".parquet", ".csv")


def is_for_shards(path: Path, *, table: str | None, force: bool) -> bool:
    """Return whether `path` is a directory that takes safetensors files with an index.

    Raises:
        SettingsError: `path` is such a directory, and `force` was given.
    """
    if table is not None or not path.is_dir() or path.suffix in WHOLE_ENDINGS:
        return False
    if force:
        raise SettingsError(
            "--force",
            found=f"the directory {path}",
            expected="a file or a .dcp directory; no file in another directory is ever replaced",
            next_step="choose another directory, or remove what is there",
        )
    return True


def check_ending(path: Path, *, table: str | None) -> None:
    """Refuse a name whose ending is unknown or does not fit `table`.

    Raises:
        SettingsError: the name is refused, or pandas is missing.
    """
    endings = TABLE_ENDINGS if table is not None else WHOLE_ENDINGS
    if path.suffix not in endings:
        raise SettingsError(
            "--to",
            found=str(path),
            expected=f"a name that ends in {', '.join(endings)}"
            + (
                " for one table"
                if table is not None
                else ", or an existing directory; with --table .parquet or .csv"
            ),
            next_step="give the file another ending",
        )
    if table is not None:
        _require_pandas()


def check_place(path: Path, *, force: bool) -> None:
    """Refuse a place that `replacing` would refuse, before a restore spends minutes."""
    if not force and os.path.lexists(path):
        raise _exists(path)
    if not path.parent.is_dir():
        raise SettingsError(
            "--to",
            found=f"no directory {path.parent}",
            expected="an existing directory",
            next_step=f"mkdir -p {path.parent}",
        )


@contextmanager
def replacing(path: Path, *, force: bool) -> Iterator[Path]:
    """Yield a temporary path beside `path`; it durably takes `path`'s place if all goes well.

    Raises:
        SettingsError: `path` exists, and `force` was not given.
    """
    temporary = path.with_name(f"{durable.TEMPORARY_PREFIX}{secrets.token_hex(16)}{path.suffix}")
    try:
        yield temporary
        if temporary.is_dir():
            _put_directory(temporary, path, force=force)
        else:
            durable.fsync_file(temporary)
            _put_file(temporary, path, force=force)
        durable.fsync_directory(path.parent)
    finally:
        if temporary.is_dir():
            shutil.rmtree(temporary)
        temporary.unlink(missing_ok=True)


def _put_file(temporary: Path, path: Path, *, force: bool) -> None:
    if force:
        os.replace(temporary, path)
        return
    # Not a rename, which would replace a file that was made since `check_place` looked.
    try:
        os.link(temporary, path)
    except FileExistsError:
        raise _exists(path) from None


def _put_directory(temporary: Path, path: Path, *, force: bool) -> None:
    for file in temporary.iterdir():
        durable.fsync_file(file)
    durable.fsync_directory(temporary)
    old = path.with_name(f"{durable.TEMPORARY_PREFIX}{secrets.token_hex(16)}")
    if force and os.path.lexists(path):
        os.rename(path, old)  # a directory is not replaced by a rename
    try:
        os.rename(temporary, path)
    except OSError as error:
        if error.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
            raise _exists(path) from None
        raise
    finally:
        if old.is_dir() and not old.is_symlink():
            shutil.rmtree(old)
        old.unlink(missing_ok=True)


def _exists(path: Path) -> SettingsError:
    return SettingsError(
        "--to",
        found=f"{path}, which exists",
        expected="a new file",
        next_step="choose another name, or replace it with --force",
    )


def _require_pandas() -> None:
    if find_spec("pandas") is None:
        raise SettingsError(
            "--table",
            found="no pandas",
            expected="pandas and pyarrow",
            next_step=install_command("pandas"),
        )
