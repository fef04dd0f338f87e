"""The only code that speaks Kafka: it drives external workers."""
