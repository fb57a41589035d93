"""Compile the native library while the package is built, if there is a C++ compiler.

Without a compiler, or with XFORMER_NATIVE=off, the package is pure Python and runs everything in NumPy.
"""

from __future__ import annotations

import importlib.util
import os
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class NativeBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """Adds the library to the wheel, or compiles it in place for an editable installation."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile the library, and tag the wheel with the platform."""
        if self.target_name != "wheel" or os.environ.get("XFORMER_NATIVE") == "off":
            return
        path = Path(self.root, "xformer", "native", "build.py")
        spec = importlib.util.spec_from_file_location("xformer_native_build", path)
        if spec is None or spec.loader is None:
            raise ImportError(f"{path} cannot be imported")
        native = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(native)
        try:
            if not native.is_current():
                native.build()
        except native.BuildError as error:
            self.app.display_warning(f"xformer is installed without compiled kernels: {error}")
            return
        if version != "editable":
            build_data["force_include"][str(native.LIBRARY)] = "xformer/native/libxformer.so"
            build_data["pure_python"] = False
            platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["tag"] = f"py3-none-{platform}"
