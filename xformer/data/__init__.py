"""Token ids in batches, sentence pairs and chunks of text; audio."""
