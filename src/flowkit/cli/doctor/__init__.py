"""`flowkit doctor`: checks of servers, programs and this machine."""
