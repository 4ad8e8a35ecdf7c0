"""Whether metrics can be exported here."""

from __future__ import annotations

from importlib.util import find_spec

from recpoint.errors import SettingsError

__all__ = ["require_prometheus"]


def require_prometheus(what: str) -> None:
    """Raise SettingsError if prometheus_client is not installed; `what` needs it."""
    if find_spec("prometheus_client") is None:
        raise SettingsError(
            what,
            found="no prometheus_client installed",
            expected="prometheus_client",
            next_step="pip install 'recpoint[metrics]'",
        )
