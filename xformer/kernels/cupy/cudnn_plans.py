"""cuDNN plans: graphs that are built for one shape, cached, and run on the addresses of arrays.

Building a plan takes about half a second, so the most recently used ones are cached, per thread, because threads must
not share handles. If cuDNN does not support a graph, or cannot build a plan of it, one warning says so, and callers
fall back to another kernel. Errors of running plans are raised.

The same calls give the same bits on the same device. For this the derivative needs a workspace of 2 bytes for each
score (cuDNN 9.19 on sm_90): 8.6 GB for 16 heads of 16,384 queries and keys. With XFORMER_DETERMINISTIC=0 the derivative
sums in any order; this is faster and needs no memory for the scores.

Building a plan takes half a second, so plans are kept in files, from which reading one takes milliseconds.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import importlib.util
import json
import logging
import threading
from pathlib import Path
from typing import Any, NamedTuple

from xformer.environment import env_flag
from xformer.errors import CheckpointError, how_to_install
from xformer.io import write_bytes
from xformer.kernels.cupy import cublas, launch
from xformer.kernels.cupy.calls import enqueue
from xformer.kernels.cupy.launch import Failures, Plans, current, device_properties, one_line, workspace
from xformer.ops.checks import cache_directory

_MIN_CUDNN, _MIN_CAPABILITY = 91900, 80
_PRIVATE_VERSION = "1.32."  # versions of the frontend whose private `_execute` has the arguments that Plan.run passes

_LOG = logging.getLogger(__name__)  # the command line prints it

_plans, _failures = Plans(1024), Failures()  # by spec and device
_thread_data = threading.local()  # .handles: dict[device, handle]


@functools.cache
def frontend() -> tuple[Any, str | None]:
    """Return the module `cudnn`, and the reason if it cannot be used, else None."""
    if importlib.util.find_spec("cudnn") is None:
        return None, f"the cuDNN frontend is not installed; {how_to_install('cudnn')}"
    try:
        # cuDNN compiles attention with these libraries and does not find those in wheels; torch would load them.
        load = importlib.import_module("cuda.pathfinder").load_nvidia_dynamic_lib
        for name in ("cudart", "nvrtc"):
            with contextlib.suppress(RuntimeError):  # the system may have them
                load(name)
        cudnn = importlib.import_module("cudnn")
        version = cudnn.backend_version()
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        return None, f"the cuDNN frontend cannot be used: {one_line(error)}"
    if not cudnn.__version__.startswith(_PRIVATE_VERSION):
        _LOG.info(
            "calls of cuDNN take 20 us longer with version %s of its frontend; install nvidia-cudnn-frontend==%s*",
            *(cudnn.__version__, _PRIVATE_VERSION),
        )
    return cudnn, None if version >= _MIN_CUDNN else f"cuDNN {version} is older than {_MIN_CUDNN}"


def deterministic() -> bool:
    """Return whether the same calls must give the same bits (XFORMER_DETERMINISTIC, default True)."""
    return env_flag("XFORMER_DETERMINISTIC", default=True)


def unsupported_reason(*specs: Spec) -> str | None:
    """Return why one of the specs cannot have a plan, if that is known without building it, else None."""
    reason = frontend()[1]
    if reason is not None:
        return reason
    device, _ = current()
    name, capability = device_properties(device)
    if capability < _MIN_CAPABILITY:
        return f"{name} has compute capability {capability / 10}; expected at least 8.0"
    return next((_failures[spec, device] for spec in specs if _failures and (spec, device) in _failures), None)


def ready(spec: Spec) -> bool:
    """Build the plan of a spec if it is not cached; return False if it cannot be built."""
    return _find(spec, current()[0]) is not None


def run(spec: Spec, arrays: dict[str, Any]) -> bool:
    """Run the plan of a spec on arrays by port name; return False, and write nothing, if it cannot be built."""
    plan = _find(spec, current()[0])
    if plan is None:
        return False
    enqueue(plan.run, (), tuple([arrays[name] for name in plan.uids]))
    return True


class Plan:
    """A built graph; uids: the ids of its ports, by name."""

    def __init__(self, graph: Any, uids: dict[str, int], handle: Any) -> None:
        self.graph, self.uids, self.handle = graph, uids, handle
        self.size = graph.get_workspace_size()
        # execute() accepts arrays of all libraries and takes longer than the call itself. If cuDNN runs the graph, not
        # an engine in Python, the addresses go to the lowered graph directly.
        is_known = frontend()[0].__version__.startswith(_PRIVATE_VERSION) and _is_of_backend(graph)
        self._execute = graph._lowered_graph._execute if is_known else None

    def run(self, arrays: tuple[Any, ...]) -> None:
        """Enqueue the plan on the current stream, given the arrays of all ports."""
        addresses = dict(zip(self.uids.values(), map(cublas.pointer, arrays), strict=True))
        frontend()[0].set_stream(handle=self.handle, stream=current()[1])
        space = workspace(self.size)  # alive until the plan is enqueued
        address = cublas.pointer(space)
        if self._execute is None:
            self.graph.execute(addresses, address, handle=self.handle)
        else:
            self._execute(addresses, address, self.handle.backend_handle)


def _find(spec: Spec, device: int) -> Plan | None:
    """Return the plan of a spec, cached or built, or None if it cannot be built."""
    if unsupported_reason(spec) is not None:
        return None
    try:
        plan: Plan = _plans.find((spec, device), functools.partial(_build, spec, device))
    except frontend()[0].cudnnGraphNotSupportedError as error:  # also if a plan cannot be compiled
        _fail(spec, device, error)
        return None
    return plan


def _build(spec: Spec, device: int) -> Plan:
    cudnn, handles = frontend()[0], _thread_data.__dict__.setdefault("handles", {})
    if device not in handles:
        handles[device] = cudnn.create_handle()
    if (plan := _read(spec, handles[device])) is not None:
        return plan
    graph, ports = describe(cudnn, spec, {"handle": handles[device]})
    graph.build([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    plan = Plan(graph, {name: port.get_uid() for name, port in ports.items()}, handles[device])
    if _is_of_backend(graph):
        _write(spec, plan)
    return plan


def _is_of_backend(graph: Any) -> bool:
    """Return whether cuDNN runs a graph, not an engine in Python, which older frontends do not have."""
    return getattr(graph, "selected_engine", None) is None


# --- plans in files ---------------------------------------------------------------------------------------------------


def _path(spec: Spec) -> Path:
    """Return the path of a plan, by all that it depends on: spec, GPU, driver, versions and our sources."""
    name = hashlib.sha256(f"{launch.identity()} {spec}".encode()).hexdigest()[:32]
    return cache_directory() / "cudnn" / f"{name}.plan"


def _read(spec: Spec, handle: Any) -> Plan | None:
    """Return the plan in the file of a spec; None without one, or if it is damaged."""
    try:
        digest, uids, data = _path(spec).read_bytes().split(b"\n", 2)
        if hashlib.sha256(uids + data).hexdigest().encode() == digest:
            graph = frontend()[0].pygraph(handle=handle)
            graph.deserialize(handle, data)
            return Plan(graph, json.loads(uids), handle)
    except Exception as error:  # noqa: BLE001 - whatever the library raises for what another version wrote
        _LOG.debug("a plan of cuDNN is built again: %s", one_line(error))
    return None


def _write(spec: Spec, plan: Plan) -> None:
    uids, data = json.dumps(plan.uids).encode(), bytes(plan.graph.serialize())
    with contextlib.suppress(OSError, RuntimeError, CheckpointError):  # without a directory, plans last as the process
        _path(spec).parent.mkdir(parents=True, exist_ok=True)
        write_bytes(_path(spec), b"\n".join([hashlib.sha256(uids + data).hexdigest().encode(), uids, data]))


def _fail(spec: Spec, device: int, error: BaseException) -> None:
    """Record that a spec has no plan, and warn once."""
    shapes = f"query {spec.query[0]}, key {spec.key[0]}, {spec.dtype}"
    direction = "backward" if spec.backward else "forward"
    _failures.add(
        (spec, device),
        f"cuDNN does not support this call: {one_line(error)}",
        f"cuDNN failed for attention {direction} ({shapes}); a slower kernel runs instead: {one_line(error)}",
    )


# --- Graphs: inputs, outputs and their memory layouts -----------------------------------------------------------------
#
# softmax(scale Q K^T + bias) V and its derivative are one node each of a graph of the cuDNN frontend, which runs as one
# kernel (FlashAttention-2: Dao, 2023). Shapes are (batch, heads, length, features).

Layout = tuple[tuple[int, int, int, int], tuple[int, int, int, int]]  # shape and strides, in elements

DTYPES = {"float16": "HALF", "bfloat16": "BFLOAT16"}


class Spec(NamedTuple):
    """A graph; its plan also depends on the device and the versions of the libraries.

    Attributes:
        backward: Whether this is the derivative.
        dtype: Dtype of all tensors except `stats`.
        query, key, value, bias: Layouts.
        window: Number of keys up to its own that a query sees; 0: all.
        after: Number of keys after its own that a query sees, if there is a diagonal.
        causal: "" (no), "top_left" or "bottom_right", the corner that the diagonal goes through.
        scale: Scale of the scores.
        padded: Whether the lengths of each sentence are inputs.
        dropout: Whether the weights are multiplied by a mask and a scale.
        stats: Whether the forward also writes the logsumexp, for the derivative.
        deterministic: Whether the derivative sums in a fixed order, which needs memory for queries times keys.
        g: Layout of the cotangent of the output, of the derivative only.
    """

    backward: bool
    dtype: str
    query: Layout
    key: Layout
    value: Layout
    bias: Layout | None
    causal: str
    scale: float
    padded: bool
    dropout: bool
    stats: bool
    deterministic: bool
    g: Layout | None = None
    window: int = 0
    after: int = 0


def packed(batch: int, heads: int, length: int, features: int) -> Layout:
    """Return the layout (batch, length, heads, features), in which heads are merged and split without a copy."""
    return (batch, heads, length, features), (length * heads * features, features, heads * features, 1)


def aligned_rows(batch: int, heads: int, queries: int, keys: int) -> Layout:
    """Return the layout of scores, biases and dropout masks, with rows aligned to 16 bytes."""
    row = -(-keys // 8) * 8
    return (batch, heads, queries, keys), (heads * queries * row, queries * row, row, 1)


def describe(cudnn: Any, spec: Spec, context: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Build the graph of a spec.

    The forward reads query, key, value, bias, query_lengths and key_lengths, dropout_mask and dropout_scale, if the
    spec has them, and writes output and stats. The backward reads all of them and g, and writes dquery, dkey and
    dvalue.

    Args:
        cudnn: Module of the cuDNN frontend.
        spec: The spec.
        context: Further arguments of the graph, such as its handle.

    Returns:
        The graph, and its ports by name.
    """
    types, layouts = cudnn.data_type, _layouts(spec)
    dtypes = {"query_lengths": types.INT32, "key_lengths": types.INT32}
    dtypes |= dict.fromkeys(("dropout_scale", "dropout_scale_inverse", "stats"), types.FLOAT)
    io = getattr(types, DTYPES[spec.dtype])
    graph = cudnn.pygraph(io_data_type=io, intermediate_data_type=types.FLOAT, compute_data_type=types.FLOAT, **context)
    ports = {}
    for name in _inputs(spec):
        shape, strides = layouts[name]
        ports[name] = graph.tensor(name=name, dim=[*shape], stride=[*strides], data_type=dtypes.get(name, io))
    settings = {_KEYWORDS[name]: port for name, port in ports.items() if name in _KEYWORDS}
    settings |= {"name": "attention", "attn_scale": spec.scale, **_masking(cudnn, spec)}
    if spec.dropout:
        settings["dropout"] = tuple(ports[name] for name in _DROPOUT if name in ports)
    if spec.backward:
        outputs = graph.sdpa_backward(**settings, use_deterministic_algorithm=spec.deterministic)
        names = ["dquery", "dkey", "dvalue"]
    else:
        outputs = graph.sdpa(**settings, generate_stats=spec.stats)
        names = ["output", "stats"] if spec.stats else ["output"]
    for name, port in zip(names, outputs, strict=False):
        shape, strides = layouts[name]
        port.set_output(True).set_dim([*shape]).set_stride([*strides]).set_data_type(dtypes.get(name, io))
        ports[name] = port
    return graph, ports


