"""Storage adapters: the only code in FlowKit that calls MongoDB."""
