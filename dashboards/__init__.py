"""What people look at: tables in a terminal, and the demo."""
