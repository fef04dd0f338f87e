"""The `tasks` collection: documents of tasks and the writes that change them."""
