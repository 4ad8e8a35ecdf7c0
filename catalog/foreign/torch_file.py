"""Reads a file that `torch.save` wrote: a state dict, a dict of several, or Lightning's `.ckpt`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from torch import Tensor

from recpoint.catalog.foreign.contents import (
    ForeignCheckpoint,
    ForeignEntry,
    Scalar,
    StoredTensor,
    malformed,
)
from recpoint.catalog.foreign.inert_pickle import Unmade, UnreadableTensor, read_archive

__all__ = ["TorchFile", "values_of"]

#: Bounds of what one file may hold, so that a small hostile one cannot stand for endless values.
_MOST_VALUES: Final = 4_000_000
_MOST_KEYS: Final = 64


class TorchFile(ForeignCheckpoint):
    """A file that `torch.save` wrote.

    Args:
        path: the file.

    Raises:
        MalformedObject: it is not such a file, or not whole.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("rb", buffering=0)
        try:
            tree = read_archive(self._file, path, 0, path.stat().st_size)
            self._tensors: dict[str, StoredTensor] = {}
            self.scalars: dict[str, Scalar] = {}
            self.left_out: dict[str, str] = {}
            for name, value in values_of(tree, path):
                self._take(name, value)
        except BaseException:
            self._file.close()
            raise
        is_lightning = isinstance(tree, dict) and "pytorch-lightning_version" in tree
        self.form = "a checkpoint of Lightning" if is_lightning else "a torch.save file"
        self.entries = {
            name: ForeignEntry(name, tensor.dtype, tensor.shape)
            for name, tensor in self._tensors.items()
        }

    def _take(self, name: str, value: object) -> None:
        if name in self._tensors or name in self.scalars:
            raise malformed(
                self.path, found=f"two values named {name!r:.200}", expected="one value a name"
            )
        if isinstance(value, StoredTensor):
            self._tensors[name] = value
        elif isinstance(value, Scalar) and not isinstance(value, bool):
            self.scalars[name] = value
        elif isinstance(value, Unmade):
            self.left_out[name] = f"an object of {value.class_name}"
        elif isinstance(value, UnreadableTensor):
            self.left_out[name] = value.description

    def read_into(self, name: str, rows: range, target: Tensor) -> None:
        """See `ForeignCheckpoint.read_into`."""
        self._tensors[name].read_into(self._file, rows, target)

    def check_rows(self, name: str, rows: range, count: int) -> None:
        """See `ForeignCheckpoint.check_rows`."""
        if rows:
            self._tensors[name].check_rows(count)

    def close(self) -> None:
        """See `ForeignCheckpoint.close`."""
        self._file.close()


def values_of(tree: object, path: Path) -> Iterator[tuple[str, Any]]:
    """Yield name and value of each leaf of nested dicts, lists and tuples.

    Args:
        tree: the outermost value.
        path: where it comes from, for messages.

    Raises:
        MalformedObject: it has too many values, or is too deep, as one that contains itself.
    """
    waiting: list[tuple[tuple[str, ...], object]] = [((), tree)]
    count = 0
    while waiting:
        keys, value = waiting.pop()
        count += 1
        if count > _MOST_VALUES or len(keys) > _MOST_KEYS:
            raise malformed(
                path,
                found=f"more than {_MOST_VALUES} values, or {_MOST_KEYS} levels",
                expected="fewer",
            )
        if isinstance(value, Mapping):
            inner = [((*keys, str(key)), item) for key, item in value.items()]
            waiting.extend(reversed(inner))
        elif isinstance(value, list | tuple) and not isinstance(
            value, StoredTensor | UnreadableTensor
        ):
            inner = [((*keys, str(index)), item) for index, item in enumerate(value)]
            waiting.extend(reversed(inner))
        else:
            yield ".".join(keys), value
