"""Kafka clients of the bridge: topics, offsets, sending and consuming."""
