"""The `xformer` command: one file a command."""
