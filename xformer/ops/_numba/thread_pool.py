"""Jobs of compiled kernels, shared by the threads of a pool without the Python interpreter.

Waking a thread takes a tenth of a millisecond or more, often longer than a matrix product. So a helper thread that has
just worked stays awake for a while, in compiled code, and polls for a job; a caller does not wait for helpers to wake
up but does the parts itself.

A job has a number of parts; a body, a C function that does parts until none is left; and arguments, on the caller's
stack. A helper enters an open job once and leaves it. The caller closes the job, and waits until all helpers have left
before it returns. All accesses to the state of the pool are atomic and sequentially consistent, so two rules suffice:

- a helper counts itself as inside, and then checks again that the same job is open;
- the caller closes the job, and then checks whether any helper is inside.

A body allocates memory before it takes its first part: if the allocation fails, no part is lost.
"""

from __future__ import annotations

import _thread
import atexit
import contextlib
import platform
import threading
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray
from numba.core import cgutils
from numba.core.imputils import impl_ret_borrowed
from numba.extending import intrinsic
from numba.types import Array, Tuple, int64, void

from xformer.backends.recording import current_tape
from xformer.ops._numba.compile import inline, kernel
from xformer.threads import at_fork, available_threads, fork_safe_lock

# Indices into the state of a pool. Those that one thread writes while others poll are on cache lines of their own.
# OPEN holds the number of the open job, or zero.
OWNED, OPEN, NEXT_PART, INSIDE, AWAKE, STOPPED, _BODY = range(0, 56, 8)
_ARGUMENTS, _NUM_PARTS, _NUM_HELPERS, _NUM_JOBS, STATE_SIZE = range(_BODY + 1, _BODY + 6)
_POLLS = 100_000  # before a helper sleeps: a millisecond or more, if the processor has a pause instruction

_INT = ir.IntType(64)
_BODY_TYPE = ir.FunctionType(ir.VoidType(), [_INT.as_pointer()]).as_pointer()
POOL_STATE = Array(int64, 1, "C")

# --- LLVM IR ----------------------------------------------------------------------------------------------------------


def _pointer(context: Any, builder: Any, signature: Any, values: Any) -> Any:
    state = context.make_array(signature.args[0])(context, builder, values[0])
    return builder.gep(state.data, [values[1]])


@intrinsic  # type: ignore[untyped-decorator]
def atomic_load(typing: Any, state: Any, index: Any) -> Any:
    """Return state[index]."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.load_atomic(_pointer(context, builder, signature, values), "seq_cst", 8)

    return int64(state, int64), generate


def _atomic(operation: str) -> Any:
    @intrinsic  # type: ignore[untyped-decorator]
    def update(typing: Any, state: Any, index: Any, value: Any) -> Any:
        """Update state[index] and return the old value."""

        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            return builder.atomic_rmw(operation, _pointer(context, builder, signature, values), values[2], "seq_cst")

        return int64(state, int64, int64), generate

    return update


atomic_add, atomic_exchange = _atomic("add"), _atomic("xchg")


@intrinsic  # type: ignore[untyped-decorator]
def _cpu_pause(typing: Any) -> Any:
    """Yield the core to its other hardware thread for some ten nanoseconds."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        if platform.machine().lower() in ("x86_64", "amd64"):
            function_type = ir.FunctionType(ir.VoidType(), [])
            builder.call(cgutils.get_or_insert_function(builder.module, function_type, "llvm.x86.sse2.pause"), [])
        return context.get_dummy_value()

    return void(), generate


@intrinsic  # type: ignore[untyped-decorator]
def _call(typing: Any, body: Any, state: Any) -> Any:
    """Call the C function at an address with a pointer to the state."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        state = context.make_array(signature.args[1])(context, builder, values[1])
        builder.call(builder.inttoptr(values[0], _BODY_TYPE), [state.data])
        return context.get_dummy_value()

    return void(int64, state), generate


@intrinsic  # type: ignore[untyped-decorator]
def _store_args(typing: Any, arguments: Any) -> Any:
    """Store arguments on the stack and return their address, which is valid until the caller returns."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.ptrtoint(cgutils.alloca_once_value(builder, values[0]), _INT)

    return int64(arguments), generate


