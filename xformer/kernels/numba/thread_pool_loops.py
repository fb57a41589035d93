"""How compiled loops share their work among threads that wait for it, without the interpreter.

Waking a thread takes the system a tenth of a millisecond and more, a product of matrices often less. So helpers that
have just worked stay awake for a while, in compiled code, and look for a job; a caller waits for none to wake up, but
does the parts itself.

A job is a number of parts, the worker, a C function that does one part after the other until none is left, and its
arguments, which lie on the caller's stack. A helper enters an open job once, and leaves it; the caller closes it, and
waits until all have left before its stack goes. Every access to these words is atomic and seen by all in one order, so
it is enough that

- a helper says that it is inside, and then looks again whether the same job is open;
- the caller closes the job, and then looks whether anyone is inside.

A worker asks for memory before it takes its first part: where it fails, no part is lost.
"""

from __future__ import annotations

import platform
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray
from numba.core import cgutils
from numba.core.imputils import impl_ret_borrowed
from numba.extending import intrinsic
from numba.types import Array, Tuple, int64, void

from xformer.kernels.numba.loops import loop
from xformer.kernels.numba.microkernel import piece

# Places in the words of a pool. What one thread writes while another looks on has a line of the cache of its own.
# OPEN holds the number of the job that is, or zero.
OWNED, OPEN, NEXT, INSIDE, AWAKE, STOPPED, _WORKER = range(0, 56, 8)
_ARGUMENTS, _PARTS, _HELPERS, _JOBS, WORDS = range(_WORKER + 1, _WORKER + 6)
_LOOKS = 100_000  # for a job, before a helper goes to sleep: a millisecond or more, where a processor can pause

_INT = ir.IntType(64)
_WORKS = ir.FunctionType(ir.VoidType(), [_INT.as_pointer()]).as_pointer()
Pool = Array(int64, 1, "C")
SHARED = Pool, int64, int64, int64  # the first arguments of loops that share: the pool, helpers, parts, the worker

# --- what is said to LLVM ---------------------------------------------------------------------------------------------


def _pointer(context: Any, builder: Any, signature: Any, values: Any) -> Any:
    words = context.make_array(signature.args[0])(context, builder, values[0])
    return builder.gep(words.data, [values[1]])


@intrinsic  # type: ignore[untyped-decorator]
def look(typing: Any, words: Any, place: Any) -> Any:
    """The word there, now."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.load_atomic(_pointer(context, builder, signature, values), "seq_cst", 8)

    return int64(words, int64), generate


def _change(how: str) -> Any:
    @intrinsic  # type: ignore[untyped-decorator]
    def change(typing: Any, words: Any, place: Any, value: Any) -> Any:
        """Change the word there; returns what was there before."""

        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            return builder.atomic_rmw(how, _pointer(context, builder, signature, values), values[2], "seq_cst")

        return int64(words, int64, int64), generate

    return change


add, exchange = _change("add"), _change("xchg")


@intrinsic  # type: ignore[untyped-decorator]
def _rest(typing: Any) -> Any:
    """Let the other thread of the core go first, where there is one, for some ten nanoseconds."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        if platform.machine().lower() in ("x86_64", "amd64"):
            nothing = ir.FunctionType(ir.VoidType(), [])
            builder.call(cgutils.get_or_insert_function(builder.module, nothing, "llvm.x86.sse2.pause"), [])
        return context.get_dummy_value()

    return void(), generate


@intrinsic  # type: ignore[untyped-decorator]
def _call(typing: Any, worker: Any, words: Any) -> Any:
    """Call the C function at an address."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        words = context.make_array(signature.args[1])(context, builder, values[1])
        builder.call(builder.inttoptr(values[0], _WORKS), [words.data])
        return context.get_dummy_value()

    return void(int64, words), generate


@intrinsic  # type: ignore[untyped-decorator]
def _lay_down(typing: Any, arguments: Any) -> Any:
    """Put arguments on the stack; returns the address, which is good until the caller returns."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.ptrtoint(cgutils.alloca_once_value(builder, values[0]), _INT)

    return int64(arguments), generate


def arguments(*kinds: Any) -> Any:
    """A function that returns a worker its arguments, which have these types."""
    kind = Tuple(kinds)

    @intrinsic  # type: ignore[untyped-decorator]
    def pick_up(typing: Any, words: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            words = context.make_array(signature.args[0])(context, builder, values[0])
            address = builder.load(builder.gep(words.data, [ir.Constant(_INT, _ARGUMENTS)]))
            pointer = builder.inttoptr(address, context.get_value_type(kind).as_pointer())
            return impl_ret_borrowed(context, builder, kind, builder.load(pointer))

        return kind(words), generate

    return pick_up


# --- the caller, helpers and workers ----------------------------------------------------------------------------------


@piece
def words_of(job):
    """The words that a worker is given the pointer to."""
    return carray(job, (WORDS,))


@piece
def next_part(words):
    """The number of a part that is now the worker's, or -1: there is none left. No memory is asked for from here on."""
    part = add(words, NEXT, 1)
    return part if part < words[_PARTS] else -1


@piece
def share(pool, helpers, parts, worker, arguments):
    """Have a worker do all parts of a job, here and in at most so many helpers, as far as they are awake and free.

    Raises MemoryError where there was not enough for a worker to begin, and no other did its parts.
    """
    shared = helpers > 0 and exchange(pool, OWNED, 1) == 0
    words = pool if shared else np.zeros(WORDS, np.int64)
    words[_WORKER], words[_ARGUMENTS], words[_PARTS], words[_HELPERS] = worker, _lay_down(arguments), parts, helpers
    exchange(words, NEXT, 0)
    exchange(words, OPEN, add(words, _JOBS, 1) + 1 if shared else 0)
    _call(worker, words)
    if shared:
        exchange(words, OPEN, 0)
        while look(words, INSIDE) > 0:
            _rest()
    begun = look(words, NEXT)
    if shared:
        exchange(words, OWNED, 0)
    if begun < parts:
        raise MemoryError("not enough memory for a compiled loop to work in")


@loop(Pool, Array(int64, 1, "C"))
def help_out(pool, done):
    """What a helper does: jobs, until there has been none for a while. Its last one is done[0], also after a sleep."""
    add(pool, AWAKE, 1)
    looks = 0
    while looks < _LOOKS and look(pool, STOPPED) == 0:
        looks += 1
        job = look(pool, OPEN)
        if job not in (0, done[0]) and look(pool, INSIDE) < look(pool, _HELPERS):
            others = add(pool, INSIDE, 1)
            if look(pool, OPEN) == job and others < pool[_HELPERS]:
                _call(pool[_WORKER], pool)
                looks, done[0] = 0, job  # nothing was left of it
            add(pool, INSIDE, -1)
        _rest()
    add(pool, AWAKE, -1)
