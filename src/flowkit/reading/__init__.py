"""What people see of tasks: their state, attempts, results and batches, from Temporal and MongoDB together."""
