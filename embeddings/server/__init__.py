"""Homes of rows in server processes, on this machine or on others (BagPipe, SOSP 2023).

A trainer's cache sees one `Home`. Behind it, each table's rows are divided over servers.

Read the modules in this order: `transport.py` (what a call to a server is), `messages.py` (the
calls of trainers), `server.py` (answers them, and does each write once), `placement.py` (which
server has a row), `links.py` (calls all servers), `placed_rows.py` (a table on all servers),
`calls.py` (what a home does about its servers: it calls once), `home.py` (one home of several
servers), `rank_agreement.py` (what rank 0 tells the other ranks), `all_messages.py`, `stream.py`
and `tcp.py` (the calls over TCP), `receive_buffers.py` (the memory of requests), `process.py` (one
server in a process of its own) and `processes.py` (starts such processes, and starts them again).
`served_part.py` has servers stage their rows of a checkpoint, and `part_stager.py` does that in a
server.

With parity (`../parity/`): `parity_messages.py` has the calls of the leader and of other servers,
and `parity_calls.py` answers them. `protection.py` gives a server's part in parity threads and
connections, `tcp_peer.py` calls other servers, `led_server.py` calls a server for the leader, and
`until_successor.py` repeats calls until the successor of a lost server answers.
`checked_stripes.py` compares rows with their parity. `protected_home.py` makes homes, with parity
or without.

On a Ray cluster: `ray_home.py` makes the home, `ray_cluster.py` places, finds and ends the
servers, `ray_head.py` watches the cluster's head, and `ray_transport.py` holds a server in an
actor. Only these import Ray.
"""
