"""A local Kafka broker, for external workers and their tests."""

from flowkit.local.kafka.security import BrokerSecurity, BrokerTls, SaslMechanism
from flowkit.local.kafka.server import Kafka

__all__ = ["BrokerSecurity", "BrokerTls", "Kafka", "SaslMechanism"]
