"""The decisions of the bridge, without Kafka, Temporal and MongoDB."""
