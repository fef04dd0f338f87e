"""Take the screenshots of the Web UI in docs/img, from real tasks on real servers."""
