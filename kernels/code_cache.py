"""Machine code that is kept on disk, and found again for exactly what it was compiled from."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import llvmlite
import numba
from numba.core.caching import FunctionCache, IndexDataCacheFile, NullCache

__all__ = ["cache_of"]

_log = logging.getLogger("recpoint")


def _made_of() -> str:
    """A digest of all files that kernels are made of, and of the compiler's releases."""
    folder = Path(__file__).parent
    digest = hashlib.sha256(f"{numba.__version__} {llvmlite.__version__}".encode())
    for file in sorted(folder.rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


#: Of the files as they are imported: an update may replace them while this process runs.
_MADE_OF = _made_of()


@cache
def _tell_compiling(kept: str) -> None:
    """Say once in a process that it compiles, before it does: who starts it would see it hang."""
    _log.info(
        "compiling kernels for this machine: all of them take some 15 s of a core, longer where it "
        "is busy; %s",
        kept,
    )


@cache
def _tell_not_kept(folder: str, why: str) -> None:
    _log.warning(
        "%s: %s; compiled kernels are not kept there, and later starts compile them again. Next: "
        "make room, or set NUMBA_CACHE_DIR to a folder that has some",
        folder,
        why,
    )


class _Files(IndexDataCacheFile):
    """The files of one kernel, each of which says itself what its machine code is for.

    numba writes what leads to a file before the file, and gives names anew once a source differs.
    Until a process has written the code, or for ever if the disk is full or the process is killed,
    that leads to what was compiled earlier: from other sources, or for another processor.
    """

    def load(self, key: Any) -> Any:
        numbas: Any = super()
        found = self._readable(numbas.load, key)
        return found[1] if isinstance(found, tuple) and found[:1] == (key,) else None

    def save(self, key: Any, data: Any) -> None:
        numbas: Any = super()
        numbas.save(key, (key, data))

    def _load_index(self) -> Any:
        numbas: Any = super()
        return self._readable(numbas._load_index) or {}

    def _readable(self, read: Callable[..., Any], *arguments: Any) -> Any:
        """None where a file cannot be read: a host that loses its power may leave half of one."""
        try:
            return read(*arguments)
        except Exception as error:  # of unpickling, which may raise any
            _log.warning(
                "%s is compiled again: what is kept is damaged (%r)", self._index_path, error
            )
            return None


class _Cache(FunctionCache):
    """Machine code has other kernels' code in it, and numba looks at the kernel's own file only.

    Without this an update of the package would go on running what it had compiled before.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        numbas: Any = super()
        numbas.__init__(function)
        files: Any = _Files
        self._cache_file = files(
            cache_path=self._cache_path,
            filename_base=self._impl.filename_base,
            source_stamp=self._impl.locator.get_source_stamp(),
        )

    def _index_key(self, sig: Any, codegen: Any) -> Any:
        numbas: Any = super()
        return (*numbas._index_key(sig, codegen), _MADE_OF)

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        numbas: Any = super()
        found = numbas.load_overload(sig, target_context)
        if found is None:
            _tell_compiling("they are kept on disk, and loaded by later starts")
        return found

    def save_overload(self, sig: Any, data: Any) -> None:
        numbas: Any = super()
        try:
            numbas.save_overload(sig, data)
        except OSError as error:
            # The code is there, and only later starts have to compile it again.
            _tell_not_kept(self._cache_path, error.strerror or str(error))


class _NoCache(NullCache):
    """Neither the package's folder nor one for caches can be written: compile in each process."""

    def load_overload(self, sig: Any, target_context: Any) -> None:
        _tell_compiling(
            "each process does so, since there is no folder to keep them in. Next: set "
            "NUMBA_CACHE_DIR to one that it can write"
        )


def cache_of(function: Callable[..., Any]) -> Any:
    """Where a kernel's machine code is kept: what numba wants as its dispatcher's cache."""
    make: Any = _Cache
    if not all(hasattr(FunctionCache, name) for name in ("_index_key", "_load_overload")):
        return NullCache()  # a numba with another key: rather slow at the start than stale
    try:
        return make(function)
    except RuntimeError:
        return _NoCache()
