"""Shared utilities: logging, clocks, event loops, JSON, hashes and settings."""
