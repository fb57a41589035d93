"""The derivatives of the standard's functions, one file per family. Importing this package registers them."""

from xformer.tracing.rules import elementwise, linear_algebra, manipulation

__all__ = ["elementwise", "linear_algebra", "manipulation"]
