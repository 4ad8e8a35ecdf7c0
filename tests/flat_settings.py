"""Builds the arguments of a Checkpointer from a flat dictionary of settings' field names."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from recpoint.trainer_plugin.settings import Options, Precision, Staging, Timeouts

_KINDS: dict[str, type] = {
    "bits": Precision,
    "staging": Staging,
    "timeouts": Timeouts,
    "options": Options,
}
_PARAMETERS = {field.name: name for name, kind in _KINDS.items() for field in fields(kind)}


def arguments(flat: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a Checkpointer.

    Args:
        flat: arguments of a Checkpointer, and fields of its arguments that are objects: `jobs` and
            `directory` for `staging`, `on_error` for `options`. So a test sets one field, and its
            builder sets the other fields of the same object.
    """
    fields_given: dict[str, Any] = {}
    objects: dict[str, dict[str, Any]] = {}
    for name, value in flat.items():
        if name in _PARAMETERS:
            objects.setdefault(_PARAMETERS[name], {})[name] = value
        else:
            fields_given[name] = value
    assert not fields_given.keys() & objects.keys(), "an object, and fields of it"
    return fields_given | {name: _KINDS[name](**fields) for name, fields in objects.items()}
