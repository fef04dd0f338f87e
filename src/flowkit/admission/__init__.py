"""Admission: a durable queue in front of tasks and outside executors, with priorities and limits for each user."""
