"""Development sessions. `nox -l` lists them; `nox -s tests -- tests/ops -x` hands arguments on."""

from __future__ import annotations

import os
import shutil
import zipfile
from pathlib import Path

import nox
from nox.command import CommandFailed

nox.needs_version = ">=2025.2.9"
nox.options.sessions = ["lint", "types", "tests"]
nox.options.error_on_external_run = True

PYPROJECT = nox.project.load_toml("pyproject.toml")
EXTRAS = PYPROJECT["project"]["optional-dependencies"]
TORCH = "torch==2.13.0"  # the one that parity tests and speed comparisons were made with
WHEEL_LIMIT_BYTES = 372_000  # more than a tenth of it is for GPUs alone
# What every unpacker reads, in two hundredths less.
RECOMPRESS = """
import os, sys, zipfile, zopfli
(wheel,) = sys.argv[1:]
with zipfile.ZipFile(wheel) as given, zopfli.ZipFile(wheel + ".small", "w", zipfile.ZIP_DEFLATED) as made:
    for info in given.infolist():
        made.writestr(info, given.read(info))
os.replace(wheel + ".small", wheel)
"""
PEERS = ["ctranslate2>=4.8", "transformers>=5"]  # decode the same models; only the benchmarks know them
BENCH_RUN = ".benchmarks/run"  # what the last run of the benchmarks measured
# cuDNN as torch 2.11 has it, its frontend, and what compiles its plans, without what the frontend asks for beside them.
CUDNN = ["nvidia-cudnn-frontend==1.32.*", "nvidia-cudnn-cu13==9.19.*", "nvidia-cuda-nvrtc==13.0.*"]
CUDNN += ["nvidia-cuda-runtime==13.0.*", "cuda-pathfinder>=1.3"]
# Tests multiply small matrices, where a thread pool costs more than it gains.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def group(name: str) -> list[str]:
    """The requirements of a dependency group of pyproject.toml."""
    return nox.project.dependency_groups(PYPROJECT, name)


def install_if_possible(session: nox.Session, *requirements: str) -> None:
    """Install a library to compare or compile with; where it has no wheel, go on without it."""
    try:
        session.install(*requirements)
    except CommandFailed:
        session.warn(f"{' '.join(requirements)} cannot be installed here; the tests that need it are skipped")


@nox.session(reuse_venv=True)
def tests(session: nox.Session) -> None:
    """Run tests and doctests on NumPy, JAX and torch (XFORMER_TEST_TORCH=0 leaves torch out)."""
    session.install("-e", ".[cli]", *group("test"))
    install_if_possible(session, *EXTRAS["numba"])
    install_if_possible(session, *EXTRAS["jax"])
    if os.environ.get("XFORMER_TEST_TORCH", "1") != "0":
        install_if_possible(session, TORCH)
    # A module that needs an absent library (CuPy on a machine without a GPU) has no doctests to run here.
    # On all cores, a file at a time: what a file computes once for its tests is computed once.
    parallel_map = ["--numprocesses", "auto", "--dist", "loadfile"]
    doctests = ["--doctest-modules", "--doctest-ignore-import-errors"]
    # pytest would leave half of it among the imported modules, and others would take that for CuPy's.
    doctests += ["--ignore", "xformer/backends/cupy_namespace.py"]
    everything = [*parallel_map, *doctests, "xformer", "tests"]
    session.run("python", "-m", "pytest", "-q", *(session.posargs or everything), env=ONE_THREAD)


@nox.session(reuse_venv=True)
def lint(session: nox.Session) -> None:
    """Check style and formatting with ruff."""
    session.install(*group("lint"))
    session.run("ruff", "check", *session.posargs)
    session.run("ruff", "format", "--check")


@nox.session(reuse_venv=True)
def types(session: nox.Session) -> None:
    """Check types with mypy --strict."""
    session.install("-e", ".[cli]", *group("types"))
    session.run("mypy", *session.posargs)


@nox.session(reuse_venv=True)
def strict(session: nox.Session) -> None:
    """Run the models on array_api_strict, boolean indexing and data-dependent shapes off."""
    session.install("-e", ".[cli]", *group("test"))
    session.run("python", "-m", "pytest", "-q", "-m", "strict", *session.posargs, env=ONE_THREAD)


@nox.session(reuse_venv=True)
def conformance(session: nox.Session) -> None:
    """Run data-apis/array-api-tests on the differentiating namespace and on its base."""
    session.install("-e", ".", *group("conformance"))
    session.run("python", "tests/conformance/run.py", *session.posargs, env=ONE_THREAD)


