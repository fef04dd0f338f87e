"""What every part may use: logging, time, JSON and hashes, settings."""
