"""What processes of FlowKit measure, and the lines of handlers."""
