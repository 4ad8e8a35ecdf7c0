"""The first thing that the server of `tests.forked` imports: until its last, nothing is garbage."""

from __future__ import annotations

import gc

gc.disable()
