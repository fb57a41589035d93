"""A small package that uses xformer as a library, without casts and ignored errors.

`nox -s types` checks it by `mypy --strict` and pyright. `assert_type` fails where a type becomes `Any`.
"""
