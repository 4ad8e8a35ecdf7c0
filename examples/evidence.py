"""Reports a training run: progress while it trains, digests of its whole state at the end."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from batches import Reader

__all__ = ["ProgressFile", "digest", "digests", "digests_of_all"]


class ProgressFile:
    """Appends one JSON line for each call, in one write, so that a kill leaves whole lines.

    Args:
        path: of the file; None: nothing is written.
        rank: of this process; each rank but 0 has its own file next to `path`, named by its rank.
    """

    def __init__(self, path: Path | None, *, rank: int = 0) -> None:
        if path is not None and rank > 0:
            path = path.with_name(f"{path.stem}.rank{rank}{path.suffix}")
        self._path = path

    def write(self, **values: float | Sequence[int]) -> None:
        """Append one line."""
        if self._path is not None:
            with self._path.open("ab", buffering=0) as file:
                file.write((json.dumps(values) + "\n").encode())


def digests(
    model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer], reader: Reader
) -> dict[str, str]:
    """Return SHA-256 digests of all state that determines further training, between two batches.

    This draws the next batch from the reader, so the reader must not be used afterwards. At the end
    of the log, None is digested instead of a batch.
    """
    random_state = (random.getstate(), np.random.get_state(), torch.get_rng_state())
    return {
        "weights": digest(model.state_dict()),
        "optimizer": digest([optimizer.state_dict() for optimizer in optimizers]),
        "rng": digest(random_state),
        "reader": digest(reader.state_dict()),
        "next_batch": digest(next(iter(reader), None)),
    }


def digests_of_all(of_ranks: Sequence[dict[str, str]]) -> dict[str, str]:
    """Combine the digests of all ranks into one for each name; one rank's stay as they are."""
    if len(of_ranks) == 1:
        return of_ranks[0]
    return {name: digest([tables[name] for tables in of_ranks]) for name in of_ranks[0]}


def digest(value: object) -> str:
    """Return the SHA-256 of a tree's structure, and of its leaves' types, shapes and bytes."""
    sha256 = hashlib.sha256()
    _add(sha256, value)
    return sha256.hexdigest()


def _add(sha256: hashlib._Hash, value: object) -> None:
    if isinstance(value, torch.Tensor):
        _add(sha256, value.detach().cpu().contiguous().numpy())
    elif isinstance(value, np.ndarray):
        sha256.update(f"array {value.dtype.str} {value.shape};".encode())
        sha256.update(np.ascontiguousarray(value).data)
    elif isinstance(value, Mapping):
        sha256.update(f"mapping {len(value)};".encode())
        for key in sorted(value, key=repr):
            _add(sha256, key)
            _add(sha256, value[key])
    elif isinstance(value, list | tuple):
        sha256.update(f"sequence {len(value)};".encode())
        for entry in value:
            _add(sha256, entry)
    elif value is None or isinstance(value, bool | int | float | str):
        text = repr(value).encode()
        sha256.update(b"%s %d;%s" % (type(value).__name__.encode(), len(text), text))
    else:
        raise TypeError(f"no digest of a {type(value).__name__}")
