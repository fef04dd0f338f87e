"""The collection `tasks`: task documents and the writes that change them."""
