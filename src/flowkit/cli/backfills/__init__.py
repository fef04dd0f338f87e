"""The commands of backfills."""
