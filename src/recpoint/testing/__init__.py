"""Provides a contract suite, planned faults and a server to test stores and training jobs."""

from __future__ import annotations

__all__: list[str] = []
