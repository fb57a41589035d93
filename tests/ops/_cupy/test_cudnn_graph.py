"""The real cuDNN builds every call that `why_not` accepts, for an H200 without having one (`nox -s cudnn_plans`)."""

from __future__ import annotations

import importlib
import json
import os

import numpy as np
import pytest

from tests.ops._cupy import stub_drivers
from xformer.kernels.cupy import cublas, cudnn_plans, launch
from xformer.kernels.cupy import cudnn as cupy_cudnn
from xformer.kernels.cupy.cudnn_plans import Spec, describe

# What cuDNN says of one, by create_device_properties(0).serialize(), from NVIDIA's data sheets.
H200 = {
    "deviceName": "NVIDIA H200",
    "maxGridSize": [2**31 - 1, 65535, 65535],
    "maxBlockSize": [1024, 1024, 64],
    "regsPerBlock": 65536,
    "multiProcessorCount": 132,
    "warpSize": 32,
    "maxSharedMemoryPerBlock": 49152,
    "maxSharedMemoryPerBlockOptin": 232448,
    "reservedSharedMemoryPerBlock": 1024,
    "maxRegistersPerSM": 65536,
    "maxCtasPerSM": 32,
    "maxThreadsPerBlock": 1024,
    "maxThreadsPerSM": 2048,
    "pciDeviceId": 0,
    "isTccDriver": 0,
    "supportCoopLaunch": 1,
    "totalGlobalMem": 141 << 30,
    "smClockRateKHz": 1980000,
    "memClockRateKHz": 3201000,
    "memoryBusWidth": 6144,  # since cuDNN 9.28, as the next one
    "oversizedSharedMemoryPerBlock": 232448,
    "l2CacheSize": 60 << 20,
    "cudaDeviceId": 0,
    "deviceVer": 900,
    "driverVer": stub_drivers.DRIVER_VERSION,
}


@pytest.fixture(scope="module")
def cudnn():
    if os.environ.get("XFORMER_CUDNN_PLANS") != "1":
        pytest.skip("needs cuDNN and stand-ins for drivers; run: nox -s cudnn_plans")
    module, reason = cudnn_plans.frontend()
    assert reason is None
    return module


@pytest.fixture
def context(cudnn):
    return {"device_property": cudnn.create_device_properties(json.dumps(H200)), "sm_version": 90}


def empty(batch, heads, length, features, dtype="float16"):
    memory = np.empty(batch * heads * length * features + 8, dtype)
    start = -memory.ctypes.data % 16 // 2
    flat = memory[start : start + batch * heads * length * features]
    return flat.reshape(batch, length, heads, features).transpose(0, 2, 1, 3)


def specs(monkeypatch, queries, keys, features, *, width=None, shared=4, dtype="float16", **given):
    """Those of a call that `why_not` accepts: forward, forward with what the derivative needs, derivative."""
    monkeypatch.setattr(cublas, "pointer", lambda array: array.ctypes.data)
    monkeypatch.setattr(launch, "is_current_device", lambda array: True)
    monkeypatch.setattr(cudnn_plans, "unsupported_reason", lambda *specs: None)
    monkeypatch.setattr(cupy_cudnn, "_MIN_SCORES", 1)
    monkeypatch.setattr(cupy_cudnn, "_MIN_KEYS", 1)
    shapes = (4, queries, features), (shared, keys, features), (shared, keys, width or features)
    arrays = [empty(2, *shape) for shape in shapes]
    kinds = {"mask": bool, "bias": "float16", "dropout_mask": bool}
    arrays += [np.ones(given[name], kind) if name in given else None for name, kind in kinds.items()]
    static = {"causal": given.get("causal", False), "scale": 0.125, "window": given.get("window", 0)}
    assert cupy_cudnn.why_not(*arrays, **static, save=True) is None
    return tuple(spec._replace(dtype=dtype) for spec in cupy_cudnn._specs_of(tuple(arrays), *static.values()))


