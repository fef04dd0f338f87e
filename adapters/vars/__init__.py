"""A task's variables: operations, their rules, and their storage in MongoDB."""
