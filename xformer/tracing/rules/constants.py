"""Functions without a derivative: creation, comparison, rounding, searching, and everything on integers."""

from __future__ import annotations

from xformer.tracing.rule import not_differentiable
from xformer.tracing.tracer import COMPARISONS

ELEMENTWISE_CONSTANTS = (
    # comparison and logic
    *("equal", "not_equal", "less", "less_equal", "greater", "greater_equal", "isfinite", "isinf", "isnan"),
    *("logical_and", "logical_or", "logical_not", "logical_xor", "signbit"),
    # integers
    *("bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_invert", "bitwise_left_shift", "bitwise_right_shift"),
    # steps: locally constant, so their derivative is zero wherever it exists
    *("ceil", "floor", "round", "trunc", "floor_divide"),
    # the operators of these
    *(f"operator_{name}" for name in (*COMPARISONS, "floordiv", "and", "or", "xor", "lshift", "rshift", "invert")),
)

not_differentiable(
    *ELEMENTWISE_CONSTANTS,
    *(f"inplace_{name}" for name in ("floordiv", "and", "or", "xor", "lshift", "rshift")),
    # creation; those from numbers (arange, full, linspace) are not here: on a tracked number they must raise
    *("empty", "empty_like", "eye", "ones", "ones_like", "zeros", "zeros_like"),
    # searching and counting
    *("all", "any", "argmax", "argmin", "argsort", "nonzero", "count_nonzero", "searchsorted", "isin"),
    # facts about dtypes and shapes
    *("broadcast_shapes", "can_cast", "finfo", "iinfo", "isdtype", "result_type", "__array_namespace_info__"),
)
