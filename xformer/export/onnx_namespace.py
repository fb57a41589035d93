"""A trace of a model as an ONNX graph: an Array API namespace whose functions append nodes.

Its arrays are traced ones, as in a derivative and in `jit`, but without values: a model whose parameters are arrays of
this namespace does not compute, its forward code writes the graph. A size that
may differ between calls is a `Dim`, an integer that also knows how to compute it from the shapes of the inputs. Its
value as an integer is the largest one that the graph supports, so that tables of positions get enough rows.
"""

from __future__ import annotations

import math
import operator
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import spox
import spox.opset.ai.onnx.v20 as op
from onnx import numpy_helper
from spox import Tensor, Var, argument

from xformer.backends.array_types import Array, Device, DType
from xformer.backends.library import Library, Table, compute
from xformer.errors import BackendError
from xformer.ops import Kernel, register
from xformer.ops.activations import QUICK
from xformer.tracing.tracer import Tracer

# --- sizes ------------------------------------------------------------------------------------------------------------


Known = dict[tuple[int, ...], "Dim"]
_NUM_POINTS = 16


def _operator(sign: str, function: Callable[[int, int], int], node: Callable[[Var, Var], Var]) -> Any:
    """Return the two methods of an operator of sizes, given its function of integers and its node."""

    def combine(first: Any, second: Any) -> int:
        known = (first if isinstance(first, Dim) else second).known
        values = tuple(map(function, _values(first), _values(second)))
        name = f"{_name(first)} {sign} {_name(second)}"
        return Dim.of(values, name, known, lambda: node(_vector([first]), _vector([second])))

    return combine, lambda self, other: combine(other, self)


class Dim(int):
    """A size that depends on the inputs; as an integer it is the largest one.

    Sizes that are equal for all inputs are one object: they are found by their values at random sizes of the inputs.

    Attributes:
        values: These values; the first is the largest one.
        name: Name of a size of the inputs, or a readable expression, e.g. "past + length".
        known: All sizes of the graph by their values.
        compute: Function that returns the size as integers (1,) in the graph.
    """

    values: tuple[int, ...]
    name: str
    known: Known
    compute: Callable[[], Var]

    @classmethod
    def of(cls, values: tuple[int, ...], name: str, known: Known, compute: Callable[[], Var]) -> int:
        """Return the size with these values; a plain integer if it does not depend on the inputs."""
        if len(set(values)) == 1:
            return values[0]
        if values not in known:
            known[values] = dim = cls(values[0])
            dim.values, dim.name, dim.known, dim.compute = values, name, known, cache(compute)
        return known[values]

    __add__, __radd__ = _operator("+", operator.add, op.add)
    __sub__, __rsub__ = _operator("-", operator.sub, op.sub)
    __mul__, __rmul__ = _operator("*", operator.mul, op.mul)
    __mod__, __rmod__ = _operator("%", operator.mod, op.mod)
    # ONNX rounds toward zero, which is the same for sizes, since they are not negative.
    __floordiv__, __rfloordiv__ = _operator("//", operator.floordiv, op.div)

    def __neg__(self) -> Any:
        return self * -1


def _values(value: int) -> tuple[int, ...]:
    return value.values if isinstance(value, Dim) else (int(value),) * (1 + _NUM_POINTS)


def _name(value: int) -> str:
    """Return the name of an operand."""
    if not isinstance(value, Dim):
        return str(value)
    return f"({value.name})" if " " in value.name else value.name


def _equal(first: int, second: int) -> bool:
    return first is second if isinstance(first, Dim) or isinstance(second, Dim) else first == second


def _vector(shape: Sequence[int]) -> Var:
    """Return sizes as integers (len(shape),) in the graph."""
    if not any(isinstance(value, Dim) for value in shape):
        return op.const(np.asarray(shape, dtype=np.int64))
    parts = [value.compute() if isinstance(value, Dim) else _vector([value]) for value in shape]
    return parts[0] if len(parts) == 1 else op.concat(parts, axis=0)


