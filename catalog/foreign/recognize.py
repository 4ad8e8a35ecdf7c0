"""Tells which form of checkpoint lies at a path, and opens it."""

from __future__ import annotations

from pathlib import Path

from recpoint.catalog.foreign.contents import ForeignCheckpoint, malformed
from recpoint.catalog.foreign.dcp import METADATA_NAME, DistributedCheckpoint
from recpoint.catalog.foreign.inert_pickle import is_archive
from recpoint.catalog.foreign.safetensors_files import INDEX_NAME, SafetensorsFiles
from recpoint.catalog.foreign.torch_file import TorchFile
from recpoint.errors import ForeignObject, ObjectNotFound
from recpoint.format.naming import RUN_KEY

__all__ = ["is_absent", "is_foreign", "open_foreign"]

_SINGLE_NAME = "model.safetensors"
_FORMS = (
    "a directory of torch.distributed.checkpoint (.metadata), a file of torch.save or Lightning, a "
    f"safetensors file, or a directory with {INDEX_NAME} or {_SINGLE_NAME}"
)


def is_foreign(url: str) -> bool:
    """Whether a URL names a checkpoint of another tool, and not a run of recpoint.

    Only a local path can. A file always does, and a directory does if it holds an index or a file
    that recpoint never writes into a run.
    """
    path = _local(url)
    return path is not None and _is_foreign(path)


def is_absent(url: str) -> bool:
    """Whether a URL is a local path at which nothing lies."""
    path = _local(url)
    return path is not None and not path.exists()


def _local(url: str) -> Path | None:
    """Return the path of a local URL; None: the URL is not local."""
    url = url.removeprefix("file://")
    return None if "://" in url else Path(url)


def _is_foreign(path: Path) -> bool:
    return path.is_file() or any(
        (path / name).is_file() for name in (METADATA_NAME, INDEX_NAME, _SINGLE_NAME)
    )


def open_foreign(url: str) -> ForeignCheckpoint:
    """Open a checkpoint of another tool for reading.

    Args:
        url: a local path, or a `file://` URL.

    Raises:
        ForeignObject: the path is not local, or no form that can be read lies there.
        MalformedObject: it is damaged.
        ObjectNotFound: nothing is there.
    """
    path = _local(url)
    if path is None:
        raise ForeignObject(
            url,
            found="a URL of a store",
            expected="a local path",
            next_step="copy the checkpoint to this host",
        )
    if path.is_dir():
        if (path / METADATA_NAME).is_file():
            return DistributedCheckpoint(path)
        for name in (INDEX_NAME, _SINGLE_NAME):
            if (path / name).is_file():
                return SafetensorsFiles(path / name)
        if (path / RUN_KEY).is_file():
            raise ForeignObject(
                url,
                found="a run of recpoint",
                expected=_FORMS,
                next_step=f"recpoint seed {url}",
            )
        names = sorted(child.name for child in path.iterdir())
        raise _unknown(path, f"a directory with {names!r:.200}")
    if not path.is_file():
        raise ObjectNotFound(
            url, found="nothing", expected=_FORMS, next_step="check the path, which must be local"
        )
    if path.name == METADATA_NAME:
        return DistributedCheckpoint(path.parent)
    if path.suffix == ".json":
        return SafetensorsFiles(path)
    with path.open("rb") as file:
        head = file.read(16)
    if is_archive(head):
        return TorchFile(path)
    if path.suffix == ".safetensors" or head[8:9] == b"{":
        return SafetensorsFiles(path)
    if not head:
        raise malformed(path, found="no bytes", expected=_FORMS)
    raise _unknown(path, f"a file that begins with {head[:8]!r}")


def _unknown(path: Path, found: str) -> ForeignObject:
    return ForeignObject(
        str(path),
        found=found,
        expected=_FORMS,
        next_step="save it in one of these forms; torch files of the form before 1.6 with "
        "torch.save(torch.load(OLD, weights_only=True), NEW)",
    )
