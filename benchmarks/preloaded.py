"""Imports what the processes of benchmarks need, before they are forked (`benchmarks.forked`)."""

from __future__ import annotations

import os

# torch reads it once. Ranks that are ended while others wait for them would fill the screen.
os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"

import torch._dynamo  # noqa: E402, F401  (the first optimizer imports it)

import recpoint.catalog.persist.persist  # noqa: E402
import recpoint.trainer_plugin.checkpointer  # noqa: E402, F401