# --- arrays -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Value:
    """A value of an ONNX graph: what a traced array holds here.

    Attributes:
        var: The value.
        shape: Sizes, `Dim`s or integers.
        dtype: NumPy dtype.
        base: The traced matrix that this matrix is the transpose of, or None.
    """

    var: Var
    shape: tuple[int, ...]
    dtype: Any
    base: Tracer | None = None
    device: Device = None

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)


def traced(var: Var, shape: Sequence[int], dtype: Any, base: Tracer | None = None) -> Tracer:
    """Return a value of the graph as a traced array."""
    return Tracer(_Value(var, tuple(shape), np.dtype(dtype), base), NAMESPACE, 0)


def var_of(x: Tracer) -> Var:
    """Return the value of a traced array in the graph."""
    return x._value.var


def _sliced(x: Tracer, axis: int, part: slice) -> Tracer:
    length, step = x.shape[axis], 1 if part.step is None else part.step
    start = 0 if part.start is None else part.start
    stop = length if part.stop is None else part.stop
    start = start + length if start < 0 else start
    stop = stop + length if stop < 0 else stop
    if not isinstance(length, Dim) and not isinstance(stop, Dim):
        stop = min(stop, length)
    if _equal(start, 0) and _equal(stop, length) and step == 1:
        return x
    size = stop - start if step == 1 else (stop - start + (step - 1)) // step
    bounds = map(_vector, ([start], [stop], [axis], [step]))
    return traced(op.slice(var_of(x), *bounds), (*x.shape[:axis], size, *x.shape[axis + 1 :]), x.dtype)


def _call(function: Callable[..., Var], *operands: Any, dtype: Any = None, shapes: Sequence[Any] = ()) -> Tracer:
    """Apply an elementwise function to arrays and Python numbers."""
    arrays = [x for x in operands if type(x) is Tracer]
    common = np.result_type(*(x.dtype for x in arrays))
    shape = _broadcast([*shapes, *(x.shape for x in arrays)])
    return traced(function(*(_number(x, common) for x in operands)), shape, common if dtype is None else dtype)


def _number(x: Any, dtype: Any) -> Var:
    """Return an array or a number in a dtype."""
    return var_of(NAMESPACE.asarray(x, dtype=dtype))


