"""Defines the command line: what each command reads, prints and returns."""

from __future__ import annotations

from recpoint.cli.application import app

__all__ = ["app"]
