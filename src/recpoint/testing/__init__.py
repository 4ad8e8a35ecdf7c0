"""What a store's author, or a test of a training job, needs: a contract suite, faults, a server."""

from __future__ import annotations

__all__: list[str] = []
