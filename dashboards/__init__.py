"""Shows people and monitoring systems what runs look like.

The package turns overviews of runs into a page, tables and metrics, and contains the demo. Walk:
`texts`, `server_texts`, `sink_texts` and `loss_texts` (words for figures), `terminal`, `lag` (the
table of `recpoint lag`), `page`, `watched_runs`, `watched_sinks` and `catalog_watch` (reading in
the background), `metrics`, `alert_rules`, `demo`.
"""
