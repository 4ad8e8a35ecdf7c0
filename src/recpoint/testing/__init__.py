"""Tests stores, homes and training jobs: contract suites, planned faults, an S3 server."""

from __future__ import annotations

__all__: list[str] = []
