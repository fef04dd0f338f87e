"""Commands that delete or close the documents of old tasks."""
