"""The concurrency limits: which attempts hold a slot, and which wait for one."""
