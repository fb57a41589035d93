"""Token ids in batches: sentence pairs and windows of text."""
