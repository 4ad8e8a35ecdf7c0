"""Stores a run in a local directory; each object is durable before the call returns."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Final

from recpoint.catalog.store import durable
from recpoint.catalog.store.contract import (
    PROBE_PREFIX,
    ObjectInfo,
    Store,
    check_key,
    check_prefix,
    check_range,
    for_os_error,
    linked,
    missing,
    no_create_only,
    probe_create_only,
    too_large,
    too_short,
)
from recpoint.errors import StoreAccessDenied

__all__ = ["LocalStore"]


# A sweep may remove a directory that has just become empty while an object is written into it.
_TRIES = 5
#: Flags to open the directories above an object. O_PATH needs no permission to list them.
_ON_THE_WAY: Final = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_CLOEXEC
_LISTED: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


class LocalStore(Store):
    """Objects as files under `directory`, which the first write makes.

    `directory` may be reached through symbolic links. Below it no link is followed: an object or a
    prefix behind a link counts as missing, and writes and deletes there are refused. Otherwise
    reads would find objects that a listing of the whole run does not have, because it skips links.

    Args:
        directory: an absolute path; it is also the store's URL.
    """

    #: Not private, because the file itself becomes the object.
    scratch_mode = 0o666

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self._root = Path(directory)
        if not self._root.is_absolute():
            raise ValueError(f"{directory} is not absolute")
        self.url = str(self._root)
        # Inodes of directories that are known to be durable in their parents.
        self._durable_directories: dict[Path, int] = {}

    def __repr__(self) -> str:
        return f"LocalStore({self.url!r})"

    def __getstate__(self) -> dict[str, object]:
        return {"_root": self._root, "url": self.url, "_durable_directories": {}}

    def get(self, key: str, *, max_bytes: int) -> bytes:
        address = self._where(key)
        with self._translated(address, "reading"), self._open(key) as file:
            size_bytes = self._size(address, file, max_bytes)
            data = file.read(size_bytes)
        if len(data) != size_bytes:
            raise too_short(address, found_bytes=len(data), expected_bytes=size_bytes)
        return data

    def get_lent(
        self, key: str, *, max_bytes: int, lend: Callable[[int], memoryview]
    ) -> memoryview:
        address = self._where(key)
        with self._translated(address, "reading"), self._open(key) as file:
            size_bytes = self._size(address, file, max_bytes)
            data = lend(size_bytes)
            found_bytes = file.readinto(data)
        if found_bytes != size_bytes:
            raise too_short(address, found_bytes=found_bytes, expected_bytes=size_bytes)
        return data

    def _size(self, address: str, file: BufferedReader, max_bytes: int) -> int:
        """Return an open object's length in bytes, checked before memory is allocated for it."""
        size_bytes = os.fstat(file.fileno()).st_size
        if size_bytes > max_bytes:
            raise too_large(address, found_bytes=size_bytes, max_bytes=max_bytes)
        return size_bytes

    def get_range(self, key: str, *, start: int, end: int) -> bytes:
        length_bytes = check_range(start, end)
        address = self._where(key)
        with self._translated(address, "reading"), self._open(key) as file:
            available_bytes = os.fstat(file.fileno()).st_size - start
            if available_bytes < length_bytes:  # before allocating for it
                raise too_short(
                    address, found_bytes=max(0, available_bytes), expected_bytes=length_bytes
                )
            file.seek(start)
            data = file.read(length_bytes)
        if len(data) != length_bytes:
            raise too_short(address, found_bytes=len(data), expected_bytes=length_bytes)
        return data

    def put(self, key: str, data: bytes) -> None:
        self._write(key, data, exclusively=False)

    def create(self, key: str, data: bytes | memoryview) -> None:
        self._write(key, data, exclusively=True)

    def create_from_file(self, key: str, path: Path) -> None:
        """Make a link, so the bytes are not copied."""
        target = self._path(key)
        durable.step(f"create {key}")
        with self._translated(self._where(key), "writing", writing=True):
            self._make_directories(target)
            durable.fsync_file(path)
            durable.step(f"link {target.name}")
            os.link(path, target)
            durable.fsync_directory(target.parent)
        durable.step(f"created {key}")

    def scratch_directory(self) -> Path:
        """The store's root, because a link needs one file system."""
        with self._translated(self.url, "writing", writing=True):
            durable.make_directory(self._root)
        return self._root

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        directory, _, first_part = check_prefix(prefix).rpartition("/")
        return (
            info for info, is_temporary in self._walk(directory, first_part) if not is_temporary
        )

    def size(self, key: str) -> int:
        *above, name = check_key(key).split("/")
        with (
            self._translated(self._where(key), "looking at"),
            self._directory(above, self._where(key)) as directory,
        ):
            status = os.stat(name, dir_fd=directory, follow_symlinks=False)
        if not stat.S_ISREG(status.st_mode):
            raise missing(self._where(key))
        return status.st_size

    def delete(self, key: str) -> None:
        """Remove directories that become empty, too."""
        path = self._path(key)
        durable.step(f"delete {key}")
        with self._translated(self._where(key), "deleting", writing=True):
            self._require_no_link(path)
            durable.remove(path)
        for directory in self._directories_above(path):
            try:
                os.rmdir(directory)
            except OSError:
                break  # not empty, or gone, or no permission
            self._durable_directories.pop(directory, None)
        durable.step(f"deleted {key}")

    def list_unfinished(self) -> Iterator[ObjectInfo]:
        """Yield temporary files."""
        for info, is_temporary in self._walk(""):
            if is_temporary:
                yield info

    def delete_unfinished(self, key: str) -> None:
        directory, slash, name = key.rpartition("/")
        if not name.startswith(durable.TEMPORARY_PREFIX):
            raise ValueError(f"{key[:200]!r} is not a temporary file")
        check_key(f"{directory}{slash}x{name}")
        durable.step(f"delete unfinished {directory}")
        with self._translated(self._where(key), "deleting", writing=True):
            self._require_no_link(self._root / key)
            durable.remove(self._root / key)
        durable.step(f"deleted unfinished {directory}")

    def probe(self) -> None:
        try:
            probe_create_only(self)
        except StoreAccessDenied:
            # link() raises EPERM on a file system without hard links. If a plain write works, that
            # is the cause.
            key = f"{PROBE_PREFIX}{os.urandom(16).hex()}"
            self.put(key, b"")
            self.delete(key)
            raise no_create_only(self, "a file system without hard links") from None

    def _write(self, key: str, data: bytes | memoryview, *, exclusively: bool) -> None:
        path = self._path(key)
        verb, past_verb = ("create", "created") if exclusively else ("put", "stored")
        durable.step(f"{verb} {key}")
        with self._translated(self._where(key), "writing", writing=True):
            for attempt in range(_TRIES):
                try:
                    self._make_directories(path)
                    if exclusively:
                        durable.create_exclusively(path, data)
                    else:
                        durable.write_atomically(path, data)
                    break
                except FileNotFoundError:
                    if attempt == _TRIES - 1:
                        raise
        durable.step(f"{past_verb} {key}")

    def _make_directories(self, path: Path) -> None:
        """Make the directories above `path`, durable up to the root.

        Another process may have made a directory and died, or not yet reached its fsync. So the
        first use of each directory syncs its parent.
        """
        self._require_no_link(path)
        durable.make_directory(path.parent)
        for directory in self._directories_above(path):
            inode = os.stat(directory).st_ino
            if self._durable_directories.get(directory) != inode:
                durable.fsync_directory(directory.parent)
                self._durable_directories[directory] = inode

    def _require_no_link(self, path: Path) -> None:
        """Refuse to change `path` if a directory between the root and `path` is a link."""
        for directory in self._directories_above(path):
            if directory.is_symlink():
                address = self._where(path.relative_to(self._root).as_posix())
                raise linked(address, str(directory), reading=False)

    def _directories_above(self, path: Path) -> Iterator[Path]:
        """Yield the directories between `path` and the root, both excluded, deepest first."""
        for directory in path.parents:
            if directory == self._root:
                return
            yield directory

    def _walk(self, directory: str, start: str = "") -> Iterator[tuple[ObjectInfo, bool]]:
        """Yield (file, is it temporary) of regular files under `directory`, ascending by key.

        Only entries of `directory` whose names begin with `start` are looked at.
        """
        for name, status in self._entries(directory, start):
            key = f"{directory}/{name}" if directory else name
            if stat.S_ISDIR(status.st_mode):
                yield from self._walk(key)
            elif stat.S_ISREG(status.st_mode):
                yield (
                    ObjectInfo(
                        key=key,
                        size_bytes=status.st_size,
                        modified_ms=status.st_mtime_ns // 1_000_000,
                    ),
                    name.startswith(durable.TEMPORARY_PREFIX),
                )

    def _entries(self, directory: str, start: str) -> Sequence[tuple[str, os.stat_result]]:
        """Return entries of `directory` in the order of keys; none if it does not exist."""
        entries = []
        address = self._where(directory)
        with self._translated(address, "listing"):
            try:
                parts = directory.split("/") if directory else []
                with self._directory(parts, address, flags=_LISTED) as descriptor:
                    for name in os.listdir(descriptor):
                        if not name.startswith(start):
                            continue
                        try:
                            status = os.stat(name, dir_fd=descriptor, follow_symlinks=False)
                        except FileNotFoundError:
                            continue  # removed meanwhile
                        entries.append((name, status))
            except (FileNotFoundError, NotADirectoryError):
                return []
        # A directory sorts with a slash behind its name, as the keys in it do.
        entries.sort(key=lambda entry: entry[0] + "/" * stat.S_ISDIR(entry[1].st_mode))
        return entries

    @contextmanager
    def _directory(
        self, parts: Sequence[str], address: str, *, flags: int = _ON_THE_WAY
    ) -> Iterator[int]:
        """Open a directory below the root without following links on the way.

        Args:
            parts: the names below the root; empty: the root itself, which may be a link.
            address: the object or the listing that was asked for.
            flags: flags of `os.open`.

        Raises:
            ObjectNotFound: a directory on the way is a link.
            OSError: a directory on the way is missing or no directory.
        """
        descriptor = os.open(self._root, flags)
        try:
            for depth, name in enumerate(parts):
                try:
                    below = os.open(name, flags | os.O_NOFOLLOW, dir_fd=descriptor)
                except NotADirectoryError:
                    status = os.stat(name, dir_fd=descriptor, follow_symlinks=False)
                    if not stat.S_ISLNK(status.st_mode):
                        raise
                    link = self._root.joinpath(*parts[: depth + 1])
                    raise linked(address, str(link), reading=True) from None
                above, descriptor = descriptor, below
                os.close(above)  # after the swap, so that an interrupt here closes nothing twice
            yield descriptor
        finally:
            os.close(descriptor)

    @contextmanager
    def _open(self, key: str) -> Iterator[BufferedReader]:
        """Open the object's file; a link, pipe or device in its place counts as no object."""
        # O_NONBLOCK, because opening a pipe in the object's place must not hang.
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        *above, name = check_key(key).split("/")
        with self._directory(above, self._where(key)) as directory:
            descriptor = os.open(name, flags, dir_fd=directory)
        with open(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise missing(self._where(key))
            yield file

    @contextmanager
    def _translated(self, address: str, doing: str, *, writing: bool = False) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise for_os_error(error, address, doing=doing, writing=writing) from error

    def _path(self, key: str) -> Path:
        return self._root / check_key(key)

    def _where(self, key: str) -> str:
        return f"{self.url}/{key}" if key else self.url
