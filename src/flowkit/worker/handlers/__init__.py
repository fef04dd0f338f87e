"""Public import path for handlers."""
