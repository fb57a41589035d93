"""Measure CuPy on an NVIDIA GPU within six minutes: `python bench/gpu_measure.py DIR [--seconds 350] [--only A,B]`.

It tests, probes and measures CuPy against torch (eager, torch.compile, CUDA graphs) and JAX if installed, in one
process, in turns, on the same card; prints a short table last, and writes measure.json, measure.txt and log.txt to DIR.
Every section has a time limit of its own, and no failure affects the others. `--dry` runs all sections at tiny sizes on
NumPy and torch's CPU build, to test the script itself without a GPU.

Sections: versions, cold, prepare (tests and compilation, in parallel), ceilings, train, encoder, decode, lm, attention,
gemm, fit, kernels, host, memory, train2. Run it in the root of the checkout.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import json
import math
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback

ROOT = pathlib.Path(__file__).resolve().parents[1]
if not (ROOT / "bench" / "workloads").is_dir():  # run from elsewhere: XFORMER_ROOT names the checkout
    ROOT = pathlib.Path(os.environ.get("XFORMER_ROOT", ".")).resolve()
sys.path[:0] = [str(ROOT / "bench"), str(ROOT)]
os.environ.setdefault("XFORMER_DETERMINISTIC", "0")  # as torch, whose attention sums in any order
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(pathlib.Path(tempfile.gettempdir()) / "inductor"))
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

parser = argparse.ArgumentParser()
parser.add_argument("folder", nargs="?", default=os.environ.get("OUT", "out"))
parser.add_argument("--seconds", type=float, default=350.0)
parser.add_argument("--only", default="")
parser.add_argument("--skip", default="")
parser.add_argument("--dry", action="store_true")
parser.add_argument("--warm", default="", help="internal: compile this torch model and exit")
ARGS = parser.parse_args()
DRY, START = ARGS.dry, time.monotonic()
OUT = pathlib.Path(ARGS.folder)
BACKEND, DEVICE = ("numpy", "cpu") if DRY else ("cupy", "cuda")
DTYPE = "float32" if DRY else "bfloat16"
RESULTS: dict = {}
ROWS: list[tuple] = []  # (row, ours, best peer, its name, ratio, goal)
GOALS = {"encoder": 1.2, "train": 1.3, "attention": 1.0, "decode": 4.0, "lm": 1.0, "gemm": 1.0}


def say(*parts):
    print(f"[{time.monotonic() - START:5.0f} s]", *parts, flush=True)
    with (OUT / "log.txt").open("a") as file:
        print(*parts, file=file)


def left():
    return ARGS.seconds - (time.monotonic() - START)


def save():
    (OUT / "measure.json").write_text(json.dumps(RESULTS, indent=1, default=str))


class Late(Exception):
    """A section's time is over."""


def section(name, seconds):
    """Run a function at once, within its time limit, and record its answers."""

    def decorate(function):
        names = [each for each in ARGS.only.split(",") if each]
        if (names and name not in names) or name in ARGS.skip.split(","):
            return function
        limit = min(seconds, left() - 8.0)
        if limit < 4.0:
            RESULTS[name] = {"skipped": "time limit reached"}
            return function
        start = time.monotonic()

        def expire(*_):
            raise Late(f"{name} exceeded {limit:.0f} s")

        before = signal.signal(signal.SIGALRM, expire)
        signal.setitimer(signal.ITIMER_REAL, limit)
        answers = RESULTS.setdefault(name, {})
        try:
            function(answers)
        except (Exception, Late) as error:
            answers["failed"] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            (OUT / "errors.txt").open("a").write(f"== {name}\n{traceback.format_exc()}\n")
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        answers["seconds"] = round(time.monotonic() - start, 1)
        say(name, f"{answers['seconds']} s", answers.get("failed", ""))
        save()
        release()
        return function

    return decorate


def release():
    gc.collect()
    with contextlib.suppress(Exception):
        cupy = importlib.import_module("cupy")
        cupy.get_default_memory_pool().free_all_blocks()
        for idle in sys.modules["xformer.kernels.cupy.graph"]._idle.values():  # pools that nothing uses any more
            for resources in idle:
                resources.pool.free_all_blocks()
    with contextlib.suppress(Exception):
        importlib.import_module("torch").cuda.empty_cache()


def synchronize():
    if not DRY:
        importlib.import_module("cupy").cuda.runtime.deviceSynchronize()


