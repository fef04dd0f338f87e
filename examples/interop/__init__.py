"""An interoperability check: external workers from any environment run nodes of FlowKit tasks."""
