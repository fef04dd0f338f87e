"""The engine: Temporal workers that run tasks, and the sweep that closes documents of lost tasks."""
