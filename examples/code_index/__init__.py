"""The demo of FlowKit: four roles read a tree of Python source and rank its packages by complexity."""
