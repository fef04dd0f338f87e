"""Eight nodes that audit a folder of Markdown pages: see README.md."""
