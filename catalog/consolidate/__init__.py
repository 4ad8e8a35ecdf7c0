"""Shortens a chain by moving stored rows into one more manifest.

A checkpoint comes in, a manifest that replaces none goes out. Walk: `plan` (what to merge, and
whether it pays), `merge` (the whole way to the commit), `moves` (rows from chunks into chunks).
"""
