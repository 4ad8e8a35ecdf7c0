"""Makes a child process count its durable steps and die at one, as its environment says."""

from __future__ import annotations

from recpoint.testing.die_at import install_from_environment

__all__: list[str] = []

install_from_environment()
