"""The engine's part of the limits across tasks: it grants slots, and frees slots that nothing uses any more."""
