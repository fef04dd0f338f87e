"""The gateway: flows and jobs by JSON-RPC, whose nodes remote supervisors run."""
