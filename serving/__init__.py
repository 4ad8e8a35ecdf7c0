"""What runs inside a serving process. Never imports Prefect, nor what trains."""
