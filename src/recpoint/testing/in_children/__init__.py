"""Holds a `sitecustomize` that every Python imports at its start if this folder is on its path."""

from __future__ import annotations

__all__: list[str] = []
