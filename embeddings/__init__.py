"""Finds a model's embedding tables, marks which rows have changed, and keeps rows out of memory.

The input is a model and its optimizers. The output is the model's tables, each with a tracker; the
tracker's bitmap has one bit for each row, set if the row changed since the last checkpoint. No
module here knows of training, checkpoints or serving.

Each package imports only those before it; `cache`, `keyed` and `parity` do not import each other:

- `tables`: what a table is, which of its rows have changed, and how that is noticed.
- `home`: where the rows of a table live while they are not in use: in memory or in files.
- `keyed`: which keys have rows, where ids are any 64-bit numbers.
- `cache`: which rows are in use, and how they come from their home and go back; also those of
  several ranks that share a home.
- `parity`: how the rows of a lost server are computed from those of the others.
- `server`: homes in server processes, on this machine or on a Ray cluster.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from recpoint.embeddings.cache.clipping import clip_grad_norm_
    from recpoint.embeddings.cache.install import cached, read_rows
    from recpoint.embeddings.home.homes import FileLimits, local
    from recpoint.embeddings.home.initial import Uniform, fill
    from recpoint.embeddings.server.processes import servers
    from recpoint.embeddings.server.ray_home import ray

__all__ = [
    "FileLimits",
    "Uniform",
    "cached",
    "clip_grad_norm_",
    "fill",
    "local",
    "ray",
    "read_rows",
    "servers",
]

_PUBLIC = {
    "FileLimits": "home.homes",
    "Uniform": "home.initial",
    "cached": "cache.install",
    "clip_grad_norm_": "cache.clipping",
    "fill": "home.initial",
    "local": "home.homes",
    "ray": "server.ray_home",
    "read_rows": "cache.install",
    "servers": "server.processes",
}


def __getattr__(name: str) -> object:
    # Imported when used: a trainer without a cache needs neither oracle nor home.
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_PUBLIC[name]}"), name)
