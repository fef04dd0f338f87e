"""The commands of the gateway."""
