"""Workflow code: the `Task` workflow, and the rules by which it runs the nodes of a graph.

To learn how a task runs, read these modules in this order:

1. `task` is the workflow: it opens the task (`opening`), runs its main loop, and closes the task.
2. `scheduler` decides which nodes may start, and which are skipped.
3. `running_nodes` runs each of these nodes as an asyncio task. The tasks share a `node_context`, with its `slots`.
4. `node` runs the attempts of one node as activities, and `retry` decides what follows each attempt.

The other modules support these. `task_document` mirrors the task in MongoDB (`document_activities`, `reports`).
`current_details` shows it in Temporal's Web UI (`details_markdown`, `summaries`, `views`). `state_codec`
encodes the state for the next run of the workflow (continue-as-new). `budget` keeps payloads within byte limits,
`payloads` shortens the input of activities, and `interceptor` rejects several inputs and supplies the current details.

"Pure" in the first line of a module means that its code decides and formats only. It may change the state that a caller
passes, but uses neither Temporal's API nor I/O nor a clock. The glossary (docs/glossary.md) defines the terms, such as
epoch, loss and yield; `scheduler` defines gate.
"""