@nox.session(reuse_venv=True)
def cudnn_plans(session: nox.Session) -> None:
    """Have cuDNN build its plans for a GPU that need not be there; takes a C compiler and 450 MB of wheels."""
    session.install("-e", ".", *group("test"))
    session.install("--no-deps", *CUDNN)
    stubs = session.run("python", "tests/kernels/cupy/stub_drivers.py", session.create_tmp(), silent=True)
    env = {**ONE_THREAD, "XFORMER_CUDNN_PLANS": "1", "LD_LIBRARY_PATH": str(stubs).strip()}
    plans = "tests/kernels/cupy/test_cudnn_graph.py"
    session.run("python", "-m", "pytest", "-q", plans, *session.posargs, env=env)


@nox.session(reuse_venv=True)
def demo(session: nox.Session) -> None:
    """Train a small translator on number words for 90 seconds and show what it learned."""
    session.install(".[cli]")
    session.run("xformer", "demo", *session.posargs)


@nox.session(reuse_venv=True)
def bench(session: nox.Session) -> None:
    """Measure speed and memory against other libraries, hours long; `-- --quick` takes minutes, `-- bench/FILE` one."""
    session.install("-e", ".[cli,bench]", TORCH)
    install_if_possible(session, *EXTRAS["numba"])
    install_if_possible(session, *EXTRAS["jax"])
    install_if_possible(session, *PEERS)
    shutil.rmtree(BENCH_RUN, ignore_errors=True)
    chosen = [] if any(argument.startswith("bench/") for argument in session.posargs) else ["bench"]
    session.run("python", "-m", "pytest", "--benchmark-only", "--results", BENCH_RUN, *chosen, *session.posargs)
    # A quick run shows that everything works; its figures are no result.
    place = BENCH_RUN if "--quick" in session.posargs else "bench/results"
    session.run("python", "bench/report.py", BENCH_RUN, "--results", place)


@nox.session(reuse_venv=True)
def gpu_tests(session: nox.Session) -> None:
    """On a machine with an NVIDIA GPU: every test that computes on it; `-- DIR` takes the results."""
    on_gpu(session, "tests")


@nox.session(reuse_venv=True)
def gpu_bench(session: nox.Session) -> None:
    """On a machine with an NVIDIA GPU: xformer on CuPy against torch; `-- DIR` takes the results."""
    on_gpu(session, "bench")


def on_gpu(session: nox.Session, what: str) -> None:
    """Ask the machine (bench/gpu.py); where something is missing, it says so in one line."""
    session.run("python", "bench/gpu.py", "look")  # before a gigabyte of wheels
    session.install("-e", ".[cli,cuda,cudnn,bench]", *group("test"))
    if what == "bench":
        install_if_possible(session, "torch", *PEERS)
    session.run("python", "bench/gpu.py", what, *(session.posargs or [BENCH_RUN]))


@nox.session(reuse_venv=True)
def docs(session: nox.Session) -> None:
    """Build docs/ into site/, warnings as errors; `nox -s docs -- serve` shows it while you write."""
    session.install(*EXTRAS["docs"])
    session.run("mkdocs", *(session.posargs or ["build", "--strict"]))


@nox.session
def build(session: nox.Session) -> None:
    """Build wheel and sdist into dist/; check size, contents and that the bare wheel imports."""
    shutil.rmtree("dist", ignore_errors=True)
    session.install("build", "zopflipy")
    session.run("python", "-m", "build", "--outdir", "dist")
    (wheel,) = Path("dist").glob("*.whl")
    session.run("python", "-c", RECOMPRESS, str(wheel))
    check_wheel(session, wheel)
    session.install(str(wheel))
    # -I keeps the checkout off the path, so this is the wheel, with the core requirements alone.
    session.run("python", "-I", "-c", "import xformer; print('imported xformer', xformer.__version__)")


def check_wheel(session: nox.Session, wheel: Path) -> None:
    """Fail the session when the wheel is too large, lacks a file or carries what is not the library."""
    size = wheel.stat().st_size
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    metadata = f"xformer-{PYPROJECT['project']['version']}.dist-info/"
    strays = [name for name in names if not name.startswith(("xformer/", metadata))]
    wanted = ["xformer/__init__.py", "xformer/py.typed", f"{metadata}licenses/LICENSE"]
    missing = [name for name in wanted if name not in names]
    if size >= WHEEL_LIMIT_BYTES:
        session.error(f"{wheel} has {size} bytes; expected fewer than {WHEEL_LIMIT_BYTES}")
    if strays or missing:
        session.error(f"{wheel} carries {strays} beside the library and lacks {missing}; expected neither")
    session.log(f"{wheel}: {size} bytes, {len(names)} files")
