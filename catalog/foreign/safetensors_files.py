"""Reads a safetensors file, and the files that Hugging Face's index names."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from safetensors import SafetensorError, safe_open
from torch import Tensor

from recpoint.catalog.foreign.contents import ForeignCheckpoint, ForeignEntry, Scalar, malformed
from recpoint.format.dtypes import DTYPES, torch_dtype

__all__ = ["INDEX_NAME", "SafetensorsFiles"]

#: Name of Hugging Face's index of several files.
INDEX_NAME: Final = "model.safetensors.index.json"
_MOST_INDEX_BYTES: Final = 256 << 20


class SafetensorsFiles(ForeignCheckpoint):
    """One safetensors file, or several that an index names.

    Args:
        path: the file, or the index.

    Raises:
        MalformedObject: a file is damaged, or the index names a file or tensor that is not there.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.scalars: dict[str, Scalar] = {}
        self.left_out: dict[str, str] = {}
        self._opened = ExitStack()
        is_index = path.suffix == ".json"
        self.form = "safetensors files with an index" if is_index else "a safetensors file"
        try:
            self._files = self._indexed() if is_index else self._single()
            self.entries: dict[str, ForeignEntry] = {
                name: entry for name in self._files if (entry := self._entry(name)) is not None
            }
        except BaseException:
            self._opened.close()
            raise

    def _single(self) -> dict[str, tuple[Path, Any]]:
        file = self._open(self.path)
        return {name: (self.path, file) for name in sorted(file.keys())}

    def _open(self, path: Path) -> Any:
        try:
            return self._opened.enter_context(safe_open(path, framework="pt"))
        except (SafetensorError, OSError) as error:
            raise malformed(
                path, found=f"{error}"[:300], expected="a whole safetensors file"
            ) from error

    def _indexed(self) -> dict[str, tuple[Path, Any]]:
        """Open the files of the index: name -> the file that has the tensor."""
        if self.path.stat().st_size > _MOST_INDEX_BYTES:
            raise malformed(
                self.path,
                found=f"{self.path.stat().st_size} bytes",
                expected=f"at most {_MOST_INDEX_BYTES}",
            )
        try:
            document = json.loads(self.path.read_bytes())
        except (ValueError, RecursionError) as error:
            raise malformed(
                self.path, found=f"{error}"[:300], expected="the JSON of an index"
            ) from error
        files_by_name = document.get("weight_map") if isinstance(document, dict) else None
        if not isinstance(files_by_name, dict) or not all(
            isinstance(file, str) for file in files_by_name.values()
        ):
            raise malformed(
                self.path,
                found="no names of files by tensor",
                expected='{"weight_map": {TENSOR: FILE}}',
            )
        opened: dict[str, Any] = {}
        names: dict[str, set[str]] = {}
        for file in sorted(set(files_by_name.values())):
            if Path(file).name != file:
                raise malformed(
                    self.path,
                    found=f"the file {file!r:.200}",
                    expected="names of files beside the index",
                )
            opened[file] = self._open(self.path.parent / file)
            names[file] = set(opened[file].keys())
        missing = [name for name, file in files_by_name.items() if name not in names[file]]
        if missing:
            raise malformed(
                self.path,
                found=f"{len(missing)} tensors that their files do not hold, as {missing[0]!r:.200}"
                f" in {files_by_name[missing[0]]!r:.200}",
                expected="files that hold what the index says",
            )
        return {
            name: (self.path.parent / file, opened[file])
            for name, file in sorted(files_by_name.items())
        }

    def _entry(self, name: str) -> ForeignEntry | None:
        _, file = self._files[name]
        part = file.get_slice(name)
        stored_dtype = part.get_dtype()
        if stored_dtype not in DTYPES:
            self.left_out[name] = f"a tensor of dtype {stored_dtype}"
            return None
        return ForeignEntry(name, torch_dtype(stored_dtype), tuple(part.get_shape()))

    def read_into(self, name: str, rows: range, target: Tensor) -> None:
        """See `ForeignCheckpoint.read_into`."""
        path, file = self._files[name]
        try:
            if not self.entries[name].shape:
                target.copy_(file.get_tensor(name))
            else:
                target.copy_(file.get_slice(name)[rows.start : rows.stop])
        except (SafetensorError, OSError) as error:
            raise malformed(
                path, found=f"{error}"[:300], expected="a whole safetensors file"
            ) from error

    def check_rows(self, name: str, rows: range, count: int) -> None:
        """See `ForeignCheckpoint.check_rows`: such a file has no strides, and was checked whole."""

    def close(self) -> None:
        """See `ForeignCheckpoint.close`."""
        self._opened.close()
