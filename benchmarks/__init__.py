"""The benchmark: compares FlowKit with a hand-written workflow. Not part of the distribution."""
