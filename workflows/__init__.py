"""Durable code: the Task workflow, the walk of one node, and the pure rules behind them."""
