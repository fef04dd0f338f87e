"""The HTML report: read elsewhere, made here out of data alone."""
