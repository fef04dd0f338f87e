"""Dispatch records of external attempts, and the claims of external workers."""
