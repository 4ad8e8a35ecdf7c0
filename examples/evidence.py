"""What a training run says about itself: progress on the way, digests of everything at its end."""

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
    """Appends one JSON line a call, each with one write: a killed process leaves whole lines.

    Args:
        path: the file; None: nothing is written.
        rank: of this process; each but the first has a file beside it, with its number in the name.
    """

    def __init__(self, path: Path | None, *, rank: int = 0) -> None:
        if path is not None and rank > 0:
            path = path.with_name(f"{path.stem}.rank{rank}{path.suffix}")
        self._path = path

    def write(self, **values: float) -> None:
        """Append one line."""
        if self._path is not None:
            with self._path.open("ab", buffering=0) as file:
                file.write((json.dumps(values) + "\n").encode())


def digests(
    model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer], reader: Reader
) -> dict[str, str]:
    """SHA-256 of all that decides how training would go on, taken between two batches.

    The next batch is drawn from the reader, which is therefore spent afterwards; where the log has
    ended, it is the end that is digested.
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
    """One digest for each name, of those of all ranks; of a single rank its own."""
    if len(of_ranks) == 1:
        return of_ranks[0]
    return {name: digest([one[name] for one in of_ranks]) for name in of_ranks[0]}


def digest(value: object) -> str:
    """SHA-256 over structure, types, shapes and bytes of a tree of tensors, arrays and scalars."""
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
