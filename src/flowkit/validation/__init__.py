"""Validation of values that users give: which values are valid, and what the errors about others say."""
