"""Rows of a table by token id."""

from __future__ import annotations

import math
from typing import Any

from xformer.autodiff import Implementation
from xformer.backends import Array, array_namespace, extra
from xformer.ops.operation import Operation


def _forward(weight: Array, ids: Array, *, save: bool) -> tuple[Array, Any]:
    xp = array_namespace(weight, ids)
    rows = xp.take(weight, xp.reshape(ids, (math.prod(ids.shape),)), axis=0)  # the standard's take wants one axis
    return xp.reshape(rows, (*ids.shape, weight.shape[1])), (ids, weight)


def _vjp(g: Array, residuals: Any, needs: Any) -> tuple[Any, ...]:
    ids, weight = residuals
    xp = array_namespace(g, weight)
    count = math.prod(ids.shape)
    rows = xp.reshape(g, (count, weight.shape[1]))
    zeros = xp.zeros_like(weight)
    return extra.scatter_add(zeros, xp.reshape(ids, (count,)), rows), None


_operation = Operation(Implementation("embedding", _forward, _vjp))


def embedding(weight: Array, ids: Array) -> Array:
    """Look up rows: weight (vocabulary, features), ids integers (...) -> (..., features).

    Ids must lie in [0, vocabulary): check them on the host first, since negative ones wrap silently.
    """
    return _operation(weight, ids)
