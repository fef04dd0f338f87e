"""The limits across tasks: which attempts hold a slot, and which wait for one."""
