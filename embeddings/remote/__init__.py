"""Homes of rows in server processes, on this machine or on others (BagPipe, SOSP 2023).

A trainer's cache sees one `Home`. Behind it, each table's rows are divided over servers.

`transport.py` is the interface of a server. `server.py` implements it in the server's process.
Others implement it in the trainer's process, and pass each call on.
"""