def turns(contenders, *, rounds=5, least=0.03):
    """Time contenders in turns: medians of the seconds per step (enqueued) and of one step with its wait.

    contenders: name -> step(), which enqueues; the first is ours. A contender that fails is recorded and left out.
    """
    repeats, dead, times, single = {}, {}, {}, {}
    for name, step in contenders.items():
        try:
            for _ in range(3):
                step()
            synchronize()
            start = time.perf_counter()
            step()
            synchronize()
            repeats[name] = max(1, min(200, math.ceil(least / max(1e-6, time.perf_counter() - start))))
            times[name], single[name] = [], []
        except Late:
            raise
        except Exception as error:
            dead[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
    names = list(times)
    for number in range(rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            step = contenders[name]
            start = time.perf_counter()
            for _ in range(repeats[name]):
                step()
            synchronize()
            times[name].append((time.perf_counter() - start) / repeats[name])
            start = time.perf_counter()
            step()
            synchronize()
            single[name].append(time.perf_counter() - start)
    result = {
        name: {
            "ms": round(1e3 * statistics.median(times[name]), 4),
            "single_ms": round(1e3 * statistics.median(single[name]), 4),
            "spread": round((max(times[name]) - min(times[name])) / statistics.median(times[name]), 3),
        }
        for name in names
    }
    return {**result, **{name: {"unavailable": reason} for name, reason in dead.items()}}


def row(kind, name, result, ours=lambda name: name.startswith("xformer")):
    """Add a row to the table: our fastest contender against the fastest peer."""
    good = {key: value["ms"] for key, value in result.items() if "ms" in value}
    own = {key: ms for key, ms in good.items() if ours(key)}
    peers = {key: ms for key, ms in good.items() if not ours(key)}
    if own:
        best = min(own, key=own.get)
        peer = min(peers, key=peers.get) if peers else ""
        ratio = peers[peer] / own[best] if peer else math.nan
        ROWS.append(
            (
                f"{kind}: {name}",
                f"{own[best]:.3f} ({best})",
                f"{peers.get(peer, math.nan):.3f}",
                peer,
                ratio,
                GOALS.get(kind, 1.0),
            )
        )
    RESULTS.setdefault(kind, {})[name] = result


def steps(computation, context=None):
    """Return step() of a Computation of the benchmarks."""
    count = iter(range(10**9))
    if context is None:
        return lambda: computation.step(next(count))

    def run():
        with context():
            return computation.step(next(count))

    return run


# --- compilation by torch in processes of their own, whose results torch's caches keep ----------------------------


def torch_encoder(settings, mode):
    torch, models = importlib.import_module("torch"), importlib.import_module("baselines.torch_models")
    stacks, support = importlib.import_module("workloads.stacks"), importlib.import_module("baselines.torch_support")
    d_model, heads = settings["heads"] * settings["head_dim"], settings["heads"]
    layer = torch.nn.TransformerEncoderLayer(d_model, heads, 4 * d_model, dropout=0.0, batch_first=True)
    module = torch.nn.TransformerEncoder(layer, settings["layers"], enable_nested_tensor=False)
    for theirs, ours in zip(module.layers, stacks.encoder_layers(settings, "numpy"), strict=True):
        models.load_layer(theirs, ours)
    module = module.to(**support.device_and_dtype({**settings, "device": DEVICE})).eval()
    x = torch.from_numpy(stacks.features(settings)).to(**support.device_and_dtype({**settings, "device": DEVICE}))
    forward = support.compiled(module, {"compiled": True if mode == "default" else mode})

    def step():
        with torch.inference_mode():
            return forward(x)

    return step


def torch_train(settings, mode):
    theirs = importlib.import_module("baselines.torch_training")
    compiled = True if mode == "default" else mode or False
    return theirs.build({**settings, "device": DEVICE, "compiled": compiled})  # which makes the first steps


def train_settings(tokens, vocabulary=32_000):
    training = importlib.import_module("workloads.training")
    model = {"length": 32, "heads": 8, "head_dim": 64, "layers": 6, "vocabulary": vocabulary, "dtype": DTYPE}
    if DRY:
        model |= {"heads": 2, "head_dim": 8, "layers": 1, "vocabulary": 50}
    return training.workload({**model, "batch": max(2, tokens // 32)}).settings


ENCODERS = {
    "8x2048, d 1024": {"batch": 8, "length": 2048, "heads": 16, "head_dim": 64, "layers": 6, "dtype": DTYPE},
    "32x128, d 768": {"batch": 32, "length": 128, "heads": 12, "head_dim": 64, "layers": 6, "dtype": DTYPE},
    "1x128, d 768": {"batch": 1, "length": 128, "heads": 12, "head_dim": 64, "layers": 6, "dtype": DTYPE},
}
if DRY:
    ENCODERS = {"2x16, d 16": {"batch": 2, "length": 16, "heads": 2, "head_dim": 8, "layers": 1, "dtype": DTYPE}}
TRAIN_TOKENS = 64 if DRY else 32_768

if ARGS.warm:
    if ARGS.warm == "train":
        torch_train(train_settings(TRAIN_TOKENS), "default").step(0)
    else:
        torch_encoder(ENCODERS[ARGS.warm], "default")()
    sys.exit()

OUT.mkdir(parents=True, exist_ok=True)


@section("versions", 25)
def _(answers):
    for name in ("cupy", "torch", "jax", "transformers", "cudnn", "xformer"):
        try:
            answers[name] = getattr(importlib.import_module(name), "__version__", "?")
        except Exception as error:
            answers[name] = f"{type(error).__name__}: {str(error)[:80]}"
    answers["card"] = (
        subprocess.run(
            [
                "nvidia-smi",
                "--query-gpu=name,driver_version,clocks.sm,clocks.mem,power.limit,memory.total",
                "--format=csv,noheader",
            ],
            capture_output=True,
            text=True,
            check=False,
        ).stdout.strip()
        if not DRY
        else "none"
    )
    if not DRY:
        probes = importlib.import_module("gpu_probes")
        answers["libraries"] = probes.libraries()
    say(answers)


COLD = """
import os, sys, time, warnings
warnings.simplefilter("ignore")
t = [time.perf_counter()]
def lap(): t.append(time.perf_counter()); return round(t[-1] - t[-2], 3)
import xformer as xf; a = lap()
from xformer.backends import resolve, from_host
xp = resolve(sys.argv[1]); b = lap()
import numpy as np
x = from_host(xp, np.zeros((2, 2), "float32")); c = lap()
config = xf.TransformerConfig(source_vocab_size=1000, target_vocab_size=1000, d_model=256, num_heads=4,
    d_ff=1024, num_encoder_layers=2, num_decoder_layers=2, dropout=0.1)
model = xf.Transformer(config, xp=sys.argv[1], seed=0); ids = from_host(xp, np.full((8, 32), 5)); d = lap()
def wait():
    if sys.argv[1] == "cupy":
        import cupy; cupy.cuda.runtime.deviceSynchronize()
model(ids, ids); wait(); e = lap()
from xformer.training import Adam, train_step
from xformer.training.precision import autocast
from xformer.training.loss import translation_loss
from xformer.data.pairs import Batch, TokenPairs
batch = Batch.make(TokenPairs([[5] * 30] * 8, [[6] * 30] * 8), list(range(8)), xp=xp)
opt = Adam(); state = opt.init(model)
r = train_step(model, state, [batch], xf.Rng(0), loss_fn=autocast(sys.argv[2], translation_loss),
    optimizer=opt, learning_rate=1e-4); float(r.loss); f = lap()
from xformer.generation import generate
generate(model, [[5, 6, 7]], max_new_tokens=16); g = lap()
import json
print(json.dumps({"import xformer": a, "import library": b, "first array": c, "model": d,
    "first forward": e, "first training step": f, "first search": g, "all": round(t[-1] - t[0], 2)}))
"""


@section("cold", 45)
def _(answers):
    """Times of first calls with empty caches, with filled ones, and without comparisons of kernels."""
    with tempfile.TemporaryDirectory() as home:
        for name, extra in (
            ("empty caches", {}),
            ("second process", {}),
            ("empty, no comparison", {"XFORMER_CHECK_KERNELS": "0", "other": "1"}),
        ):
            folder = home + ("/other" if "other" in extra else "")
            env = {
                **os.environ,
                "HOME": folder,
                "XDG_CACHE_HOME": folder,
                "CUPY_CACHE_DIR": folder + "/cupy",
                "CUDA_CACHE_PATH": folder + "/nv",
                "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
                **extra,
            }
            os.makedirs(folder, exist_ok=True)
            done = subprocess.run(
                [sys.executable, "-c", COLD, BACKEND, DTYPE],
                capture_output=True,
                text=True,
                env=env,
                cwd=ROOT,
                timeout=40,
                check=False,
            )
            lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
            answers[name] = json.loads(lines[-1]) if lines else done.stderr[-300:]
            say(name, answers[name])


@section("prepare", 105)
def _(answers):
    """Run tests and compile torch's models in parallel; nothing is measured meanwhile."""
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), str(ROOT / "bench"), os.environ.get("PYTHONPATH")))),
    }
    jobs = {}
    if not DRY:
        tests = ["tests/ops", "tests/tracing", "tests/training", "tests/generation", "tests/backends"]
        options = ["-m", "gpu", "-q", "--no-header", "--tb=line", "--maxfail=30", f"--junitxml={OUT / 'tests.xml'}"]
        if importlib.util.find_spec("xdist"):
            options += ["-n", "6", "--dist", "loadfile"]
        jobs["tests"] = [sys.executable, "-m", "pytest", *tests, *options]
    for name in ("train", *ENCODERS):
        jobs[f"compile {name}"] = [sys.executable, __file__, str(OUT), "--warm", name, *(["--dry"] if DRY else [])]
    started = {}
    for name, command in jobs.items():
        log = (OUT / f"{name.replace(' ', '_').replace(',', '')}.log").open("w")
        started[name] = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**env, "XFORMER_ROOT": str(ROOT)},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    end = time.monotonic() + (95.0 if not DRY else 60.0)
    while time.monotonic() < end and any(process.poll() is None for process in started.values()):
        time.sleep(0.5)
    for name, process in started.items():
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # our own process group
        answers[name] = process.wait()
    log = OUT / "tests.log"
    answers["tests said"] = log.read_text().strip().splitlines()[-1:] if log.exists() else None
    say(answers)


