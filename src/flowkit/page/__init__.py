"""The page: a live view of tasks and their graphs in a browser, with the actions of operators."""
