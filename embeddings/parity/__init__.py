"""Parity of rows on embedding servers: a server is lost, and its rows are computed from the others.

The scheme is that of ECRM (arXiv 2104.01981), with exact bits. `docs/understanding/parity.md`
describes the protocol.

Read the modules in this order: `stripes.py` (which rows share parity, and where that is),
`differences.py` (what a server sends when rows change, and what the receiver remembers of it),
`peers.py` (the calls between servers), `own_tables.py` (which rows of a table a server has, and has
lost), `own_rows.py` (these rows in the server's home), `other_servers.py` (sends differences, and
applies those of others), `gathering.py` (what members of stripes are computed from the others),
`stripe_check.py` (whether members of a stripe fit each other), `member.py` (a server's part in all
this: it keeps parity up to date), `recover.py` (a successor recovers what it has lost),
`frozen_while_lost.py` (what a checkpoint reads meanwhile), `replacement.py` (puts successors in the
places of lost servers) and `leader.py` (notices losses, and has servers replaced).
Nothing here knows a network or a process.
"""