def build(cudnn, spec: Spec, context):
    graph, ports = describe(cudnn, spec, context)
    graph.build([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    return graph, {name: port.get_uid() for name, port in ports.items()}


CALLS = {
    "self-attention": {"queries": 128, "keys": 128, "features": 64},
    "causal": {"queries": 512, "keys": 512, "features": 128, "causal": True, "dtype": "bfloat16"},
    "causal, more keys": {"queries": 100, "keys": 300, "features": 64, "causal": True},
    "cross-attention": {"queries": 33, "keys": 77, "features": 64, "dtype": "bfloat16"},
    "few": {"queries": 2, "keys": 1, "features": 8},
    "large heads": {"queries": 65, "keys": 65, "features": 256, "causal": True},
    "other values": {"queries": 64, "keys": 64, "features": 64, "width": 128},
    "padding": {"queries": 40, "keys": 77, "features": 64, "mask": (2, 1, 1, 77), "dtype": "bfloat16"},
    "padding, whole tiles": {"queries": 128, "keys": 256, "features": 64, "mask": (2, 1, 1, 256)},
    "one mask for all": {"queries": 64, "keys": 77, "features": 64, "mask": (77,)},
    "causal padding": {"queries": 77, "keys": 77, "features": 64, "mask": (2, 1, 1, 77), "causal": True},
    "a window": {"queries": 100, "keys": 100, "features": 64, "mask": (100, 100), "causal": True},
    "a bias of heads": {"queries": 77, "keys": 77, "features": 64, "bias": (1, 4, 77, 77), "causal": True},
    "bias and padding": {"queries": 64, "keys": 64, "features": 64, "mask": (2, 1, 1, 64), "bias": (4, 64, 64)},
    "dropout": {"queries": 77, "keys": 50, "features": 64, "dropout_mask": (2, 4, 77, 50), "dtype": "bfloat16"},
    "causal dropout": {"queries": 256, "keys": 256, "features": 64, "dropout_mask": (2, 4, 256, 256), "causal": True},
    "dropout and padding": {
        "queries": 64,
        "keys": 77,
        "features": 64,
        "dropout_mask": (2, 4, 64, 77),
        "mask": (2, 1, 1, 77),
    },
    "shared keys": {"queries": 100, "keys": 100, "features": 64, "shared": 2, "causal": True, "dtype": "bfloat16"},
    "one head of keys": {"queries": 64, "keys": 77, "features": 64, "shared": 1, "mask": (2, 1, 1, 77)},
    "a training batch": {"queries": 32, "keys": 24, "features": 64, "mask": (2, 1, 1, 24), "dtype": "bfloat16"},
    "causal window": {"queries": 300, "keys": 300, "features": 64, "causal": True, "window": 100, "dtype": "bfloat16"},
    "window, more keys": {"queries": 100, "keys": 300, "features": 128, "causal": True, "window": 64},
    "window": {"queries": 300, "keys": 300, "features": 64, "window": 100},
    "any window, more keys": {"queries": 100, "keys": 300, "features": 64, "window": 65, "dtype": "bfloat16"},
    "slopes": {"queries": 50, "keys": 50, "features": 64, "bias": (1, 4, 1, 50)},
}


@pytest.mark.parametrize("deterministic", ["1", "0"])
@pytest.mark.parametrize("call", CALLS)
def test_plans_are_built(monkeypatch, cudnn, context, call, deterministic):
    monkeypatch.setenv("XFORMER_DETERMINISTIC", deterministic)
    for spec in specs(monkeypatch, **CALLS[call]):
        graph, uids = build(cudnn, spec, context)
        assert len(set(uids.values())) == len(uids)
        assert getattr(graph, "selected_engine", None) is None
        assert cudnn.__version__.startswith(cudnn_plans._PRIVATE_VERSION)
        private = graph._lowered_graph._execute.__doc__  # addresses go this way, by uid
        assert "var_pack: collections.abc.Mapping[int, int], workspace: int, handle: int" in private


def test_a_plan_is_the_same_after_serialization(monkeypatch, cudnn, context):
    for spec in specs(monkeypatch, 100, 100, 64, mask=(2, 1, 1, 100)):
        graph, _ = build(cudnn, spec, context)
        copy = cudnn.pygraph(**context)
        copy.deserialize(bytes(graph.serialize()))
        assert copy.get_workspace_size() == graph.get_workspace_size()
        assert getattr(copy, "selected_engine", None) is None
        assert callable(copy._lowered_graph._execute)


def test_the_cotangent_of_the_output_may_be_packed_by_heads(monkeypatch, cudnn, context):
    _, _, backward = specs(monkeypatch, 100, 100, 64)
    packed = backward._replace(g=((2, 4, 100, 64), (4 * 100 * 64, 100 * 64, 64, 1)))
    assert packed.g != backward.g
    assert build(cudnn, packed, context)[0].get_workspace_size() >= 0


@pytest.mark.parametrize(("deterministic", "bytes_per_score"), [("0", 0), ("1", 2)])
def test_only_the_deterministic_derivative_stores_scores(monkeypatch, cudnn, context, deterministic, bytes_per_score):
    monkeypatch.setenv("XFORMER_DETERMINISTIC", deterministic)
    for spec in specs(monkeypatch, 4096, 4096, 64, mask=(2, 1, 1, 4096), causal=True):
        size = build(cudnn, spec, context)[0].get_workspace_size()
        expected = 2 * 4 * 4096 * 4096 * (bytes_per_score if spec.backward else 0)
        assert expected <= size < expected + 2 * 4 * 4096 * 4096 // 4


def test_cudnn_refuses_what_the_stand_in_refuses(monkeypatch, cudnn, context):
    """The rules of the stand-in that other tests use, and of `why_not`, are cuDNN's, as is the type of the error."""
    _, forward, backward = specs(monkeypatch, 64, 64, 64, bias=(64, 64))
    bottom_right = {"causal": "bottom_right"}
    wide = ((2, 4, 64, 264), (64 * 4 * 264, 264, 4 * 264, 1))
    odd = ((2, 4, 64, 12), (64 * 4 * 12, 12, 4 * 12, 1))
    for spec in (
        forward._replace(**bottom_right),
        backward._replace(**bottom_right),
        forward._replace(bias=None, dropout=True, **bottom_right),
        backward._replace(query=wide, key=wide, bias=None),
        forward._replace(query=odd, key=odd, bias=None),
        backward._replace(query=odd, key=odd, bias=None),
    ):
        with pytest.raises(cudnn.cudnnGraphNotSupportedError):
            build(cudnn, spec, context)


def test_library_versions_match_the_requirements(cudnn):
    tomllib, metadata = importlib.import_module("tomllib"), importlib.import_module("importlib.metadata")
    requirement = importlib.import_module("packaging.requirements").Requirement
    with open("pyproject.toml", "rb") as file:
        expected = map(requirement, tomllib.load(file)["project"]["optional-dependencies"]["cudnn"])
    for each in expected:
        assert each.specifier.contains(metadata.version(each.name))
