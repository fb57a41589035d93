"""cuDNN plans: graphs that are built for one shape, cached, and run on the addresses of arrays.

Building a plan takes about half a second, so the most recently used ones are cached in memory, per thread, because
threads must not share handles, and on disk. A plan that cannot be built causes one warning, and callers fall back to
another kernel.

The same calls give the same bits on the same device. XFORMER_DETERMINISTIC=0 is faster instead: the derivative is
summed in any order, and building may take at most a tenth of the time; new shapes use the other kernel until then.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import json
import threading
import time
from typing import Any

from xformer.environment import env_flag
from xformer.errors import how_to_install
from xformer.kernels.cupy import cublas
from xformer.kernels.cupy import cudnn_store as store
from xformer.kernels.cupy.cudnn_graph import Spec, describe
from xformer.kernels.cupy.plans import Failures, Plans, current, device_properties, one_line, workspace

_MIN_CUDNN, _MIN_CAPABILITY = 91900, 80
# Building may take _FREE_SECONDS and this fraction of the time since the first plan.
_FREE_SECONDS, _BUILD_FRACTION = 30.0, 0.1

_plans, _failures = Plans(256), Failures()  # by spec and device
_thread_data = threading.local()  # .handles: dict[device, handle]
_first_build: list[float] = []  # time of the first build
_build_times: list[float] = []


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
    return next(filter(None, (_failures.get((spec, device)) for spec in specs)), None)


def ready(spec: Spec) -> bool:
    """Build the plan of a spec if it is not cached; return False if it cannot be built, or not yet."""
    return unsupported_reason(spec) is None and _find(spec, current()[0]) is not None


def run(spec: Spec, arrays: dict[str, Any]) -> bool:
    """Run the plan of a spec on arrays by port name; return False, and write nothing, if there is no plan."""
    device, stream = current()
    plan = _find(spec, device) if unsupported_reason(spec) is None else None
    if plan is None:
        return False
    try:
        plan.run({uid: cublas.pointer(arrays[name]) for name, uid in plan.uids.items()}, stream)
    except _errors() as error:
        _fail(spec, device, error)
        return False
    return True


class Plan:
    """A built graph; uids: the ids of its ports, by name."""

    def __init__(self, graph: Any, uids: dict[str, int], handle: Any) -> None:
        self.graph, self.uids, self.handle = graph, uids, handle
        self.size = graph.get_workspace_size()
        # execute() accepts arrays of all libraries and takes longer than the call itself. If this version of the
        # frontend has a lowered graph, and runs cuDNN, not an engine in Python, the addresses go there directly.
        runs_cudnn = getattr(graph, "selected_engine", None) is None
        self.lowered: Any = getattr(graph, "_lowered_graph", None) if runs_cudnn else None

    def run(self, addresses: dict[int, int], stream: int) -> None:
        """Enqueue the plan on a stream, given addresses by port id."""
        frontend()[0].set_stream(handle=self.handle, stream=stream)
        space = workspace(self.size)  # alive until the plan is enqueued
        address = cublas.pointer(space)
        if hasattr(self.lowered, "_execute"):
            try:
                self.lowered._execute(addresses, address, getattr(self.handle, "backend_handle", self.handle))
                return
            except TypeError:  # another version of the frontend with other arguments; nothing was run
                self.lowered = None
        self.graph.execute(addresses, address, handle=self.handle)


def _find(spec: Spec, device: int) -> Plan | None:
    """Return the plan from memory, disk or a new build, or None if it cannot be built, or not yet."""
    try:
        plan: Plan | None = _plans.find((spec, device), functools.partial(_make, spec, device))
    except _errors() as error:
        _fail(spec, device, error)
        return None
    return plan


def _make(spec: Spec, device: int) -> Plan | None:
    handles = _thread_data.__dict__.setdefault("handles", {})
    if device not in handles:
        handles[device] = frontend()[0].create_handle()
    return _load(spec, device, handles[device]) or _build(spec, device, handles[device])


def cache_key(spec: Spec, device: int) -> str:
    """Return the key of a plan on disk: the spec, the device model and the versions of the libraries."""
    cudnn = frontend()[0]
    return json.dumps([spec._asdict(), device_properties(device), cudnn.backend_version(), cudnn.__version__])


def _load(spec: Spec, device: int, handle: Any) -> Plan | None:
    saved = store.load(cache_key(spec, device))
    if saved is None:
        return None
    uids, content = saved
    graph = frontend()[0].pygraph(handle=handle)
    try:
        graph.deserialize(handle, content)
        return Plan(graph, uids, handle)
    except _errors():  # cuDNN rejects it: build it again and overwrite the file
        return None


def _build(spec: Spec, device: int, handle: Any) -> Plan | None:
    cudnn, now = frontend()[0], time.monotonic()
    if (
        not deterministic()
        and _first_build
        and sum(_build_times) > _FREE_SECONDS + _BUILD_FRACTION * (now - _first_build[0])
    ):
        return None
    _first_build[:] = _first_build or [now]
    graph, ports = describe(cudnn, spec, {"handle": handle})
    graph.build([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    _build_times.append(time.monotonic() - now)
    plan = Plan(graph, {name: port.get_uid() for name, port in ports.items()}, handle)
    with contextlib.suppress(*_errors()):  # a plan that cannot be serialized is still valid in this process
        store.save(cache_key(spec, device), plan.uids, bytes(graph.serialize()))
    return plan


def _errors() -> tuple[type[BaseException], ...]:
    """Return the exceptions that the frontend raises for graphs that are unsupported or fail."""
    unsupported = getattr(frontend()[0], "cudnnGraphNotSupportedError", RuntimeError)
    return RuntimeError, ValueError, TypeError, KeyError, AttributeError, unsupported


def _fail(spec: Spec, device: int, error: BaseException) -> None:
    """Record that a spec has no plan, and warn once."""
    shapes = f"query {spec.query[0]}, key {spec.key[0]}, {spec.dtype}"
    direction = "backward" if spec.backward else "forward"
    _failures.add(
        (spec, device),
        f"cuDNN does not support this call: {one_line(error)}",
        f"cuDNN failed for attention {direction} ({shapes}); a slower kernel runs instead: {one_line(error)}",
    )
