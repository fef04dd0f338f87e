"""Shared utilities: logging, clocks, JSON, hashes and settings."""
