"""Compile the native library: `python -m xformer.native.build`. Installing the package does so if it finds a compiler.

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
_SMALL = ["-s", "-Wl,--exclude-libs,ALL", "-Wl,--gc-sections"]


class BuildError(Exception):
    """The library cannot be compiled."""


def compiler() -> str | None:
    """Return the C++ compiler: the environment variable CXX, or one on the path, or None."""
    return os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")


def is_current() -> bool:
    """Return whether the library was compiled from these sources with these flags."""
    return LIBRARY.exists() and _key().encode() in LIBRARY.read_bytes()


def _key() -> str:
    """Return a string that identifies the sources and flags; the library contains it."""
    digest = hashlib.sha256()
    for source in [Path(__file__), *sorted((FOLDER / "src").iterdir())]:
        digest.update(f"{source.name}\n{source.stat().st_size}\n".encode() + source.read_bytes())
    settings = [os.environ.get(name, "") for name in ("CXX", "XFORMER_NATIVE_FLAGS")]
    digest.update("\n".join(settings).encode())
    return f"xformer sources {digest.hexdigest()}"


def build(library: Path = LIBRARY) -> None:
    """Compile the sources, as many files at a time as there are processors.

    `CXX` is the compiler, which may compile for another machine; `XFORMER_NATIVE_FLAGS` are more flags, such as
    `-fsanitize=address`. With `-march` among them, the library has the one level "baseline", for that processor.

    Args:
        library: File to write.

    Raises:
        BuildError: If there is no compiler, or it fails, or on Windows.
    """
    if sys.platform == "win32":
        raise BuildError("the native library is for Linux and macOS")
    command = compiler()
    if command is None:
        raise BuildError("no C++ compiler was found; install g++ or clang++, or set CXX")
    extra = shlex.split(os.environ.get("XFORMER_NATIVE_FLAGS", ""))
    flags = [*shlex.split(command), *_FLAGS, *extra]
    one_level = any(flag.startswith("-march") for flag in extra) or not _target(command).startswith("x86_64")
    levels = {"baseline": ["-DONE_LEVEL"]} if one_level else _LEVELS
    sources = sorted((FOLDER / "src").glob("*.cpp"), key=lambda path: -path.stat().st_size)
    with tempfile.TemporaryDirectory() as scratch:
        jobs, objects = [], []
        for source in sources:
            for level, options in levels.items() if source.stem != "runtime" else [("", levels["baseline"])]:
                objects.append(f"{scratch}/{level}-{source.stem}.o")
                defined = f"-DISA={level}" if level else f'-DKEY="{_key()}"'
                jobs.append([*flags, *options, defined, "-c", str(source), "-o", objects[-1]])
        # The linker takes the first of equal inline functions: one that runs on every processor.
        objects.sort(key=lambda path: ["", *levels].index(Path(path).stem.split("-")[0]))
        _run_all(jobs)
        partial = f"{scratch}/library.so"
        # Without symbols, and without what the C++ library exports or does not need; a sanitizer needs them.
        link = [] if extra or sys.platform == "darwin" else ["-static-libstdc++", "-static-libgcc", *_SMALL]
        _run_all([[*shlex.split(command), *extra, "-shared", "-o", partial, *objects, "-pthread", *link]])
        new = library.with_name(library.name + ".new")
        shutil.copyfile(partial, new)
        os.replace(new, library)


def _target(command: str) -> str:
    """Return the machine for which a compiler compiles, such as "x86_64-linux-gnu"."""
    try:
        done = subprocess.run(
            [*shlex.split(command), "-dumpmachine"], stdout=subprocess.PIPE, encoding="utf-8", check=True
        )
    except (OSError, subprocess.CalledProcessError) as error:
        raise BuildError(f"the compiler cannot be run: {error}") from error
    return done.stdout.strip()


def _run_all(jobs: list[list[str]]) -> None:
    """Run commands, as many at a time as there are processors."""
    running: list[subprocess.Popen[str]] = []
    waiting = list(jobs)
    try:
        while waiting or running:
            while waiting and len(running) < (os.cpu_count() or 1):
                running.append(subprocess.Popen(waiting.pop(0), stderr=subprocess.PIPE, text=True, errors="replace"))
            process = running.pop(0)
            _, errors = process.communicate()
            if process.returncode:
                raise BuildError(f"the compiler failed: {errors.strip()}")
            if errors.strip():
                sys.stderr.write(errors)
    except OSError as error:
        raise BuildError(f"the compiler cannot be run: {error}") from error
    finally:
        for process in running:
            process.kill()
            process.wait()


if __name__ == "__main__":
    try:
        build()
    except BuildError as error:
        sys.exit(f"error: {error}")
    sys.stdout.write(f"{LIBRARY}\n")
