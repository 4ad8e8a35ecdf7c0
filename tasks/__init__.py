"""Holds the Prefect tasks, a file for each flow: a call of the catalog, with retries and a report.

Flows call them; each calls the catalog once. `reports` is what all of them tell Prefect.
"""
