"""Handlers of roles."""
