"""Description of the GPU, the libraries on it, and the kernels that are switched off."""

from __future__ import annotations

from xformer.backends import resolve
from xformer.environment import env_value
from xformer.errors import BackendError
from xformer.kernels.cupy import cudnn_plans
from xformer.kernels.cupy.launch import cuda, device_properties, identity
from xformer.ops.checks import failures


def describe() -> dict[str, str]:
    """Return lines by subject; one, with the reason, if CuPy cannot be used."""
    try:
        resolve("cupy")
    except BackendError as error:
        return {"CUDA": str(error)}
    runtime = cuda().runtime
    name, capability = device_properties(runtime.getDevice())
    versions = runtime.driverGetVersion(), runtime.runtimeGetVersion()
    driver, built_for = (f"{version // 1000}.{version % 1000 // 10}" for version in versions)
    cudnn, reason = cudnn_plans.frontend()
    if reason is None:
        version = cudnn.backend_version()
        reason = f"{version // 10000}.{version % 10000 // 100}.{version % 100}, frontend {cudnn.__version__}"
    free, total = (size / 2**30 for size in runtime.memGetInfo())
    off = [f"{kernel}: {why}" for kernel, why in failures(identity()).items()]
    if mode := env_value("XFORMER_KERNELS"):
        off.insert(0, f"XFORMER_KERNELS={mode}")
    return {
        "CUDA": f"{name}, capability {capability / 10}; the driver knows {driver}, CuPy is built for {built_for}",
        "cuDNN": reason,
        "GPU memory": f"{free:.1f} of {total:.1f} GiB free",
        "kernels off": "; ".join(off) or "none",
    }
