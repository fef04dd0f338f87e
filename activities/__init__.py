"""What workflows call: opening and closing tasks, running role handlers and coordinator functions."""
