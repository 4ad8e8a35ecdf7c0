"""Shows people and monitoring systems what runs look like.

Overviews come in, a page, tables, metrics and a demo go out. Walk: `texts` (words for figures),
`terminal`, `lag` (the table of `recpoint lag`), `page`, `watched_runs` and `catalog_watch` (reading
in the background), `metrics`, `alert_rules`, `demo`.
"""
