"""Workflow code: the `Task` workflow, and the rules by which it runs the nodes of a graph.

`task` is the workflow. It opens the task (`opening`), keeps the nodes running (`running_nodes`) in the order that
`scheduler` decides, and closes the task. `node` and `retry` are the life of one node. `task_document` mirrors the task
in MongoDB, and `current_details` shows it in Temporal's Web UI. A module that calls itself pure decides and formats
only: it uses neither Temporal's API nor I/O nor a clock.

The glossary (docs/glossary.md) defines the terms, such as epoch, gate, loss and yield.
"""
