"""Why checkpoints fail, in a few classes that can be counted and alerted on.

The classes are few and fixed, so that they can be the values of a metric's label; the message says
the rest.
"""

from __future__ import annotations

from typing import Final

from recpoint import errors

__all__ = ["CAUSES", "cause_of", "cause_of_name"]

#: Most specific class first.
_BY_CLASS: Final[tuple[tuple[type[BaseException], str], ...]] = (
    (errors.StoreUnavailable, "store_unavailable"),
    (errors.StoreThrottled, "store_throttled"),
    (errors.StoreAccessDenied, "store_denied"),
    (errors.StoreFull, "store_full"),
    (errors.StoreError, "store"),
    (errors.NothingToRestore, "run_missing"),
    (errors.StagingFull, "staging_full"),
    (errors.StagingError, "staging"),
    (errors.FormatError, "damaged"),
    (errors.ChainError, "chain_broken"),
    (errors.CommitError, "superseded"),
    (errors.CheckpointCancelled, "cancelled"),
    (MemoryError, "memory"),
    (OSError, "host"),
)
_OTHER: Final = "other"

#: Every value that there is.
CAUSES: Final = (*(cause for _, cause in _BY_CLASS), _OTHER)


def cause_of(error: BaseException) -> str:
    """The class that `error` counts in."""
    return _cause(type(error))


def cause_of_name(error_type: str) -> str:
    """As `cause_of`, of the name of an exception class of recpoint's, as outcomes have it."""
    found = getattr(errors, error_type, None) if error_type in errors.__all__ else None
    return _cause(found) if isinstance(found, type) else _OTHER


def _cause(kind: type[BaseException]) -> str:
    return next((cause for base, cause in _BY_CLASS if issubclass(kind, base)), _OTHER)
