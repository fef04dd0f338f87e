"""Code that all executors of attempts share: the first and last writes of an attempt, and its failures."""
