"""A stand-in for CuPy on NumPy memory that counts kernels, bytes, copies and waits. Install with install()."""

import collections
import contextlib
import ctypes
import os
import pathlib
import subprocess
import sys
import tempfile
import types
import warnings
import zlib

import numpy as np

COUNT = collections.Counter()
BYTES = collections.Counter()
WAITS = collections.Counter()
LOG = []
ON = [False]
CALC = [True]  # whether generic functions compute


def note(name, nbytes=0):
    if ON[0]:
        COUNT[name] += 1
        BYTES[name] += nbytes
        LOG.append(name)


def wait(name):
    if ON[0]:
        import traceback

        fr = [
            f"{f.filename.split('/xformer/')[-1]}:{f.lineno}"
            for f in traceback.extract_stack()
            if "/xformer/" in f.filename
        ]
        WAITS[name + " <- " + " <- ".join(reversed(fr[-3:]))] += 1


def reset():
    COUNT.clear()
    BYTES.clear()
    WAITS.clear()
    LOG.clear()


class _Device:
    id = 0

    def __eq__(self, o):
        return isinstance(o, _Device)

    def __hash__(self):
        return 0

    def __repr__(self):
        return "<CUDA Device 0>"

    def synchronize(self):
        wait("Device.synchronize")

    def __enter__(self):
        return self

    def __exit__(self, *a):
        pass


DEV = _Device()


class _Data:
    __slots__ = ("device", "device_id", "ptr")

    def __init__(self, p):
        self.ptr = p
        self.device_id = 0
        self.device = DEV


class _Flags:
    __slots__ = ("c_contiguous", "f", "f_contiguous")

    def __init__(self, f):
        self.f = f
        self.c_contiguous = f.c_contiguous
        self.f_contiguous = f.f_contiguous

    def __getitem__(self, k):
        return self.f[k]

    def __getattr__(self, k):
        return getattr(self.f, k)


VIEWS = {
    "reshape",
    "transpose",
    "broadcast_to",
    "expand_dims",
    "swapaxes",
    "squeeze",
    "moveaxis",
    "broadcast_arrays",
    "matrix_transpose",
    "shape",
    "ndim",
    "result_type",
    "iscomplexobj",
    "empty_like",
    "can_cast",
    "permute_dims",
    "may_share_memory",
    "shares_memory",
}


def base(x):
    if isinstance(x, ndarray):
        return x.view(np.ndarray)
    if isinstance(x, tuple):
        return tuple(base(i) for i in x)
    if isinstance(x, list):
        return [base(i) for i in x]
    if isinstance(x, dict):
        return {k: base(v) for k, v in x.items()}
    return x


def up(x):
    if isinstance(x, np.ndarray):
        return x.view(ndarray)
    if isinstance(x, np.generic):
        return np.asarray(x).view(ndarray)
    if isinstance(x, (tuple, list)):
        return type(x)(up(i) for i in x) if not hasattr(x, "_fields") else type(x)(*(up(i) for i in x))
    return x


