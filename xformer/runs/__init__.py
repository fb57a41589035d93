"""A training run on disk: recipe, configuration, directory, checkpoints."""
