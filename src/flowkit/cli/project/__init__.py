"""`flowkit init`: new projects and their templates."""