if not DRY:
    cupy = importlib.import_module("cupy")
torch = importlib.import_module("torch")
if DRY:
    torch.compile = lambda module, **options: module  # compiling takes minutes
np = importlib.import_module("numpy")
xf = importlib.import_module("xformer")
Backend = importlib.import_module("xformer.benchmarks.computation").Backend
torch.set_grad_enabled(True)


def jax_encoder(settings):
    """Return a plain encoder in JAX with cuDNN's attention."""
    jax, jnp = importlib.import_module("jax"), importlib.import_module("jax.numpy")
    heads, size, layers = settings["heads"], settings["head_dim"], settings["layers"]
    d = heads * size
    keys = iter(jax.random.split(jax.random.key(0), 6 * layers + 1))
    dtype = getattr(jnp, settings["dtype"])
    draw = lambda *shape: (jax.random.normal(next(keys), shape) * shape[0] ** -0.5).astype(dtype)  # noqa: E731
    parameters = [(draw(d, 3 * d), draw(d, d), draw(d, 4 * d), draw(4 * d, d)) for _ in range(layers)]
    x = jax.random.normal(next(keys), (settings["batch"], settings["length"], d)).astype(dtype)

    def norm(x):
        y = x.astype(jnp.float32)
        y = y - y.mean(-1, keepdims=True)
        return (y * jax.lax.rsqrt((y * y).mean(-1, keepdims=True) + 1e-5)).astype(x.dtype)

    @jax.jit
    def forward(parameters, x):
        for qkv, out, up, down in parameters:
            q, k, v = jnp.split((x @ qkv).reshape(*x.shape[:2], 3 * heads, size), 3, axis=2)
            y = jax.nn.dot_product_attention(q, k, v, implementation=None if DRY else "cudnn")
            x = norm(x + y.reshape(x.shape) @ out)
            x = norm(x + jax.nn.relu(x @ up) @ down)
        return x

    return lambda: jax.block_until_ready(forward(parameters, x)) if DRY else forward(parameters, x)


