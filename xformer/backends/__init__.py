"""Array libraries behind one interface: namespaces, dtypes, devices, and what the Array API standard leaves open.

Everything else in xformer is written against the standard: `xp = array_namespace(x)`, then `xp.exp(x)`. All facts about
a single library are in the module with its name (numpy, cupy, torch, jax, array_api_strict, mlx, ndonnx), as
a `Backend`.
"""

from xformer.backends.array_types import Array, Device, DType, Namespace, NativeArray
from xformer.backends.arrays import (
    as_array,
    assign,
    call_on_host,
    check_range,
    check_same_device,
    default_float,
    device,
    dtype_named,
    from_host,
    index_dtype,
    is_host_accessible,
    is_writable,
    to_host,
    to_host_together,
    to_library_of,
)
from xformer.backends.backend import Backend, backend_of
from xformer.backends.dtypes import accumulation_dtype, dtype_name, is_floating, is_half_precision, is_integer
from xformer.backends.namespaces import (
    BACKENDS,
    array_namespace,
    backend_name,
    base_namespace,
    is_trace,
    resolve,
    resolve_known,
    trace_level,
)

__all__ = [
    "BACKENDS",
    "Array",
    "Backend",
    "DType",
    "Device",
    "Namespace",
    "NativeArray",
    "accumulation_dtype",
    "array_namespace",
    "as_array",
    "assign",
    "backend_name",
    "backend_of",
    "base_namespace",
    "call_on_host",
    "check_range",
    "check_same_device",
    "default_float",
    "device",
    "dtype_name",
    "dtype_named",
    "from_host",
    "index_dtype",
    "is_floating",
    "is_half_precision",
    "is_host_accessible",
    "is_integer",
    "is_trace",
    "is_writable",
    "resolve",
    "resolve_known",
    "to_host",
    "to_host_together",
    "to_library_of",
    "trace_level",
]
