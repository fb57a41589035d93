"""The derivatives of the standard's functions, one file per family. Importing this package registers them."""

from xformer.tracing.rules import elementwise, fourier, indexing, linear_algebra, manipulation, reductions
from xformer.tracing.rules import special as special

__all__ = ["elementwise", "fourier", "indexing", "linear_algebra", "manipulation", "reductions", "special"]
