"""Compile the native library: `python -m xformer.native.build`. Installing the package does so if it finds a compiler.

The library has the best instruction set of this processor; with `--all`, every one, for any processor.

This file imports nothing of xformer, because the build runs it before the package is installed.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

FOLDER = Path(__file__).parent
# Another file keeps the normal library untouched: that of a build with sanitizers, or for another processor.
LIBRARY = Path(os.environ.get("XFORMER_NATIVE_LIBRARY") or FOLDER / "libxformer.so")
_FLAGS = ["-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wno-psabi", "-Wno-ignored-attributes"]
_FLAGS += ["-Wno-maybe-uninitialized"]  # GCC 12 warns about its intrinsics
_FLAGS += ["-Wno-unknown-warning-option", "-Wno-unknown-pragmas"]  # those of GCC, for clang
# Products are fused with sums, so that all levels with such an instruction have the same bits; NaN is respected.
_FLAGS += ["-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math"]
_LEVELS = {"baseline": [], "avx2": ["-march=x86-64-v3"], "avx512": ["-march=x86-64-v4", "-mavx512vnni"]}
_LEVELS["avx512"] += ["-mprefer-vector-width=512"]
# Flags of /proc/cpuinfo, the best instruction set first; runtime.cpp asks the processor for the same.
_NEEDED = {"avx512": {"avx2", "fma", "avx512f", "avx512vl", "avx512bw", "avx512dq", "avx512_vnni"}}
_NEEDED |= {"avx2": {"avx2", "fma"}, "baseline": {"sse2"}}
_SMALL = ["-s", "-Wl,--exclude-libs,ALL", "-Wl,--gc-sections"]


class BuildError(Exception):
    """The library cannot be compiled."""


def compiler() -> str | None:
    """Return the C++ compiler: the environment variable CXX, or one on the path, or None."""
    return os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")


def is_current(*, every_level: bool = False) -> bool:
    """Return whether the library was compiled from these sources with these flags, and has every level if asked."""
    key = f"{_key()} for {' '.join(_LEVELS)}" if every_level else _key()
    return LIBRARY.exists() and key.encode() in LIBRARY.read_bytes()


def _key() -> str:
    """Return a string that identifies the sources and flags; the library contains it, and its levels."""
    digest = hashlib.sha256()
    for source in [Path(__file__), *sorted((FOLDER / "src").iterdir())]:
        digest.update(f"{source.name}\n{source.stat().st_size}\n".encode() + source.read_bytes())
    settings = [os.environ.get(name, "") for name in ("CXX", "XFORMER_NATIVE_FLAGS")]
    digest.update("\n".join(settings).encode())
    return f"xformer sources {digest.hexdigest()}"


def build(library: Path = LIBRARY, *, every_level: bool = False) -> None:
    """Compile the sources, as many files at a time as there are processors.

    `CXX` is the compiler, which may compile for another machine; `XFORMER_NATIVE_FLAGS` are more flags, such as
    `-fsanitize=address`. With `-march` among them, the library has the one level "baseline", for that processor.

    Args:
        library: File to write.
        every_level: Whether to compile every instruction set, not only the best one of this processor.

    Raises:
        BuildError: If there is no compiler, or it fails, or on Windows.
    """
    if sys.platform == "win32":
        raise BuildError("the native library is for Linux and macOS")
    found = compiler()
    if found is None:
        raise BuildError("no C++ compiler was found; install g++ or clang++, or set CXX")
    command = shlex.split(found)
    extra = shlex.split(os.environ.get("XFORMER_NATIVE_FLAGS", ""))
    if any(flag.startswith("-march") for flag in extra) or not _run([*command, "-dumpmachine"]).startswith("x86_64"):
        levels: dict[str, list[str]] = {"baseline": []}
    else:
        levels = _LEVELS if every_level else _best_level()
    # First the files that take longest.
    sources = sorted((FOLDER / "src").glob("*.cpp"), key=lambda path: (path.stem != "linear", -path.stat().st_size))
    with tempfile.TemporaryDirectory() as scratch:
        runtime = [f'-DKEY="{_key()} for {" ".join(levels)}"', *(f"-DHAS_{level}" for level in levels)]
        options = {"runtime": runtime} | {level: [*flags, f"-DISA={level}"] for level, flags in levels.items()}
        jobs, objects = [], []
        for source in sources:
            for name in ("runtime",) if source.stem == "runtime" else levels:
                objects.append(f"{scratch}/{name}-{source.stem}.o")
                jobs.append([*command, *_FLAGS, *extra, *options[name], "-c", str(source), "-o", objects[-1]])
        # The linker takes the first of equal inline functions: one that runs on every processor.
        objects.sort(key=lambda path: [*options].index(Path(path).stem.split("-")[0]))
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            list(pool.map(_run, jobs))
        partial = f"{scratch}/library.so"
        # Without symbols, and without what the C++ library exports or does not need; a sanitizer needs them.
        link = [] if extra or sys.platform == "darwin" else ["-static-libstdc++", "-static-libgcc", *_SMALL]
        _run([*command, *extra, "-shared", "-o", partial, *objects, "-pthread", *link])
        new = library.with_name(library.name + ".new")
        shutil.copyfile(partial, new)
        os.replace(new, library)


def _best_level() -> dict[str, list[str]]:
    """Return the best instruction set of this processor; every one if it is unknown, or not an x86-64 processor."""
    try:
        flags = set(Path("/proc/cpuinfo").read_text(encoding="utf-8").split())
    except OSError:
        return _LEVELS
    return next(({level: _LEVELS[level]} for level, needed in _NEEDED.items() if needed <= flags), _LEVELS)


def _run(command: list[str]) -> str:
    """Run a compiler, pass on its warnings, and return what it printed."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    except OSError as error:
        raise BuildError(f"the compiler cannot be run: {error}") from error
    if done.returncode:
        raise BuildError(f"the compiler failed: {done.stderr.strip()}")
    sys.stderr.write(done.stderr)
    return done.stdout


if __name__ == "__main__":
    if sys.argv[1:] not in ([], ["--all"]):
        sys.exit("usage: python -m xformer.native.build [--all]")
    try:
        if not sys.argv[1:]:
            build()
        elif not is_current(every_level=True):
            build(every_level=True)
    except BuildError as error:
        sys.exit(f"error: {error}")
    sys.stdout.write(f"{LIBRARY}\n")
