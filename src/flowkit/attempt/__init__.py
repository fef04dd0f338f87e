"""What every executor of an attempt shares: its first and last writes, and how its failures are reported."""
