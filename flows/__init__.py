"""Holds the Prefect flows, one a file, the automations, and the agent of a host.

Deployments in `prefect.yaml` and the agent call flows, flows call tasks. Walk: `persist`,
`consolidate`, `retain`, `sweep`, `validate`, `restore`, `publish`, `forget`; `parameters` and
`task_runner`, which they share; `automations`; `prefect_server` with `prefect_server_process` (a
local one); `agent`; `drain` (an agent that ends when nothing is left).
"""
