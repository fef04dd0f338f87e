"""The commands of schedules."""
