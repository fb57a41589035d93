"""Plans of cuDNN: a graph built for one shape, kept, and run on the addresses of arrays.

Building compiles for about half a second, so plans are kept: in memory, those used last, one set a thread (cuDNN's
handles are not to be shared), and on disk for the next process. What cannot be built is remembered and warned about
once, and callers do without.

The same calls give the same bits, on the same device. XFORMER_DETERMINISTIC=0 gives that up for speed: the derivative
is summed as it comes, and where shapes never repeat, so that building would take longer than it saves, it may take a
tenth of the time that passes, and callers do without in the meantime.
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
from xformer.kernels.cupy import cublas as cupy_products
from xformer.kernels.cupy import cudnn_store as store
from xformer.kernels.cupy.cudnn_graph import Spec, describe
from xformer.kernels.cupy.plans import Failures, Plans, current, line, machine, workspace

_LEAST_CUDNN, _LEAST_CAPABILITY = 91900, 80
_FREE_SECONDS, _SHARE = 30.0, 0.1  # building takes this long, and this share of the time since it began

_plans, _failures = Plans(256), Failures()  # by spec and device
_mine = threading.local()  # .handles: dict[device, handle]
_began: list[float] = []  # when the first plan was built
_took: list[float] = []  # how long each was built


@functools.cache
def frontend() -> tuple[Any, str | None]:
    """The module `cudnn`, or why there is none that can serve."""
    if importlib.util.find_spec("cudnn") is None:
        return None, f"the cuDNN frontend is not installed; {how_to_install('cudnn')}"
    try:
        # Without torch nobody has loaded these yet, and cuDNN itself does not find those that wheels bring: all plans
        # of attention, which are compiled, would fail.
        find = importlib.import_module("cuda.pathfinder").load_nvidia_dynamic_lib
        for name in ("cudart", "nvrtc"):
            with contextlib.suppress(RuntimeError):  # the system may have them all the same
                find(name)
        cudnn = importlib.import_module("cudnn")
        version = cudnn.backend_version()
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        return None, f"the cuDNN frontend cannot be used: {line(error)}"
    return cudnn, None if version >= _LEAST_CUDNN else f"cuDNN {version} is older than {_LEAST_CUDNN}"


def repeatable() -> bool:
    """Whether the same calls are to give the same bits."""
    return env_flag("XFORMER_DETERMINISTIC", default=True)


def refusal(*specs: Spec) -> str | None:
    """Why one of the specs has no plan here, as far as one knows without building it."""
    reason = frontend()[1]
    if reason is not None:
        return reason
    device, _ = current()
    name, capability = machine(device)
    if capability < _LEAST_CAPABILITY:
        return f"{name} has compute capability {capability / 10}; at least 8.0 is needed"
    return next(filter(None, (_failures.get((spec, device)) for spec in specs)), None)


def ready(spec: Spec) -> bool:
    """Have the plan of a spec at hand, building it if need be; False when it cannot be built, or not yet."""
    return refusal(spec) is None and _find(spec, current()[0]) is not None


def run(spec: Spec, arrays: dict[str, Any]) -> bool:
    """Run the plan of a spec on arrays by the names of its ports; False, with nothing written, when there is none."""
    device, stream = current()
    plan = _find(spec, device) if refusal(spec) is None else None
    if plan is None:
        return False
    try:
        plan.run({uid: cupy_products.pointer(arrays[name]) for name, uid in plan.uids.items()}, stream)
    except _errors() as error:
        _fail(spec, device, error)
        return False
    return True


class Plan:
    """A built graph. uids: the numbers of its ports, by name."""

    def __init__(self, graph: Any, uids: dict[str, int], handle: Any) -> None:
        self.graph, self.uids, self.handle = graph, uids, handle
        self.size = graph.get_workspace_size()
        # What execute() does for arrays of all libraries takes longer than the call itself: addresses go past it,
        # where this version of the frontend has the way in, and cuDNN itself, not an engine in Python, serves.
        served = getattr(graph, "selected_engine", None) is None
        self.lowered: Any = getattr(graph, "_lowered_graph", None) if served else None

    def run(self, addresses: dict[int, int], stream: int) -> None:
        """Enqueue the plan on a stream, addresses by uid."""
        frontend()[0].set_stream(handle=self.handle, stream=stream)
        space = workspace(self.size)  # kept until the plan is enqueued
        address = cupy_products.pointer(space)
        if hasattr(self.lowered, "_execute"):
            try:
                self.lowered._execute(addresses, address, getattr(self.handle, "backend_handle", self.handle))
                return
            except TypeError:  # it takes other arguments now, and has done nothing
                self.lowered = None
        self.graph.execute(addresses, address, handle=self.handle)


def _find(spec: Spec, device: int) -> Plan | None:
    """The plan of this thread, from its memory, the disk or the compiler; None where it cannot be made, or not yet."""
    try:
        found: Plan | None = _plans.find((spec, device), functools.partial(_made, spec, device))
    except _errors() as error:
        _fail(spec, device, error)
        return None
    return found


def _made(spec: Spec, device: int) -> Plan | None:
    handles = _mine.__dict__.setdefault("handles", {})
    if device not in handles:
        handles[device] = frontend()[0].create_handle()
    return _restored(spec, device, handles[device]) or _built(spec, device, handles[device])


def purpose(spec: Spec, device: int) -> str:
    """What a plan on disk is good for: one spec, one kind of device, one version of each library."""
    cudnn = frontend()[0]
    return json.dumps([spec._asdict(), machine(device), cudnn.backend_version(), cudnn.__version__])


def _restored(spec: Spec, device: int, handle: Any) -> Plan | None:
    saved = store.load(purpose(spec, device))
    if saved is None:
        return None
    uids, content = saved
    graph = frontend()[0].pygraph(handle=handle)
    try:
        graph.deserialize(handle, content)
        return Plan(graph, uids, handle)
    except _errors():  # whole, but not to cuDNN's taste: it is built again and written over
        return None


def _built(spec: Spec, device: int, handle: Any) -> Plan | None:
    cudnn, now = frontend()[0], time.monotonic()
    if not repeatable() and _began and sum(_took) > _FREE_SECONDS + _SHARE * (now - _began[0]):
        return None
    _began[:] = _began or [now]
    graph, ports = describe(cudnn, spec, {"handle": handle})
    graph.build([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    _took.append(time.monotonic() - now)
    plan = Plan(graph, {name: port.get_uid() for name, port in ports.items()}, handle)
    with contextlib.suppress(*_errors()):  # a plan that cannot be serialized is as good for this process
        store.save(purpose(spec, device), plan.uids, bytes(graph.serialize()))
    return plan


def _errors() -> tuple[type[BaseException], ...]:
    """What the frontend raises for graphs that it does not support, or that fail."""
    unsupported = getattr(frontend()[0], "cudnnGraphNotSupportedError", RuntimeError)
    return RuntimeError, ValueError, TypeError, KeyError, AttributeError, unsupported


def _fail(spec: Spec, device: int, error: BaseException) -> None:
    """Remember that a spec has no plan, and say so once."""
    shapes = f"query {spec.query[0]}, key {spec.key[0]}, {spec.dtype}"
    pass_ = "backward" if spec.backward else "forward"
    _failures.add(
        (spec, device),
        f"cuDNN does not take this: {line(error)}",
        f"cuDNN failed for attention {pass_} ({shapes}), which is slower without it: {line(error)}",
    )
