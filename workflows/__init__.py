"""Workflow code: the `Task` workflow, and the rules by which it runs the nodes of a graph.

To learn how a task runs, read these modules in this order:

1. `task` is the workflow: it opens the task (`opening`), runs the main loop, and closes the task or continues it in a
   new run.
2. `scheduling.scheduler` decides which nodes may start, and which are skipped.
3. `node` runs each of these nodes as an asyncio task, and their attempts as activities, for which it needs `slots`.
   `retry` decides what follows each attempt. `local_attempts` runs some attempts inside the engine.

The other modules support these. `document` mirrors the task in MongoDB, by means of `engine_calls`.
`evaluations` lets the engine evaluate conditions. `deadlines` ends what takes too long. `display` shows the
task in Temporal's Web UI and in the query `status`. `state_codec` encodes the state for the next run of the
workflow (continue-as-new), `payloads` keeps payloads small, and `interceptor` rejects several inputs and
supplies the current details.

"Pure" in the first line of a module means that its code decides and formats only. It may change the state that a caller
passes, but uses neither Temporal's API nor I/O nor a clock. The glossary (docs/glossary.md) defines the terms, such as
epoch, loss and yield; `scheduler` defines gate.
"""
