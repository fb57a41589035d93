"""Stand-ins for the CUDA driver and cuBLASLt, so that cuDNN builds plans where there is no GPU.

`python stub_drivers.py FOLDER` makes libcuda.so.1 and libcublasLt.so.13 there with the C compiler: every function that
cuDNN or the CUDA runtime may ask for by name, each doing nothing, successfully. Nothing runs on them; what they are
for is the compiler, and the rules by which cuDNN takes a graph or refuses it.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

DRIVER_VERSION, CUBLASLT_VERSION = 13000, 130000
NOT_FOUND = 500
BY_HAND = {
    "cuDriverGetVersion": f"int cuDriverGetVersion(int *v) {{ *v = {DRIVER_VERSION}; return 0; }}",
    "cuGetExportTable": f"int cuGetExportTable(void) {{ return {NOT_FOUND}; }}",  # the compiler would read it
    "cuGetProcAddress": "int cuGetProcAddress(const char *n, void **f) { *f = (void *)nothing; return 0; }",
    "cuGetProcAddress_v2": "int cuGetProcAddress_v2(const char *n, void **f) { *f = (void *)nothing; return 0; }",
    "cublasLtGetVersion": f"unsigned long cublasLtGetVersion(void) {{ return {CUBLASLT_VERSION}; }}",
}
HANDED_OUT = [
    "cuLibraryLoadData",
    "cuLibraryGetKernel",
    "cuKernelGetFunction",
    "cuModuleLoadData",
    "cuModuleGetFunction",
]
BY_HAND |= {name: f"int {name}(void **made) {{ *made = (void *)16; return 0; }}" for name in HANDED_OUT}
LIBRARIES = {"libcuda.so.1": rb"\bcu[A-Z][A-Za-z0-9]+(?:_v\d)?\b", "libcublasLt.so.13": rb"\bcublasLt[A-Z]\w+\b"}


def wheels() -> list[Path]:
    """The folders of libraries that the wheels of NVIDIA brought."""
    spec = importlib.util.find_spec("nvidia")
    places = [] if spec is None else [Path(place) for place in spec.submodule_search_locations or ()]
    return sorted({library.parent for place in places for library in place.glob("*/lib/*.so.*")})


def source(pattern: bytes, content: bytes) -> str:
    """C for all functions whose names stand in `content`."""
    names = {match.decode() for match in re.findall(pattern, content)}
    lines = [BY_HAND.get(name, f"int {name}(void) {{ return 0; }}") for name in sorted(names | BY_HAND.keys())]
    return "\n".join(["static int nothing(void) { return 0; }", *lines])


def make(folder: Path) -> None:
    """Compile the stand-ins into a folder."""
    libraries = [
        path for place in wheels() for path in place.glob("lib*.so.*") if "cudnn" in path.name or "cudart" in path.name
    ]
    content = b"\0".join(path.read_bytes() for path in libraries)
    folder.mkdir(parents=True, exist_ok=True)
    for name, pattern in LIBRARIES.items():
        command = [
            "cc",
            "-shared",
            "-fPIC",
            "-w",
            "-fno-builtin",
            "-x",
            "c",
            "-",
            "-o",
            str(folder / name),
            f"-Wl,-soname,{name}",
        ]
        subprocess.run(command, input=source(pattern, content).encode(), check=True)


if __name__ == "__main__":
    make(Path(sys.argv[1]))
    print(":".join(map(str, [Path(sys.argv[1]).resolve(), *wheels()])))
