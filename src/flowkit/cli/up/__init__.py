"""`flowkit up`: servers, an engine and workers in one terminal."""