def torch_lm(sizes, batch, prompt, tokens):
    """Return greedy search by plain torch: static cache, one CUDA graph for a step, tokens stay on the device."""
    d, heads, kv, ff, layers, vocabulary = sizes.values()
    size, length = d // heads, prompt + tokens
    dtype, functional = getattr(torch, DTYPE), torch.nn.functional
    draw = lambda *shape: torch.randn(*shape, device=DEVICE, dtype=dtype) * shape[-1] ** -0.5  # noqa: E731
    blocks = [(draw((heads + 2 * kv) * size, d), draw(d, d), draw(2 * ff, d), draw(d, ff)) for _ in range(layers)]
    table, output = draw(vocabulary, d), draw(vocabulary, d)
    cache = [torch.zeros(2, batch, kv, length, size, device=DEVICE, dtype=dtype) for _ in range(layers)]
    angles = torch.arange(length, device=DEVICE)[:, None] / 10000 ** (torch.arange(0, size, 2, device=DEVICE) / size)
    cos, sin = angles.cos().repeat(1, 2).to(dtype), angles.sin().repeat(1, 2).to(dtype)
    one, places = torch.ones(d, device=DEVICE, dtype=dtype), torch.arange(length, device=DEVICE)

    def rotate(x, at):
        a, b = x.chunk(2, -1)
        return x * cos[at] + torch.cat((-b, a), -1) * sin[at]

    def forward(ids, at):
        x = table[ids]
        mask = places[None, :] <= at[:, None]
        for (qkv, out, up, down), (keys, values) in zip(blocks, cache, strict=True):
            y = functional.rms_norm(x, (d,), one) @ qkv.T
            q, k, v = y.view(*ids.shape, heads + 2 * kv, size).transpose(1, 2).split((heads, kv, kv), 1)
            q, k = rotate(q, at), rotate(k, at)
            keys.index_copy_(2, at, k)
            values.index_copy_(2, at, v)
            y = functional.scaled_dot_product_attention(q, keys, values, mask, enable_gqa=True)
            x = x + y.transpose(1, 2).reshape(x.shape) @ out.T
            gate, y = (functional.rms_norm(x, (d,), one) @ up.T).chunk(2, -1)
            x = x + (functional.silu(gate) * y) @ down.T
        return (x[:, -1] @ output.T).argmax(-1, keepdim=True)

    prompts = torch.randint(0, vocabulary, (batch, prompt), device=DEVICE)
    current, position = (
        torch.zeros(batch, 1, dtype=torch.long, device=DEVICE),
        torch.zeros(1, dtype=torch.long, device=DEVICE),
    )

    @torch.no_grad()
    def one_step():
        current.copy_(forward(current, position))
        position.add_(1)

    graph = None
    if not DRY:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            one_step()
            one_step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            one_step()

    @torch.no_grad()
    def run():
        current.copy_(forward(prompts, places[:prompt]))
        position.fill_(prompt)
        found = [current.clone()]
        for _ in range(tokens - 1):
            one_step() if graph is None else graph.replay()
            found.append(current.clone())
        return torch.cat(found, 1).tolist()

    return run


