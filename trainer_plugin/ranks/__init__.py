"""Lets the processes that train one model take and restore one checkpoint together.

Read the modules in this order: `ranks` (how they communicate, and end at one batch), `sharding`
(which rank stores which rows and pieces), `agreement` (what they agree on before and after a cut)
and `termination` (SIGTERM).
"""
