"""The sources of an attempt's batches: its handler, or the artifacts of other nodes."""
