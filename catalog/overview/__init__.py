"""Describes a run from its catalog alone, for pages, commands and metrics.

A run comes in, figures and troubles go out. Walk: `overview` (one look), `troubles` (what is
wrong with a run), `watch` (looks again and again, reading only what is new).
"""
