"""What travels between an engine and workers behind Kafka: kinds, messages, ids."""
