"""The engine: Temporal workers that run tasks, and the sweep that closes the documents of lost tasks."""
