"""The only code that speaks MongoDB."""
