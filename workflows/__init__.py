"""Workflow code: the `Task` workflow, the execution of one node, and the pure scheduling rules they use."""
