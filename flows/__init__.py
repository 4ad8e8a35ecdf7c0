"""Prefect flows, and the agent that runs them."""
