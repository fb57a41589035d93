"""Array libraries behind one interface: namespaces, dtypes, devices, and what the Array API standard leaves open.

Everything else in xformer is written against the standard: `xp = array_namespace(x)`, then `xp.exp(x)`. The namespace
is a `Library`, which also answers what xformer asks about its arrays. All facts about a single library are in the
module with its name (numpy, cupy, torch, jax), those of small adaptations at the end of `library`.
"""

from xformer.backends.array_types import Array, ArrayNamespace, Device, DType, Namespace, NativeArray
from xformer.backends.arrays import (
    as_array,
    assign,
    check_same_device,
    device,
    from_host,
    to_host,
    to_host_together,
    to_library_of,
)
from xformer.backends.dtypes import (
    accumulation_dtype,
    dtype_name,
    is_complex,
    is_floating,
    is_half_precision,
    is_inexact,
    is_integer,
)
from xformer.backends.library import BACKENDS, Library, array_namespace, resolve, resolve_known
from xformer.errors import explain_moved_names as _explain_moved_names

_explain_moved_names(__name__)

__all__ = [
    "BACKENDS", "Array", "ArrayNamespace", "DType", "Device", "Library", "Namespace", "NativeArray",
    "accumulation_dtype", "array_namespace", "as_array", "assign", "check_same_device", "device", "dtype_name",
    "from_host", "is_complex", "is_floating", "is_half_precision", "is_inexact", "is_integer", "resolve",
    "resolve_known", "to_host", "to_host_together", "to_library_of",
]  # fmt: skip