class ndarray(np.ndarray):
    def __new__(cls, shape, dtype=float, *memory, **options):
        made = super().__new__(cls, shape, dtype, *memory, **options)
        if not memory and not options:  # kernels that write nothing leave zeros, not NaN that stops a training
            np.ndarray.fill(made, 0)
        return made

    __module__ = "cupy"
    __array_priority__ = 1e9

    @property
    def data(self):
        return _Data(self.ctypes.data)

    @property
    def device(self):
        return DEV

    @property
    def base(self):
        root = self
        while isinstance(owner := np.ndarray.base.__get__(root), np.ndarray):
            root = owner
        return None if root.size == self.size else up(root)

    def __array_ufunc__(self, uf, method, *inputs, out=None, **kw):
        nb = sum(i.nbytes for i in inputs if isinstance(i, np.ndarray))
        a = [base(i) for i in inputs]
        kw = {k: base(v) for k, v in kw.items()}
        if out is not None:
            kw["out"] = tuple(base(o) for o in out)
        r = getattr(uf, method)(*a, **kw)
        note(f"cupy.{uf.__name__}{'' if method == '__call__' else '.' + method}", nb + getattr(r, "nbytes", 0))
        if out is not None:
            return out[0]
        return up(r)

    def __array_function__(self, func, types_, args, kwargs):
        n = func.__name__
        before = sum(x.nbytes for x in _flat(args) if isinstance(x, np.ndarray))
        r = func(*base(args), **base(kwargs))
        isview = n in VIEWS and (
            n != "reshape" or any(isinstance(x, np.ndarray) and np.may_share_memory(x, r) for x in _flat(args))
        )
        if not isview:
            note(f"cupy.{n}", before + getattr(r, "nbytes", 0))
        return up(r)

    def reshape(self, *s, **k):
        r = np.ndarray.reshape(self, *s, **k)
        if r.size and not np.may_share_memory(self, r):
            note("cupy.copy(reshape)", 2 * r.nbytes)
        return r

    def astype(self, dtype, order="K", casting="unsafe", subok=True, copy=True):
        r = base(self).astype(dtype, order, casting, True, copy).view(ndarray)
        if not np.may_share_memory(self, r):
            note("cupy.astype", self.nbytes + r.nbytes)
        return r

    def copy(self, order="C"):
        note("cupy.copy", 2 * self.nbytes)
        return base(self).copy(order).view(ndarray)

    def __copy__(self):
        return self.copy()

    def __deepcopy__(self, memo):
        return self.copy()

    def fill(self, v):
        note("cupy.fill", self.nbytes)
        base(self).fill(v)

    def get(self, *a, **k):
        wait("get")
        return base(self).copy()

    def item(self, *a):
        wait("item")
        return base(self).item(*a)

    def tolist(self):
        wait("tolist")
        return base(self).tolist()

    def __bool__(self):
        wait("bool")
        return bool(base(self))

    def __int__(self):
        wait("int")
        return int(base(self))

    def __float__(self):
        wait("float")
        return float(base(self))

    def __index__(self):
        wait("index")
        return int(base(self))

    def __array__(self, *a, **k):
        raise TypeError("Implicit conversion to a NumPy array is not allowed")

    def __getitem__(self, k):
        r = base(self)[base(k)]
        r = np.asarray(r).view(ndarray)
        ks = k if isinstance(k, tuple) else (k,)
        if any(isinstance(i, (np.ndarray, list)) for i in ks):
            if any(isinstance(i, np.ndarray) and i.dtype == bool for i in ks):
                wait("boolean index")
            note("cupy.getitem(fancy)", 2 * r.nbytes)
        return r

    def __setitem__(self, k, v):
        ks = k if isinstance(k, tuple) else (k,)
        if any(isinstance(i, np.ndarray) and i.dtype == bool for i in ks):
            wait("boolean index")
        if any(isinstance(i, (np.ndarray, list)) for i in ks):
            note("cupy.setitem(scatter)", 2 * getattr(v, "nbytes", 0))
        elif isinstance(v, np.ndarray):
            note("cupy.setitem(copy)", 2 * v.nbytes)
        else:
            note("cupy.setitem(fill)", base(self)[base(k)].nbytes)
        np.ndarray.__setitem__(base(self), base(k), base(v))

    def argmax(self, *a, **k):
        return up(np.argmax(self, *a, **k))


def _flat(v):
    if isinstance(v, (list, tuple)):
        for i in v:
            yield from _flat(i)
    elif isinstance(v, dict):
        for i in v.values():
            yield from _flat(i)
    else:
        yield v


class Event:
    def __init__(self, disable_timing=False):
        pass

    def record(self, *a):
        return self

    def synchronize(self):
        wait("Event.synchronize")


class Stream:
    def __init__(self, *a, **k):
        self.capturing, self.ptr = False, id(self)

    def __enter__(self):
        return self

    def __exit__(self, *a):
        pass

    def record(self, event=None):
        return event or Event()

    def wait_event(self, e):
        pass

    def synchronize(self):
        wait("Stream.synchronize")

    def begin_capture(self):
        self.capturing = True
        LOG.append("BEGIN")
        COUNT["#captures"] += 1

    def end_capture(self):
        self.capturing = False
        LOG.append("END")
        return types.SimpleNamespace(launch=lambda s: note("#graph.launch"))


CUR = Stream()


class _Mem:
    def __init__(self, n):
        self.b = np.empty(n, np.uint8)
        self.ptr = self.b.ctypes.data


class MemoryPool:
    def __init__(self, allocator=None):
        pass

    def malloc(self, n):
        return _Mem(n)

    def total_bytes(self):
        return 0

    def free_all_blocks(self):
        pass


POOL = MemoryPool()


