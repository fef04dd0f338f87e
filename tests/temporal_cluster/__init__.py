"""A cluster of Temporal on PostgreSQL: the server's services as processes of their own, as users run them."""
