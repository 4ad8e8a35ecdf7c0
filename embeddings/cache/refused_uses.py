"""Refuses uses of a cached model that would take slots for rows, or share them."""

from __future__ import annotations

from recpoint.errors import SettingsError

__all__ = ["copy_refused", "loaded_state_refused"]


def copy_refused(name: str) -> SettingsError:
    """Return the error of a copy of a model, which would train the same slots.

    Args:
        name: name of a table in the cache.
    """
    return SettingsError(
        f"cached table {name!r}",
        found="a copy of the model, which would train the same slots",
        expected="one model for each cache",
        next_step="take a checkpoint, and restore it into another model",
    )


def loaded_state_refused(name: str) -> SettingsError:
    """Return the error of `load_state_dict`: it has the rows of slots, or of another model.

    Args:
        name: name of a table in the cache.
    """
    return SettingsError(
        f"cached table {name!r}",
        found="load_state_dict() of a model whose tables are in a cache",
        expected="rows that come from a checkpoint, because most of them are not in the model's "
        "memory",
        next_step="restore with Checkpointer.restore(), and read rows with "
        "recpoint.embeddings.read_rows()",
    )
