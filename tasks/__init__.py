"""Prefect tasks of the agent: one a file, each a catalog call with retries and time-outs."""
