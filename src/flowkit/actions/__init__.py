"""The actions by which operators steer a task: one row each in `table`, and the rules behind them. Pure."""
