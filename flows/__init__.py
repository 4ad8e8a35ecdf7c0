"""Holds the Prefect flows, one per file, the automations, and the agent of a host.

Deployments in `prefect.yaml` and the agent call flows; flows call tasks. Walk: `persist`,
`consolidate`, `retain`, `sweep`, `validate`, `restore`, `publish`, `publish_to`, `forget`;
`parameters` and `task_runner`, which the flows share; `automations` with `silences` and
`recipients`; `prefect_server` with `prefect_server_process` (a local server); `agent` with
`repeated_lines` (Prefect's log lines that it leaves out); `drain` (an agent that ends when nothing
is left).
"""