def argument_loader(arguments: Any) -> Any:
    """Return a function with which a body loads its arguments, a tuple of this type, from the state."""

    @intrinsic  # type: ignore[untyped-decorator]
    def load_args(typing: Any, state: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            state = context.make_array(signature.args[0])(context, builder, values[0])
            address = builder.load(builder.gep(state.data, [ir.Constant(_INT, _ARGUMENTS)]))
            pointer = builder.inttoptr(address, context.get_value_type(arguments).as_pointer())
            return impl_ret_borrowed(context, builder, arguments, builder.load(pointer))

        return arguments(state), generate

    return load_args


# --- the caller, helpers and bodies -----------------------------------------------------------------------------------


@inline
def job_state(job):
    """Return the state that a body gets the pointer to."""
    return carray(job, (STATE_SIZE,))


@inline
def next_part(state):
    """Return the number of a part for this thread, or -1 if none is left. The body must not allocate after this."""
    part = atomic_add(state, NEXT_PART, 1)
    return part if part < state[_NUM_PARTS] else -1


@inline
def run_job(pool, num_helpers, num_parts, body, arguments):
    """Run a body until all parts are done, in this thread and in at most `num_helpers` that are awake and idle.

    Raises MemoryError if no thread had enough memory to start.
    """
    shared = num_helpers > 0 and atomic_exchange(pool, OWNED, 1) == 0
    state = pool if shared else np.zeros(STATE_SIZE, np.int64)
    state[_BODY], state[_ARGUMENTS] = body, _store_args(arguments)
    state[_NUM_PARTS], state[_NUM_HELPERS] = num_parts, num_helpers
    atomic_exchange(state, NEXT_PART, 0)
    atomic_exchange(state, OPEN, atomic_add(state, _NUM_JOBS, 1) + 1 if shared else 0)
    _call(body, state)
    if shared:
        atomic_exchange(state, OPEN, 0)
        while atomic_load(state, INSIDE) > 0:
            _cpu_pause()
    taken = atomic_load(state, NEXT_PART)
    if shared:
        atomic_exchange(state, OWNED, 0)
    if taken < num_parts:
        raise MemoryError("not enough memory for the buffers of a compiled kernel")


def parallel_kernel(*types):
    """Return a kernel that runs a body with arguments of these types, and the function that loads them in the body."""
    arguments_type = Tuple(types)

    @kernel(POOL_STATE, int64, int64, int64, arguments_type)
    def run(pool, num_helpers, num_parts, body, arguments):
        run_job(pool, num_helpers, num_parts, body, arguments)

    return run, argument_loader(arguments_type)


@kernel(POOL_STATE, Array(int64, 1, "C"))
def worker_loop(pool, last_job):
    """Run jobs in a helper thread, until none has arrived for a while; last_job[0] is the number of its last one."""
    atomic_add(pool, AWAKE, 1)
    polls = 0
    while polls < _POLLS and atomic_load(pool, STOPPED) == 0:
        polls += 1
        job = atomic_load(pool, OPEN)
        if job not in (0, last_job[0]) and atomic_load(pool, INSIDE) < atomic_load(pool, _NUM_HELPERS):
            num_inside = atomic_add(pool, INSIDE, 1)
            if atomic_load(pool, OPEN) == job and num_inside < pool[_NUM_HELPERS]:
                _call(pool[_BODY], pool)
                polls, last_job[0] = 0, job  # none of its parts is left
            atomic_add(pool, INSIDE, -1)
        _cpu_pause()
    atomic_add(pool, AWAKE, -1)


# --- threads ----------------------------------------------------------------------------------------------------------

_MIN_MULTIPLICATIONS = 500_000  # per thread: some ten microseconds
_LOCK = fork_safe_lock()


class _Pool:
    """The state that threads share, and an event, a plain lock, to wake each thread."""

    def __init__(self) -> None:
        self.state: Any = np.zeros(STATE_SIZE, np.int64)
        self._events: list[Any] = []
        self._threads: list[threading.Thread] = []

    def wake(self, num_helpers: int) -> None:
        """Wake helpers, and start those that do not exist yet."""
        if self.state[AWAKE] >= num_helpers:
            return
        with _LOCK:
            with contextlib.suppress(RuntimeError):  # the system has no more threads; use fewer
                while len(self._events) < num_helpers and not self.state[STOPPED]:
                    event = _thread.allocate_lock()
                    thread = threading.Thread(
                        target=self._run_helper, args=(event,), name="xformer-helper", daemon=True
                    )
                    thread.start()
                    self._events.append(event)
                    self._threads.append(thread)
            self._set_events(num_helpers)

    def _run_helper(self, event: Any) -> None:
        last_job = np.zeros(1, np.int64)
        while not self.state[STOPPED]:
            worker_loop(self.state, last_job)
            event.acquire()

    def _set_events(self, count: int) -> None:
        for event in self._events[:count]:
            if event.locked():
                event.release()

    def stop(self) -> None:
        """Join all threads: compiled code must not be unloaded while they run it."""
        self.state[STOPPED] = 1
        with _LOCK:
            self._set_events(len(self._events))
        for thread in self._threads:
            thread.join()


_pools: list[_Pool] = []


def _pool() -> _Pool:
    with _LOCK:
        if not _pools:
            _pools.append(_Pool())
            atexit.register(_pools[0].stop)
        return _pools[0]


at_fork(after_in_child=_pools.clear)


def threads_for(num_multiplications: int) -> int:
    """Return the number of threads for a number of multiplications."""
    if num_multiplications < 2 * _MIN_MULTIPLICATIONS:
        return 1
    return min(available_threads(), num_multiplications // _MIN_MULTIPLICATIONS)


def run_parallel(kernel: Any, body: Any, num_parts: int, num_threads: int, *arguments: Any) -> None:
    """Call a kernel that runs `body` on all parts of a job, on at most `num_threads` threads."""
    num_helpers = min(num_threads, num_parts) - 1
    pool = _pools[0] if _pools else _pool()
    if num_helpers > 0:
        pool.wake(num_helpers)
        tape = current_tape()
        if tape is not None:
            tape.append(pool.wake, (num_helpers,))
    kernel(pool.state, num_helpers, num_parts, body.address, arguments)
