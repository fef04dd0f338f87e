"""The decisions of the bridge, as pure functions: they use neither Kafka nor Temporal nor MongoDB."""
