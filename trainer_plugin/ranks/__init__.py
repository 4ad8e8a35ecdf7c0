"""Lets the processes that train one model take and restore one checkpoint together.

Walk: `ranks` (how they talk, and end at one batch), `sharding` (who stores which rows and
pieces), `agreement` (what they agree on around a cut), `termination` (SIGTERM).
"""
