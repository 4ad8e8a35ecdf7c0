"""Homes of rows: where rows of embedding tables live while no trainer holds them in its cache.

Read the modules in this order: `contract.py` (what a home does), `forms.py` (the tables of a home),
`memory.py` (a home in memory), `directory.py`, `log.py` and `files.py` (a home in files),
`homes.py` (makes them), `initial.py` (first values of rows), `ranks.py` (which rank this is) and
`channel.py` (carries bytes between ranks).
"""
