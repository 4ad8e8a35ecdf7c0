"""Tests stores and training jobs: a contract suite for stores, planned faults, an S3 server."""

from __future__ import annotations

__all__: list[str] = []
