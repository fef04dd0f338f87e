"""Programs that measure the code and the tests."""
