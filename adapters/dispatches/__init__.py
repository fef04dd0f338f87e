"""Storage for external workers: dispatch records (`record`, `store`), and the batches that nodes pull (`inputs`)."""
