"""Token ids in batches, sentence pairs and chunks of text; audio and images; synthetic tasks."""
