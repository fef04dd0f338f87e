"""The bridge: lets external workers, which use Kafka, run the attempts of their roles. Only this package uses Kafka.

The modules in the order in which an attempt passes through them:

1. `service` is the `Bridge`. For each role, it polls the role's task queue in Temporal.
2. `dispatcher` is the activity of an attempt. It stores a dispatch record and sends a command, which `commands` watches
   until a worker accepts it, then leaves the activity open. `pulled_inputs` prepares nodes that pull.
3. `supervisor` sends the activity's heartbeats, and checks each attempt twice a second: its cancel, time limit and
   lease, and whether a worker has accepted its command.
4. `status` processes what the workers report, and `announcements` what they announce. `signals` asks them to stop.
5. `delivery` reports the first batch and the outcome of an attempt to Temporal.

The parts share a `context`. The decisions are in `rules`. H1 to H34 are the hazards in docs/protocol.md, which defines
the terms of the protocol as well; docs/glossary.md defines all others.
"""
