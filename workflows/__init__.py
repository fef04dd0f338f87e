"""Durable code: the Task workflow, the scheduler of one node, and the pure rules behind them."""
