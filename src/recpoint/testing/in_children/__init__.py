"""Holds a `sitecustomize`, which every Python that starts with this on PYTHONPATH imports."""

from __future__ import annotations

__all__: list[str] = []
