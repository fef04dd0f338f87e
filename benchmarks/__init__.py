"""Measures what FlowKit costs beside a hand-written workflow. Not part of the distribution."""
