"""Kept for compatibility; contains only a removed class."""