@section("ceilings", 15)
def _(answers):
    if DRY:
        return
    x = torch.empty(2**30, dtype=torch.bfloat16, device="cuda").normal_()
    y = torch.empty_like(x)
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    result = turns({"copy": lambda: y.copy_(x), "matmul": lambda: a @ a}, rounds=3, least=0.1)
    answers["TB/s"] = round(2 * x.nbytes / result["copy"]["ms"] / 1e9, 3)
    answers["TFLOP/s bf16"] = round(2 * 8192**3 / result["matmul"]["ms"] / 1e9)
    say(answers)


@section("train", 75)
def _(answers):
    training, settings = importlib.import_module("workloads.training"), train_settings(TRAIN_TOKENS)
    contenders = {
        "xformer jit": steps(training.build({**settings, "backend": BACKEND, "jit": True})),
        "xformer eager": steps(training.build({**settings, "backend": BACKEND, "jit": False})),
        "torch eager": steps(torch_train(settings, None)),
        "torch compile": steps(torch_train(settings, "default")),
    }
    row("train", f"{TRAIN_TOKENS} tokens", turns(contenders, rounds=4, least=0.1))


@section("encoder", 45)
def _(answers):
    stacks = importlib.import_module("workloads.stacks")
    for name, settings in ENCODERS.items():
        if left() < 60:
            break
        backend = Backend(BACKEND, DTYPE)
        layers, x = stacks.encoder_layers(settings, backend.xp, backend.dtype), backend.array(stacks.features(settings))

        def forward(layers, x):
            for layer in layers:
                x = layer(x)
            return x

        jitted = xf.jit(forward)
        contenders = {"xformer jit": lambda: jitted(layers, x), "xformer eager": lambda: forward(layers, x)}
        for mode in (None, "default", "reduce-overhead"):
            with contextlib.suppress(ImportError):
                contenders[f"torch {mode or 'eager'}"] = torch_encoder(settings, mode)
        with contextlib.suppress(ImportError):
            contenders["jax jit"] = jax_encoder(settings)
        row("encoder", name, turns(contenders, rounds=5, least=0.05))
        release()


@section("decode", 45)
def _(answers):
    """Greedy search of an encoder-decoder against Hugging Face, tokens compared."""
    decoding = importlib.import_module("workloads.decoding")
    base = {"length": 32, "heads": 8, "head_dim": 64, "layers": 6, "vocabulary": 8000, "beam": 1}
    base = {"length": 6, "heads": 2, "head_dim": 8, "layers": 1, "vocabulary": 50, "beam": 1} if DRY else base
    for batch, dtype in ((1, "float32"), (32, "float32"), (1, DTYPE), (32, DTYPE)) if not DRY else ((1, "float32"),):
        if left() < 25:
            break
        settings = {**base, "batch": batch, "dtype": dtype}
        contenders = {"xformer": steps(decoding.build({**settings, "backend": BACKEND}))}
        with contextlib.suppress(ImportError):
            hugging = importlib.import_module("baselines.huggingface_decoding").build({**settings, "device": DEVICE})
            contenders["Hugging Face"] = steps(hugging, hugging.context)
        row("decode", f"batch {batch}, {decoding.NUM_TOKENS} tokens, {dtype}", turns(contenders, rounds=3, least=0.01))


@section("lm", 60)
def _(answers):
    """A Llama-like model: prompt and tokens, against torch with a static cache in a CUDA graph (as gpt-fast), bf16."""
    sizes = (
        {"d": 2048, "heads": 32, "kv": 8, "ff": 8192, "layers": 16, "vocabulary": 32_000}
        if not DRY
        else {"d": 32, "heads": 4, "kv": 2, "ff": 64, "layers": 1, "vocabulary": 50}
    )
    config = xf.LanguageModelConfig(
        vocab_size=sizes["vocabulary"],
        num_layers=sizes["layers"],
        d_model=sizes["d"],
        num_heads=sizes["heads"],
        num_key_value_heads=sizes["kv"],
        d_ff=sizes["ff"],
        activation="swiglu",
        norm="rms",
        positions="rotary",
        attention_bias=False,
        feed_forward_bias=False,
        tie_output=False,
        scale_embeddings=False,
        dropout=0.0,
        eos_id=None,
    )
    tokens, prompt = (128, 128) if not DRY else (8, 4)
    generate = importlib.import_module("xformer.generation").generate
    model = xf.LanguageModel(config, xp=BACKEND, seed=0, dtype=DTYPE)
    for batch in (1, 16) if not DRY else (1,):
        prompts = np.random.default_rng(0).integers(4, sizes["vocabulary"], (batch, prompt)).tolist()
        contenders = {
            "xformer": lambda prompts=prompts: generate(model, prompts, max_new_tokens=tokens, special_tokens=False)
        }
        if batch == 1 and left() > 60 and not DRY:
            quantized = model.to(dtype="float32").quantize("int8")
            contenders["xformer int8"] = lambda prompts=prompts, quantized=quantized: generate(
                quantized, prompts, max_new_tokens=tokens, special_tokens=False
            )
        contenders["torch CUDA graph"] = torch_lm(sizes, batch, prompt, tokens)
        result = turns(contenders, rounds=2, least=0.01)
        row("lm", f"batch {batch}, {prompt} + {tokens} tokens", result)
        weights = (
            2 * sum(math.prod(array.shape) for _, array in model.named_parameters())
            - 2 * sizes["vocabulary"] * sizes["d"]
        )
        answers[f"batch {batch}, floor"] = (
            f"{weights * tokens / 3.0e12 * 1e3:.1f} ms at 3.0 TB/s, {weights * tokens / 4.3e12 * 1e3:.1f} ms at 4.3"
        )
        say(answers[f"batch {batch}, floor"], result)


