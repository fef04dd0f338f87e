"""The bridge: lets external workers, which use Kafka, run the attempts of their roles. Only this package uses Kafka.

The modules in the order in which an attempt passes through them:

1. `service` is the `Bridge`. It starts a `role_service` for each role, which polls the role's task queue in Temporal.
2. `dispatcher` is the activity of an attempt. It stores a dispatch record and sends a command (`placement` chooses the
   partition, `command_sender` sends), then leaves the activity open. `pulled_inputs` prepares nodes that pull.
3. `supervisor` sends the activity's heartbeats, and checks each attempt twice a second (`attempt_checks`): its cancel,
   time limit and lease, and whether a worker has accepted its command (`command_watch`).
4. `status` processes what the workers report (`renewals` extends their leases), and `announcements` what they
   announce. `signals` asks them to stop.
5. `delivery` writes the outcome to MongoDB and completes the activity.

`measurements`, `shown_waits` and `event_log` inform operators only. The decisions are in `rules`. H1 to H34 are the
hazards in docs/protocol.md, which defines the terms of the protocol as well; docs/glossary.md defines all others.
"""
