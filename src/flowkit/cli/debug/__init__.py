"""`flowkit debug`, which runs the handler of a node in this process and stores nothing."""
