"""Stops garbage collection, as the first import of the server of `tests.forked`."""

from __future__ import annotations

import gc

gc.disable()
