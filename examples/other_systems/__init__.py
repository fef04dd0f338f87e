"""One pipeline in six systems: see docs/from-other-systems.md."""
