"""The only code that speaks Kafka: external workers will be driven from here."""
