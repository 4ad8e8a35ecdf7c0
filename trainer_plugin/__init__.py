"""Inside the training process: tracking, snapshot, hand-over, restore. Never imports prefect."""
