"""Finds a model's embedding tables, marks which rows have changed, and keeps rows out of memory.

The input is a model and its optimizers. The output is the model's tables, each with a tracker; the
tracker's bitmap has one bit for each row, set if the row changed since the last checkpoint. The
package also holds tables in memory that only answer lookups. No module here knows of training,
checkpoints or serving. Read the modules in this order: `tables.py` (what a table is, and where
tables come from), `marks.py` (the dirty rows of one table), `lookups.py` (hooks into the lookups of
a table's module) and `optimizers.py` (which rows an optimizer step changes, and marking them after
each step). `served_tables.py` stands alone: it holds values, or codes that lookups decode.

Tables larger than memory: `home.py` (keeps the rows that are not in use), `home_tables.py` (the
tables of a home), `home_in_memory.py`, `home_directory.py`, `home_log.py` and `home_in_files.py`
(homes in memory and in files), `homes.py` (makes them), `slots.py` (the rows in use),
`slot_gradients.py` (their gradients), `cached_rows.py` (which of them must stay), `settling.py`
(the rows of a cut, as they were then), `call_thread.py` (a thread that does calls in order),
`cache.py` (brings rows before their first use, and writes them back after their last),
`cached_tables.py` (puts a model's tables into a cache), `clipping.py` (clips gradients by one norm
on all ranks), `initial.py` (first values of rows) and `cache_view.py` (all rows of one moment, for
a checkpoint). `remote/` has homes in server processes, `parity/` computes the rows of a lost server
from those of the others, and `trainers/` has the caches of several ranks that share a home.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from recpoint.embeddings.cached_tables import cached, read_rows
    from recpoint.embeddings.clipping import clip_grad_norm_
    from recpoint.embeddings.homes import FileLimits, local
    from recpoint.embeddings.initial import Uniform, fill
    from recpoint.embeddings.remote.processes import servers
    from recpoint.embeddings.remote.ray_servers import ray

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
    "FileLimits": "homes",
    "Uniform": "initial",
    "cached": "cached_tables",
    "clip_grad_norm_": "clipping",
    "fill": "initial",
    "local": "homes",
    "ray": "remote.ray_servers",
    "read_rows": "cached_tables",
    "servers": "remote.processes",
}


def __getattr__(name: str) -> object:
    # Imported when used: a trainer without a cache needs neither oracle nor home.
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_PUBLIC[name]}"), name)
