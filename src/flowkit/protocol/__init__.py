"""The protocol between an engine and external Kafka workers: kinds, messages and ids."""
