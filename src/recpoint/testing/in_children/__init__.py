"""A directory for PYTHONPATH: its `sitecustomize` is imported by every Python that starts."""

from __future__ import annotations

__all__: list[str] = []
