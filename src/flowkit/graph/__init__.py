"""Parsing and validation of graphs and task inputs. Pure: no Temporal, no I/O."""
