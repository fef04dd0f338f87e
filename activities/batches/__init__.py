"""Where an attempt's batches come from: the handler, or the artifacts of other nodes."""