def _inputs(spec: Spec) -> list[str]:
    """Return the names of the ports that are read."""
    names = ["query", "key", "value"]
    names += ["bias"] if spec.bias else []
    names += ["query_lengths", "key_lengths"] if spec.padded else []
    names += _DROPOUT[:2] if spec.dropout else []
    names += _DROPOUT[2:] if spec.dropout and spec.backward else []
    return [*names, "output", "g", "stats"] if spec.backward else names


def _layouts(spec: Spec) -> dict[str, Layout]:
    """Return the layouts of all ports."""
    (batch, heads, queries, _), keys = spec.query[0], spec.key[0][2]
    output = packed(batch, heads, queries, spec.value[0][-1])
    lengths: Layout = (batch, 1, 1, 1), (1, 1, 1, 1)
    layouts = {name: getattr(spec, name) for name in ("query", "key", "value", "bias", "g")}
    layouts |= {"d" + name: packed(*getattr(spec, name)[0]) for name in ("query", "key", "value")}
    layouts |= dict.fromkeys(("query_lengths", "key_lengths"), lengths)
    layouts |= dict.fromkeys(_DROPOUT[1:], ((1,) * 4, (1,) * 4))
    layouts |= {"dropout_mask": aligned_rows(batch, heads, queries, keys), "output": output}
    return layouts | {"stats": ((batch, heads, queries, 1), (heads * queries, queries, 1, 1))}


_DROPOUT = ["dropout_mask", "dropout_scale", "dropout_scale_inverse"]
# The names of ports in cuDNN.
_PORTS = "query key value bias query_lengths key_lengths output g stats"
_NAMES = "q k v bias seq_len_q seq_len_kv o dO stats"
_KEYWORDS = dict(zip(_PORTS.split(), _NAMES.split(), strict=True))


def _masking(cudnn: Any, spec: Spec) -> dict[str, Any]:
    settings: dict[str, Any] = {"use_padding_mask": True} if spec.padded else {}
    if spec.causal:
        corner = getattr(cudnn.diagonal_alignment, spec.causal.upper())
        settings.update(diagonal_alignment=corner, diagonal_band_right_bound=spec.after)
    if spec.window:
        settings["diagonal_band_left_bound"] = spec.window
    return settings
