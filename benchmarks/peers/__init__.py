"""The same work in other engines: DBOS and Prefect, from the optional dependency group `peers`."""