def _broadcast(shapes: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return the common shape; sizes that may differ when the graph runs are an error."""
    result = []
    for axis in range(-max(map(len, shapes)), 0):
        sizes = [shape[axis] for shape in shapes if len(shape) >= -axis and not _equal(shape[axis], 1)]
        if any(not _equal(other, sizes[0]) for other in sizes):
            raise BackendError(f"shapes {', '.join(map(str, shapes))} differ in an ONNX graph; expected equal sizes")
        result.append(sizes[0] if sizes else 1)
    return tuple(result)


# --- functions --------------------------------------------------------------------------------------------------------


def _elementwise(function: Callable[[Var], Var], x: Tracer) -> Tracer:
    return traced(function(var_of(x)), x.shape, x.dtype)


def _unary(function: Callable[[Var], Var]) -> Callable[..., Any]:
    return lambda self, x: _elementwise(function, x)


def _binary(function: Callable[..., Var], dtype: Any = None) -> Callable[..., Any]:
    return lambda self, first, second: _call(function, first, second, dtype=dtype)


def _reduction(function: Callable[..., Var]) -> Callable[..., Tracer]:
    def reduce(self: Any, x: Tracer, /, *, axis: Any = None, keepdims: bool = False, dtype: DType = None) -> Tracer:
        x = x if dtype is None else self.astype(x, dtype)
        axes = range(x.ndim) if axis is None else axis if isinstance(axis, tuple) else (axis,)
        reduced = sorted(index % x.ndim for index in axes)
        sizes = (1 if index in reduced else length for index, length in enumerate(x.shape))
        shape = [length for index, length in enumerate(sizes) if keepdims or index not in reduced]
        return traced(function(var_of(x), op.const(np.asarray(reduced)), keepdims=keepdims), shape, x.dtype)

    return reduce


class OnnxNamespace(Library, library="onnx"):
    """Functions of the Array API standard and operators, as many as models need, on traced arrays."""

    is_trace = True

    int8, int32, int64 = (np.dtype(name) for name in ("int8", "int32", "int64"))
    bool, float32, float64 = (np.dtype(name) for name in ("bool", "float32", "float64"))

    def __array_namespace_info__(self) -> Any:
        raise BackendError("the namespace of ONNX graphs has no inspection functions")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise BackendError(f"xp.{name} cannot be exported to ONNX; see xformer/export/onnx_namespace.py")

    def read(self, x: Tracer, use: str) -> Any:
        """Refuse: values are known when the graph runs."""
        raise BackendError(f"{use} reads a value of an ONNX graph while the graph is written; use functions of xp")

    def check_range(self, x: Array, size: int, check: Any) -> None:
        """Check nothing: onnxruntime raises an error for indices out of range."""

    def rows_of_table(self, table: Table, rows: slice, dtype: DType, device: Device) -> Array:
        """Let the whole table be a constant, so that the graph takes rows of any number."""
        return self.asarray(compute(table), dtype=dtype)[rows]

    # --- creation

    def asarray(self, x: Any, /, *, dtype: DType = None, device: Device = None, copy: Any = None) -> Tracer:
        """Return an array; a `Dim` becomes a scalar."""
        if isinstance(x, Dim):
            x = traced(op.squeeze(_vector([x]), op.const(np.asarray([0]))), (), np.int64)
        if type(x) is Tracer:
            return x if dtype is None else self.astype(x, dtype)
        host = np.asarray(x, dtype=dtype)
        return traced(op.const(host), host.shape, host.dtype)

    def arange(
        self, start: int, stop: int | None = None, step: int = 1, *, dtype: DType = None, device: Device = None
    ) -> Tracer:
        start, stop = (0, start) if stop is None else (start, stop)
        if not isinstance(start, Dim) and not isinstance(stop, Dim):
            return self.asarray(np.arange(start, stop, step, dtype=np.int64 if dtype is None else dtype))
        length = stop - start if step == 1 else (stop - start + (step - 1)) // step
        var = op.range(*(_number(x, np.int64) for x in (start, stop, step)))
        return self.astype(traced(var, (length,), np.int64), np.int64 if dtype is None else dtype)

    def full(self, shape: Any, value: Any, *, dtype: DType = None, device: Device = None) -> Tracer:
        return self.broadcast_to(self.asarray(value, dtype=np.float32 if dtype is None else dtype), shape)

    def zeros(self, shape: Any, *, dtype: DType = None, device: Device = None) -> Tracer:
        return self.full(shape, 0, dtype=dtype)

    def ones(self, shape: Any, *, dtype: DType = None, device: Device = None) -> Tracer:
        return self.full(shape, 1, dtype=dtype)

    def zeros_like(self, x: Tracer) -> Tracer:
        return self.zeros(x.shape, dtype=x.dtype)

    # --- elementwise

    abs, exp, log, sqrt = map(_unary, (op.abs, op.exp, op.log, op.sqrt))
    tanh, sin, cos, erf = map(_unary, (op.tanh, op.sin, op.cos, op.erf))
    operator_abs, operator_neg = abs, _unary(op.neg)
    logical_not = operator_invert = _unary(op.not_)
    logical_and = operator_and = _binary(op.and_)
    operator_or = _binary(op.or_)
    operator_add, operator_sub, operator_mul, operator_truediv, operator_pow = map(
        _binary, (op.add, op.sub, op.mul, op.div, op.pow)
    )
    add = operator_add
    operator_lt, operator_le, operator_gt, operator_ge, operator_eq = (
        _binary(function, np.bool_)
        for function in (op.less, op.less_or_equal, op.greater, op.greater_or_equal, op.equal)
    )

    def operator_floordiv(self, first: Any, second: Any) -> Tracer:
        return self.operator_truediv(self.operator_sub(first, self._remainder(first, second)), second)

    _remainder = _binary(op.mod)  # it has the sign of the divisor

    def operator_ne(self, first: Any, second: Any) -> Tracer:
        return self.logical_not(self.operator_eq(first, second))

    def where(self, condition: Tracer, first: Any, second: Any) -> Tracer:
        return _call(partial(op.where, var_of(condition)), first, second, shapes=[condition.shape])

    def clip(self, x: Tracer, min: Any = None, max: Any = None) -> Tracer:
        bounds = (None if bound is None else _number(bound, x.dtype) for bound in (min, max))
        return traced(op.clip(var_of(x), *bounds), x.shape, x.dtype)

    def astype(self, x: Tracer, dtype: DType, *, copy: Any = True) -> Tracer:
        dtype = np.dtype(dtype)
        return x if x.dtype == dtype else traced(op.cast(var_of(x), to=dtype), x.shape, dtype)

    # --- reductions

    sum, mean, max, min = map(_reduction, (op.reduce_sum, op.reduce_mean, op.reduce_max, op.reduce_min))

    def cumulative_sum(self, x: Tracer, *, axis: int) -> Tracer:
        return traced(op.cumsum(var_of(x), op.const(np.asarray(axis))), x.shape, x.dtype)

    # --- shapes

    def reshape(self, x: Tracer, shape: Sequence[int], *, copy: Any = None) -> Tracer:
        if -1 in shape:
            rest = math.prod(length for length in shape if not _equal(length, -1))
            shape = [x.size // rest if _equal(length, -1) else length for length in shape]
        if len(shape) == x.ndim and all(map(_equal, shape, x.shape)):
            return x
        # In a Reshape, 0 copies the size of the same axis, and -1 is the size that remains.
        sizes: list[int] = list(shape)
        for axis, (length, old) in enumerate(zip(shape, x.shape, strict=False)):
            if isinstance(length, Dim) and _equal(length, old):
                sizes[axis] = 0
        unknown = [axis for axis, length in enumerate(sizes) if isinstance(length, Dim)]
        if unknown:
            sizes[unknown[-1]] = -1
        return traced(op.reshape(var_of(x), _vector(sizes)), shape, x.dtype)

    def broadcast_to(self, x: Tracer, shape: Sequence[int]) -> Tracer:
        return traced(op.expand(var_of(x), _vector(shape)), shape, x.dtype)

    def expand_dims(self, x: Tracer, *, axis: int) -> Tracer:
        axis %= x.ndim + 1
        shape = (*x.shape[:axis], 1, *x.shape[axis:])
        return traced(op.unsqueeze(var_of(x), op.const(np.asarray([axis]))), shape, x.dtype)

    def squeeze(self, x: Tracer, axis: int) -> Tracer:
        axis %= x.ndim
        shape = (*x.shape[:axis], *x.shape[axis + 1 :])
        return traced(op.squeeze(var_of(x), op.const(np.asarray([axis]))), shape, x.dtype)

    def permute_dims(self, x: Tracer, axes: Sequence[int]) -> Tracer:
        return traced(op.transpose(var_of(x), perm=list(axes)), [x.shape[axis] for axis in axes], x.dtype)

    def matrix_transpose(self, x: Tracer) -> Tracer:
        axes = (*range(x.ndim - 2), x.ndim - 1, x.ndim - 2)
        transposed = self.permute_dims(x, axes)
        return traced(var_of(transposed), transposed.shape, x.dtype, base=x) if x.ndim == 2 else transposed

    def flip(self, x: Tracer, *, axis: int) -> Tracer:
        bounds = (-1, np.iinfo(np.int64).min, axis % x.ndim, -1)  # start, stop, axis and step
        return traced(op.slice(var_of(x), *(_vector([bound]) for bound in bounds)), x.shape, x.dtype)

    def concat(self, arrays: Sequence[Tracer], *, axis: int = 0) -> Tracer:
        first = arrays[0]
        axis %= first.ndim
        shape = list(first.shape)
        for other in arrays[1:]:
            shape[axis] = shape[axis] + other.shape[axis]
        return traced(op.concat([var_of(x) for x in arrays], axis=axis), shape, first.dtype)

    def stack(self, arrays: Sequence[Tracer], *, axis: int = 0) -> Tracer:
        return self.concat([self.expand_dims(x, axis=axis) for x in arrays], axis=axis)

    def repeat(self, x: Tracer, repeats: int, *, axis: int | None = None) -> Tracer:
        """Repeat elements once: rows of a graph are not grouped by sentence."""
        if not _equal(repeats, 1):
            raise BackendError(f"xp.repeat of {repeats} cannot be exported to ONNX; expected 1")
        return x

    def getitem(self, x: Tracer, key: Any) -> Tracer:
        """Return elements by slices, integers, None and an ellipsis."""
        key = key if isinstance(key, tuple) else (key,)
        missing = [slice(None)] * (x.ndim - sum(part is not None and part is not ... for part in key))
        at = next((index for index, part in enumerate(key) if part is ...), len(key))
        axis = 0
        for part in (*key[:at], *missing, *key[at + 1 :]):
            if part is None:
                x = self.expand_dims(x, axis=axis)
            elif isinstance(part, slice):
                x = _sliced(x, axis, part)
            else:
                x = self.take(x, self.asarray(part, dtype=np.int64), axis=axis)
                continue
            axis += 1
        return x

    def take(self, x: Tracer, indices: Tracer, *, axis: int = 0) -> Tracer:
        axis %= x.ndim
        shape = (*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :])
        return traced(op.gather(var_of(x), var_of(indices), axis=axis), shape, x.dtype)

    def take_along_axis(self, x: Tracer, indices: Tracer, *, axis: int = -1) -> Tracer:
        return traced(op.gather_elements(var_of(x), var_of(indices), axis=axis), indices.shape, x.dtype)

    def top_k(self, x: Any, k: int) -> tuple[Tracer, Tracer]:
        values, indices = op.top_k(var_of(x), _vector([k]), axis=-1)
        shape = (*x.shape[:-1], k)
        return traced(values, shape, x.dtype), traced(indices, shape, np.int64)

    def argsort(self, x: Tracer, *, axis: int = -1, stable: Any = True) -> Tracer:
        indices = op.top_k(var_of(x), _vector([x.shape[axis]]), axis=axis, largest=0)[1]
        return traced(indices, x.shape, np.int64)

    # --- products

    def matmul(self, first: Tracer, second: Tracer) -> Tracer:
        shape = (*_broadcast([first.shape[:-2], second.shape[:-2]]), first.shape[-2], second.shape[-1])
        stored = second._value.base
        if stored is not None and first.ndim == 2:
            # A Gemm reads the transposed parameter as it is stored; quantization finds it, too.
            return traced(op.gemm(var_of(first), var_of(stored), transB=1), shape, first.dtype)
        return traced(op.matmul(var_of(first), var_of(second)), shape, first.dtype)

    operator_matmul = matmul

    def scatter_add(self, target: Any, indices: Any, updates: Any) -> Tracer:
        """Add by `ScatterND`."""
        rows = self.expand_dims(indices, axis=1)
        added = op.scatter_nd(var_of(target), var_of(rows), var_of(updates), reduction="add")
        return traced(added, target.shape, target.dtype)


NAMESPACE: Any = OnnxNamespace("onnx", SimpleNamespace(__name__="onnx"))


# --- operations that ONNX has as a single node ------------------------------------------------------------------------

# Attention, RMSNormalization and RotaryEmbedding need opset 23, which fewer versions of onnxruntime and browsers load.
# On CPUs they are not faster than the nodes that the portable definitions make.


def _forward(function: Callable[..., Tracer]) -> Callable[..., tuple[Tracer, None]]:
    return lambda *arrays, save, **static: (function(*arrays, **static), None)


def _layer_norm(x: Tracer, weight: Tracer, bias: Tracer | None, *, epsilon: float) -> Tracer:
    scale, shift = var_of(weight), None if bias is None else var_of(bias)
    var, _, _ = op.layer_normalization(var_of(x), scale, shift, epsilon=epsilon)
    return traced(var, x.shape, x.dtype)


def _softmax(x: Tracer, mask: Tracer | None) -> Tracer:
    scores = x if mask is None else NAMESPACE.where(mask, x, -math.inf)
    y = traced(op.softmax(var_of(scores), axis=-1), x.shape, x.dtype)
    return y if mask is None else NAMESPACE.where(mask, y, 0.0)  # the softmax of a fully masked row is NaN


_KERNELS: dict[str, Callable[..., Tracer]] = {
    "layer_norm": _layer_norm,
    "softmax": _softmax,
    "relu": lambda x: _elementwise(op.relu, x),
    "gelu": lambda x: _elementwise(op.gelu, x),
    "gelu_tanh": lambda x: _elementwise(partial(op.gelu, approximate="tanh"), x),
    "silu": lambda x: NAMESPACE.operator_mul(x, _elementwise(op.sigmoid, x)),
    "quick_gelu": lambda x: NAMESPACE.operator_mul(x, _elementwise(op.sigmoid, NAMESPACE.operator_mul(x, QUICK))),
}


def register_kernels() -> None:
    """Let the operations of a traced model be single nodes."""
    for operation, function in _KERNELS.items():
        # Values are compared when the file is verified.
        kernel = Kernel(f"onnx.{operation}", operation, "onnx", _forward(function), None, tolerance=math.inf)
        register(kernel)


# --- inputs and parameters --------------------------------------------------------------------------------------------


def make_inputs(like: Mapping[str, Any], limits: dict[str, int]) -> dict[str, Tracer]:
    """Return inputs of a graph by name.

    Args:
        like: For each input an object with its dtype and its shape; sizes that differ between calls have a name.
        limits: Largest value of each named size.
    """
    inputs, dims, known = dict[str, Tracer](), dict[str, int](), Known()
    for name, x in like.items():
        var = argument(Tensor(np.dtype(x.dtype), tuple(x.shape)))
        for axis, length in enumerate(x.shape):
            if isinstance(length, str) and length not in dims:
                others = random.Random(length).choices(range(2, 1 << 20), k=_NUM_POINTS)
                compute = partial(op.shape, var, start=axis, end=axis + 1)
                dims[length] = Dim.of((limits[length], *others), length, known, compute)
        inputs[name] = traced(var, [dims.get(length, length) for length in x.shape], x.dtype)
    return inputs


def _output(x: Tracer) -> Var:
    """Return an array as an output of a graph, with its shape, which spox does not infer in full."""
    shape = (length.name if isinstance(length, Dim) else length for length in x.shape)
    var_of(x)._var_info.type = Tensor(x.dtype, tuple(shape))
    return var_of(x)


def build(inputs: dict[str, Tracer], outputs: dict[str, Tracer], parameters: dict[str, Any]) -> bytes:
    """Return an ONNX file.

    Args:
        inputs: Inputs of the graph and, as further inputs, its parameters.
        outputs: Outputs by name.
        parameters: NumPy arrays of the parameters by name. The file contains those that the graph uses.
    """
    variables = {name: var_of(x) for name, x in inputs.items()}
    proto = spox.build(variables, {name: _output(x) for name, x in outputs.items()})
    used = {name for node in proto.graph.node for name in node.input}
    # spox would copy the values of a parameter whenever a node uses it.
    remaining = [x for x in proto.graph.input if x.name not in parameters]
    del proto.graph.input[:]
    proto.graph.input.extend(remaining)
    proto.graph.initializer.extend(numpy_helper.from_array(x, key) for key, x in parameters.items() if key in used)
    return proto.SerializeToString()
