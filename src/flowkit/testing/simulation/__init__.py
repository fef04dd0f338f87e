"""Runs a task in this process with the Task workflow itself, in place of Temporal's server.

* `clock` is the time of the task. It passes only while everything waits for it.
* `server` does for one workflow what Temporal's server does: it runs the timers and activities that the workflow
  schedules, and hands over how they end. `messages` has the form of what the two exchange.
* `steering` is how a test acts on the task while it runs.
"""
