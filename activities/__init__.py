"""The Temporal activities: they open and close tasks, and run role handlers and coordinator functions."""
