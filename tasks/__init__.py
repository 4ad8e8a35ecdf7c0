"""Holds the Prefect tasks, a file for each flow: one call, with retries and a report.

Flows call them; each calls the catalog once, or the publisher of a sink. `reports` is what all of
them tell Prefect.
"""
