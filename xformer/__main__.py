"""`python -m xformer` is the xformer command."""

from __future__ import annotations

from xformer.cli.main import run

if __name__ == "__main__":
    run()