@section("attention", 60)
def _(answers):
    """Forward, and forward and backward, of many kinds of calls, against the fastest kernel of torch."""
    attend, vjp = importlib.import_module("xformer.ops").attention, xf.vjp
    kinds = {  # batch, heads, key heads, queries, keys, head_dim, causal, mask, dtype
        "4x16x4096x128 causal": (4, 16, 16, 4096, 4096, 128, True, False, DTYPE),
        "4x16x4096x128": (4, 16, 16, 4096, 4096, 128, False, False, DTYPE),
        "8x16x2048x64": (8, 16, 16, 2048, 2048, 64, False, False, DTYPE),
        "2x32/8x4096x128 causal grouped": (2, 32, 8, 4096, 4096, 128, True, False, DTYPE),
        "32x12x512x64 padded": (32, 12, 12, 512, 512, 64, False, True, DTYPE),
        "1024x8x32x64 padded": (1024, 8, 8, 32, 32, 64, False, True, DTYPE),
        "1024x8x32x64 causal": (1024, 8, 8, 32, 32, 64, True, False, DTYPE),
        "1x12x384x64": (1, 12, 12, 384, 384, 64, False, False, DTYPE),
        "1x12x128x64": (1, 12, 12, 128, 128, 64, False, False, DTYPE),
        "4x16x1024x64 causal float32": (4, 16, 16, 1024, 1024, 64, True, False, "float32"),
        "8x32/8x1x2048x128 (decoding)": (8, 32, 8, 1, 2048, 128, False, False, DTYPE),
    }
    if DRY:
        kinds = {
            "2x2x8x8 causal": (2, 2, 2, 8, 8, 8, True, False, DTYPE),
            "2x4/2x8x8 padded": (2, 4, 2, 8, 8, 8, False, True, DTYPE),
        }
    sdp = importlib.import_module("torch.nn.attention")
    for name, (batch, heads, kv, queries, keys, size, causal, padded, dtype) in kinds.items():
        if left() < 40:
            break
        backend, rng = Backend(BACKEND, dtype), np.random.default_rng(0)
        shapes = (
            (batch, queries, heads, size),
            (batch, keys, kv, size),
            (batch, keys, kv, size),
            (batch, queries, heads, size),
        )
        hosts = [rng.standard_normal(shape, dtype="float32") for shape in shapes]
        q, k, v, g = (
            backend.xp.permute_dims(backend.array(host), (0, 2, 1, 3)) for host in hosts
        )  # as layers make them
        tq, tk, tv, tg = (torch.from_numpy(host).to(DEVICE, getattr(torch, dtype)).transpose(1, 2) for host in hosts)
        lengths = rng.integers(max(1, keys // 2), keys + 1, (batch, 1, 1, 1))
        mask = backend.array(np.arange(keys) < lengths) if padded else None
        tmask = torch.from_numpy(np.arange(keys) < lengths).to(DEVICE) if padded else None
        leaves = [each.detach().clone().requires_grad_() for each in (tq, tk, tv)]

        def theirs(
            kernel, backward, tq=tq, tk=tk, tv=tv, tg=tg, leaves=leaves, causal=causal, tmask=tmask, grouped=heads != kv
        ):
            def step():
                with sdp.sdpa_kernel(getattr(sdp.SDPBackend, kernel)):
                    if not backward:
                        with torch.inference_mode():
                            return torch.nn.functional.scaled_dot_product_attention(
                                tq, tk, tv, tmask, is_causal=causal, enable_gqa=grouped
                            )
                    out = torch.nn.functional.scaled_dot_product_attention(
                        *leaves, tmask, is_causal=causal, enable_gqa=grouped
                    )
                    return torch.autograd.grad(out, leaves, tg)

            return step

        def backward(q=q, k=k, v=v, g=g, mask=mask, causal=causal):
            _, pull = vjp(lambda *qkv: attend(*qkv, mask, causal=causal), q, k, v)
            return pull(g)

        kernels = ("CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION") if not DRY else ("MATH",)
        forward = {"xformer": lambda q=q, k=k, v=v, mask=mask, causal=causal: attend(q, k, v, mask, causal=causal)}
        if not DRY:
            jitted = xf.jit(lambda q, k, v, mask=mask, causal=causal: attend(q, k, v, mask, causal=causal))
            forward["xformer graph"] = lambda q=q, k=k, v=v: jitted(q, k, v)
        row(
            "attention",
            name + " forward",
            turns({**forward, **{f"torch {each[:5]}": theirs(each, False) for each in kernels}}, rounds=3, least=0.01),
        )
        if queries > 1 and left() > 40:
            row(
                "attention",
                name + " forward + backward",
                turns(
                    {"xformer": backward, **{f"torch {each[:5]}": theirs(each, True) for each in kernels}},
                    rounds=3,
                    least=0.01,
                ),
            )
        if not DRY and not padded:
            expected = torch.nn.functional.scaled_dot_product_attention(
                tq.float(), tk.float(), tv.float(), is_causal=causal, enable_gqa=heads != kv
            )
            actual = (
                torch.from_numpy(np.asarray(importlib.import_module("xformer.backends").to_host(forward["xformer"]())))
                .to("cuda")
                .float()
            )
            error = float((actual - expected).norm() / expected.norm())
            answers[name + " error"] = error
            if not error < 1e-2:
                say(f"DIFFERS: {name} {error}")
        release()


@section("gemm", 40)
def _(answers):
    """Products of the training step and the encoder; weight gradients, with those of biases in the same pass or not."""
    backend = Backend(BACKEND, DTYPE)
    ops_linear = importlib.import_module("xformer.ops").linear
    shapes = [
        (32768, 512, 512),
        (32768, 512, 1536),
        (32768, 512, 2048),
        (32768, 2048, 512),
        (32768, 512, 32000),
        (16384, 1024, 1024),
        (16384, 1024, 3072),
        (16384, 1024, 4096),
        (16384, 4096, 1024),
    ]
    shapes = [(64, 16, 16)] if DRY else shapes
    for m, k, n in shapes:
        host = [
            np.random.default_rng(i).standard_normal(s, dtype="float32")
            for i, s in enumerate(((m, k), (k, n), (n,), (m, n)))
        ]
        x, w, b, g = map(backend.array, host)
        tx, tw, tb, tg = (torch.from_numpy(h).to(DEVICE, getattr(torch, DTYPE)) for h in host)
        tw = tw.T.contiguous()
        contenders = {
            "xformer linear": lambda: ops_linear(x, w, b),
            "torch linear": lambda: torch.nn.functional.linear(tx, tw, tb),
        }
        flops = 2 * m * k * n
        result = turns(contenders, rounds=3, least=0.02)
        row("gemm", f"{m}x{k}x{n} forward", result)
        if not DRY:
            lt, cb, rows = (
                importlib.import_module(f"xformer.kernels.cupy.{name}") for name in ("cublaslt", "cublas", "rows")
            )
            result = turns(
                {
                    "xformer BGRADA": lambda: lt.gradients(x, g),
                    "xformer GemmEx + sums": lambda: (cb.batched_product(x.T, g), rows.column_sums(g, w.dtype)),
                    "xformer GemmEx alone": lambda: cb.batched_product(x.T, g),
                    "torch mm + sum": lambda: (tg.T @ tx, tg.sum(0)),
                    "torch mm alone": lambda: tg.T @ tx,
                },
                rounds=3,
                least=0.02,
            )
            answers[f"{m}x{k}x{n} weight gradient"] = {
                key: f"{value.get('ms')} ms, {flops / value['ms'] / 1e9:.0f} TFLOP/s" if "ms" in value else value
                for key, value in result.items()
            }
            say(f"{m}x{k}x{n} weight gradient", answers[f"{m}x{k}x{n} weight gradient"])


@section("fit", 25)
def _(answers):
    """`fit` as users call it, on batches of several shapes: by default, and with jit."""
    pairs_module = importlib.import_module("xformer.data.pairs")
    settings, backend = train_settings(64 if DRY else 8192), Backend(BACKEND)
    vocabulary = settings["vocabulary"]
    rng, shapes = np.random.default_rng(0), [(8, 8), (4, 16)] if DRY else [(256, 32), (336, 24), (512, 16)]
    batches = []
    for number in range(6 if DRY else 30):
        rows, length = shapes[number % len(shapes)]
        ids = rng.integers(4, vocabulary, (2, rows, length - 1)).tolist()
        batches.append(pairs_module.Batch.make(pairs_module.TokenPairs(*ids), list(range(rows)), xp=backend.xp))
    loss, training = (
        importlib.import_module("xformer.training.loss").translation_loss,
        importlib.import_module("xformer.training"),
    )
    for name, options in (("default", {}), ("jit=True", {"jit": True})):
        model = xf.Transformer(xf.TransformerConfig(**settings["model"]), xp=backend.xp, seed=0)
        laps = [time.perf_counter()]

        def note(event, loop, laps=laps):
            if type(event).__name__ == "Step":
                laps.append(time.perf_counter())

        training.fit(
            model,
            loss,
            batches,
            optimizer=training.Adam(),
            learning_rate=1e-4,
            callbacks=[note],
            precision=DTYPE,
            **options,
        )
        each = [1e3 * (b - a) for a, b in zip(laps[len(laps) // 2 :], laps[len(laps) // 2 + 1 :], strict=False)]
        answers[name] = {
            "ms per step, second half": round(statistics.median(each), 2),
            "first": round(1e3 * (laps[1] - laps[0])),
        }
        say("fit", name, answers[name])


@section("kernels", 25)
def _(answers):
    """Where the GPU spends its time: the kernels of a training step and of a search."""
    if DRY:
        return
    probes, training, decoding = (
        importlib.import_module("gpu_probes"),
        importlib.import_module("workloads.training"),
        importlib.import_module("workloads.decoding"),
    )
    computation = training.build({**train_settings(TRAIN_TOKENS), "backend": BACKEND, "jit": True})
    for index in range(4):
        computation.wait(computation.step(index))
    times = probes.kernel_times(lambda index: computation.wait(computation.step(index)), 3)
    answers["training step"] = {name: f"{ms:.3f} ms, {count:.0f}" for name, (ms, count) in [*times.items()][:60]}
    answers["training step, sum"] = (
        f"{sum(ms for ms, _ in times.values()):.2f} ms, {sum(c for _, c in times.values()):.0f} kernels"
    )
    search = decoding.build(
        {
            "length": 32,
            "heads": 8,
            "head_dim": 64,
            "layers": 6,
            "vocabulary": 8000,
            "batch": 1,
            "beam": 1,
            "backend": BACKEND,
        }
    )
    times = probes.kernel_times(search.step, 2)
    answers["search"] = {name: f"{ms:.3f} ms, {count:.0f}" for name, (ms, count) in [*times.items()][:40]}
    answers["search, sum"] = (
        f"{sum(ms for ms, _ in times.values()):.2f} ms, {sum(c for _, c in times.values()):.0f} kernels"
    )
    say(answers["training step, sum"], answers["search, sum"])


@section("host", 12)
def _(answers):
    if not DRY:
        answers |= importlib.import_module("gpu_probes").overhead()
        say(answers)


@section("memory", 40)
def _(answers):
    """Memory of the card that a process takes for a training step; each in a process of its own."""
    if DRY:
        return
    code = (
        "import sys; sys.path[:0] = [{bench!r}, {root!r}]\n"
        "from gpu_probes import train_settings\nimport importlib\n"
        "s = train_settings({tokens})\n"
        "if {kind!r} == 'torch':\n"
        "    import torch; c = importlib.import_module('baselines.torch_training').build({{**s, 'device': 'cuda'}})\n"
        "    [c.wait(c.step(i)) for i in range(5)]; print('GB', torch.cuda.max_memory_reserved() / 1e9)\n"
        "else:\n"
        "    import cupy; w = importlib.import_module('workloads.training')\n"
        "    c = w.build({{**s, 'backend': 'cupy', 'jit': {kind!r} == 'jit'}})\n"
        "    f, t = cupy.cuda.runtime.memGetInfo(); [c.wait(c.step(i)) for i in range(5)]\n"
        "    g, _ = cupy.cuda.runtime.memGetInfo(); print('GB', (t - g) / 1e9)\n"
    )
    for kind in ("jit", "eager", "torch"):
        text = code.format(bench=str(ROOT / "bench"), root=str(ROOT), tokens=32_768, kind=kind)
        done = subprocess.run(
            [sys.executable, "-c", text],
            capture_output=True,
            text=True,
            cwd=ROOT,
            timeout=max(5.0, min(30.0, left() - 10)),
            check=False,
        )
        found = [line for line in done.stdout.splitlines() if line.startswith("GB")]
        answers[kind] = found[-1] if found else done.stderr[-200:]
    say(answers)


@section("train2", 60)
def _(answers):
    """The same against torch's CUDA graphs."""
    training, settings = importlib.import_module("workloads.training"), train_settings(TRAIN_TOKENS)
    contenders = {"xformer jit": steps(training.build({**settings, "backend": BACKEND, "jit": True}))}
    contenders["torch reduce-overhead"] = steps(torch_train(settings, "reduce-overhead"))
    row("train", f"{TRAIN_TOKENS} tokens, again", turns(contenders, rounds=3, least=0.1))


save()
header = ("row", "xformer ms", "peer ms", "peer", "ratio", "goal", "")
lines = [
    header,
    *(
        (name, ours, theirs, peer, f"{ratio:.2f}", f"{goal:.1f}", "" if not ratio < goal else "BELOW")
        for name, ours, theirs, peer, ratio, goal in ROWS
    ),
]
widths = [max(len(str(line[i])) for line in lines) for i in range(len(header))]
text = "\n".join(
    "  ".join(str(cell).ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
)
failed = {
    name: answers["failed"] for name, answers in RESULTS.items() if isinstance(answers, dict) and "failed" in answers
}
text += "".join(f"\nFAILED {name}: {reason}" for name, reason in failed.items())
(OUT / "measure.txt").write_text(text + "\n")
print("\n" + RESULTS.get("versions", {}).get("card", ""), text, sep="\n")
sys.exit(bool(DRY and failed))
