"""Input adapters, which read the batches of other nodes."""
