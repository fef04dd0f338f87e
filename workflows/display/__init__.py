"""What the workflow shows of a task: its document, its details in the Web UI and the result of its query."""