C = r"""
#include <stdint.h>
#include <stddef.h>
#include <string.h>
#define F(n) int n(void){return 0;}
F(cublasLtMatmulDescSetAttribute) F(cublasLtMatmulDescDestroy) F(cublasLtMatrixLayoutDestroy)
F(cublasLtMatmulPreferenceSetAttribute) F(cublasLtMatmulPreferenceDestroy)
F(cublasSetStream_v2) F(cublasSetWorkspace_v2)
int cublasLtMatmulDescCreate(void**p,int a,int b){*p=(void*)1;return 0;}
int cublasLtMatrixLayoutCreate(void**p,int a,uint64_t r,uint64_t c,int64_t l){*p=(void*)1;return 0;}
int cublasLtMatmulPreferenceCreate(void**p){*p=(void*)1;return 0;}
int cublasLtMatmulAlgoGetHeuristic(void*a,void*b,void*c,void*d,void*e,void*f,void*g,int n,char*res,
    int*count){memset(res,0,96);*count=1;return 0;}
static long lt=0, gemm=0, batched=0;
size_t cublasLtGetVersion(void){return 130000;}
int cublasLtMatmul(void){lt++;return 0;}
int cublasGemmEx(void){gemm++;return 0;}
int cublasGemmBatchedEx(void){batched++;return 0;}
int cublasGemmStridedBatchedEx(void){batched++;return 0;}
void counts(long*o){o[0]=lt;o[1]=gemm;o[2]=batched;}
"""


def build_lib():
    folder = tempfile.gettempdir()
    so = os.path.join(folder, f"libfake_{zlib.crc32(C.encode())}.so")
    if not os.path.exists(so):
        pathlib.Path(folder, "fake.c").write_text(C)
        subprocess.run(["gcc", "-O2", "-shared", "-fPIC", "-o", so, os.path.join(folder, "fake.c")], check=True)
    return so


class RawModule:
    def __init__(self, code, options, name_expressions):
        self.e = name_expressions

    def get_function(self, e):
        name = "our." + e

        def f(grid, block, args):
            if ON[0]:
                note(name, sum(a.nbytes for a in args if isinstance(a, np.ndarray)))

        return f


def start():
    """Prepare a script that counts: the stand-in, workloads, a cache of its own, and kernels that are not compared."""
    os.environ.setdefault("XDG_CACHE_HOME", os.path.join(tempfile.gettempdir(), "standin-cache"))
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    warnings.simplefilter("ignore")
    install()
    from xformer.ops import checks

    checks.Checks._compared = lambda *a, **k: ("", True)
    checks._RESULTS.set = lambda *a: None


