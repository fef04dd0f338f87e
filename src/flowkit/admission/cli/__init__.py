"""The commands of the admission queue."""
