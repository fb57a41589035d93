"""The `xformer` command: one file for each command."""