def install():
    cupy = types.ModuleType("cupy")
    import importlib.machinery

    cupy.__spec__ = importlib.machinery.ModuleSpec("cupy", None)
    cupy.__path__ = []
    skip = {
        "ndarray",
        "array",
        "asarray",
        "zeros",
        "ones",
        "empty",
        "full",
        "arange",
        "linspace",
        "eye",
        "tri",
        "frombuffer",
    }
    for n in dir(np):
        if not n.startswith("_") and n not in skip:
            setattr(cupy, n, getattr(np, n))
    cupy.ndarray = ndarray
    cupy.__version__ = "14.2.0-fake"

    def creator(n):
        f = getattr(np, n)

        def g(*a, **k):
            k.pop("device", None)
            r = f(*base(a), **base(k)).view(ndarray)
            if n not in ("empty",):
                note(f"cupy.{n}", r.nbytes)
            return r

        return g

    for n in ("zeros", "ones", "full", "arange", "linspace", "eye", "tri"):
        setattr(cupy, n, creator(n))
    # Kernels write nothing, so that what they return is 0.
    cupy.empty = lambda s, dtype=float, order="C": np.zeros(s, dtype).view(ndarray)

    def asarray(a, dtype=None, order=None, **k):
        if isinstance(a, ndarray):
            return a if dtype is None or a.dtype == dtype else a.astype(dtype)
        r = np.array(a, dtype).view(ndarray)
        note("H2D copy", r.nbytes)
        return r

    cupy.asarray = asarray

    def array(a, dtype=None, copy=True, **k):
        if isinstance(a, ndarray) and not copy:
            return asarray(a, dtype)
        if isinstance(a, ndarray):
            return a.astype(dtype or a.dtype)
        return asarray(a, dtype)

    cupy.array = array
    cuda = types.ModuleType("cupy.cuda")
    cuda.runtime = types.SimpleNamespace(
        getDevice=lambda: 0,
        getDeviceCount=lambda: 1,
        getDeviceProperties=lambda d: {"name": b"FAKE H100", "major": 9, "minor": 0, "multiProcessorCount": 132},
        driverGetVersion=lambda: 13000,
        runtimeGetVersion=lambda: 13000,
        memGetInfo=lambda: (80 * 2**30, 80 * 2**30),
    )
    cuda.get_current_stream = lambda: CUR
    cuda.Stream = Stream
    cuda.Event = Event
    cuda.MemoryPool = MemoryPool
    cuda.is_available = lambda: True
    cuda.Device = lambda *a: DEV
    cuda.using_allocator = lambda m: contextlib.nullcontext()
    cuda.device = types.SimpleNamespace(get_cublas_handle=lambda: 12345)
    cupy.cuda = cuda
    cupy.get_default_memory_pool = lambda: POOL
    cupy.RawModule = RawModule
    cupy.dtype = np.dtype
    sys.modules["cupy"] = cupy
    sys.modules["cupy.cuda"] = cuda
    # array_api_compat.cupy built from that of numpy
    import array_api_compat.numpy as nxp

    m = types.ModuleType("array_api_compat.cupy")
    for n in dir(nxp):
        if not n.startswith("__"):
            setattr(m, n, getattr(nxp, n))
    m.RawModule = RawModule
    m.ndarray = ndarray
    m.__all__ = [n for n in dir(m) if not n.startswith("_")]

    def adapt(n):
        f = getattr(nxp, n)

        def g(*a, **k):
            k.pop("device", None)
            return up(f(*base(a), **base(k)))

        return g

    for n in ("zeros", "ones", "full", "arange", "linspace", "eye", "empty"):

        def mk(n):
            f = getattr(cupy, n)

            def g(*a, dtype=None, device=None, **k):
                if n in ("arange", "linspace", "full") and dtype is None:
                    return f(*a, **k)
                return f(*a, dtype=dtype or float, **k) if n != "full" else f(*a, dtype=dtype, **k)

            return g

        setattr(m, n, mk(n))

    def full_like(x, v, dtype=None, device=None):
        note("cupy.full_like", x.nbytes)
        return np.full(x.shape, v, dtype or x.dtype).view(ndarray)

    m.zeros_like = lambda x, dtype=None, device=None: full_like(x, 0, dtype)
    m.ones_like = lambda x, dtype=None, device=None: full_like(x, 1, dtype)
    m.full_like = full_like
    m.empty_like = lambda x, dtype=None, device=None: np.zeros(x.shape, dtype or x.dtype).view(ndarray)

    def xasarray(a, dtype=None, device=None, copy=None, **k):
        if isinstance(a, ndarray):
            if copy:
                return a.astype(dtype or a.dtype)
            return a if dtype is None or a.dtype == dtype else a.astype(dtype)
        return asarray(a, dtype)

    m.asarray = xasarray
    m.astype = lambda x, dtype, copy=True, device=None: x if (not copy and x.dtype == dtype) else x.astype(dtype)

    def rname(n):
        f = getattr(nxp, n)

        def g(*a, **k):
            k = dict(k.items())
            nb = sum(x.nbytes for x in _flat(a) if isinstance(x, np.ndarray))
            r = up(f(*base(a), **base(k)))
            note("cupy." + n, nb + sum(x.nbytes for x in _flat(r) if isinstance(x, np.ndarray)))
            return r

        return g

    for n in (
        "sum",
        "max",
        "min",
        "mean",
        "argmax",
        "argsort",
        "sort",
        "any",
        "all",
        "cumulative_sum",
        "take",
        "take_along_axis",
        "concat",
        "stack",
        "where",
        "matmul",
        "searchsorted",
        "tile",
        "repeat",
        "count_nonzero",
        "var",
        "std",
        "isin",
        "prod",
        "clip",
        "cumulative_prod",
        "tril",
        "triu",
        "flip",
        "roll",
        "logaddexp",
    ):
        if hasattr(nxp, n):
            setattr(m, n, rname(n))

    def reshape(x, shape, *, copy=None):
        return x.reshape(shape)

    m.reshape = reshape
    m.permute_dims = lambda x, axes: base(x).transpose(axes).view(ndarray)
    m.matrix_transpose = lambda x: base(x).swapaxes(-1, -2).view(ndarray)
    m.broadcast_to = lambda x, s: np.broadcast_to(base(x), s).view(ndarray)
    m.expand_dims = lambda x, *, axis=0: np.expand_dims(base(x), axis).view(ndarray)
    m.squeeze = lambda x, axis: np.squeeze(base(x), axis).view(ndarray)
    m.moveaxis = lambda x, a, b: np.moveaxis(base(x), a, b).view(ndarray)
    m.ascontiguousarray = lambda x: x.copy()
    m.asfortranarray = lambda x: x if x.flags.f_contiguous else x.copy("F")
    m.copyto = lambda a, b: note("cupy.copyto", 2 * b.nbytes)
    m.ndarray = ndarray
    m.RawModule = RawModule
    m.cuda = cuda
    sys.modules["array_api_compat.cupy"] = m
    import array_api_compat

    array_api_compat.cupy = m
    # libraries
    so = build_lib()
    import xformer.kernels.cupy.cublas as cb
    from xformer.kernels.cupy import calls

    calls.view = lambda x, offset, shape, strides: ndarray(shape, x.dtype, x, offset, strides)
    ctypes.CDLL(so)
    cb.loaded = lambda name: ctypes.CDLL(so)
    import xformer.kernels.cupy.cublaslt as lt

    lt._MIN_OPERATIONS = 1 << 62  # no times are measured
    # cudnn
    import xformer.kernels.cupy.cudnn_plans as cp

    class T:
        n = 0

        def __init__(s):
            T.n += 1
            s.u = T.n

        def get_uid(s):
            return s.u

        def set_output(s, *a):
            return s

        set_dim = set_stride = set_data_type = set_output

    class G:
        def __init__(s, **k):
            s.back = False
            s._lowered_graph = types.SimpleNamespace(_execute=s._x)
            s.selected_engine = None

        def tensor(s, **k):
            return T()

        def sdpa(s, **k):
            return T(), T()

        def sdpa_backward(s, **k):
            s.back = True
            return T(), T(), T()

        def build(s, *a):
            pass

        def serialize(s):
            return []

        def deserialize(s, *a):
            raise RuntimeError("plans are not kept")

        def get_workspace_size(s):
            return 256

        def _x(s, *a):
            note("cudnn.sdpa_backward" if s.back else "cudnn.sdpa")

        def execute(s, *a, **k):
            s._x()

    class E(Exception):
        pass

    fake = types.SimpleNamespace(
        data_type=types.SimpleNamespace(HALF=1, BFLOAT16=2, FLOAT=3, INT32=4),
        heur_mode=types.SimpleNamespace(A=1, FALLBACK=2),
        diagonal_alignment=types.SimpleNamespace(TOP_LEFT=1, BOTTOM_RIGHT=2),
        cudnnGraphNotSupportedError=E,
        __version__="1.32.0",
        create_handle=lambda: types.SimpleNamespace(backend_handle=1),
        set_stream=lambda handle, stream: None,
        pygraph=lambda **k: G(**k),
        backend_version=lambda: 91900,
    )
    cp.frontend = lambda: (fake, None)
    # count products
    import xformer.kernels.cupy.cublaslt as lt

    orig = lt._check

    def check(function, *a):
        if function == "Matmul":
            note("cublasLt.Matmul")
        return orig(function, *a)

    COUNTED["lt"] = (lt, orig, check)
    D = cb._Direct
    o2 = D._enqueue

    def g2(self, function, handle, *a):
        note(function.replace("cublas", "cublas."))
        return o2(self, function, handle, *a)

    COUNTED["cb"] = (D, o2, g2)
    return cupy


COUNTED = {}


def counting(on):
    ON[0] = on
    lt, o, c = COUNTED["lt"]
    lt._check = c if on else o
    D, o2, g2 = COUNTED["cb"]
    D._enqueue = g2 if on else o2


def report(title):
    kernels = sum(v for k, v in COUNT.items() if not k.startswith(("#", "H2D")))
    print(f"== {title}: {kernels} kernels, {sum(BYTES.values()) / 1e9:.3f} GB noted")
    for k, v in COUNT.most_common():
        print(f"   {v:5d}  {BYTES[k] / 1e6:10.1f} MB  {k}")
    for k, v in WAITS.most_common():
        print(f"   WAIT {v}  {k}")
