"""Pictures of graphs: as text, Mermaid, DOT, SVG and PNG, with the states of their nodes."""
