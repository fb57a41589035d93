"""`TensorFiles`: the tensors of a checkpoint directory, one safetensors file or several with an index."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from xformer import io
from xformer.errors import CheckpointError
from xformer.io import bfloat16_of, read_json

_DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "I32": "<i4", "U8": "u1", "BOOL": "?"}
DTYPE_NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}

_INDEX, _SHARDS = "model.safetensors.index.json", "model-*-of-*.safetensors"


@dataclass(frozen=True)
class TensorEntry:
    """Position of a tensor in a file, and its dtype and shape.

    Attributes:
        path: The file.
        code: Name of the dtype in safetensors files, e.g. "BF16".
        shape: Shape of the tensor.
        offset: First byte of the data in the file.
    """

    path: Path
    code: str
    shape: tuple[int, ...]
    offset: int

    def read(self, *, keep: bool = False) -> Any:
        """Map the tensor into memory, read-only; bfloat16 is converted to float32, or not if `keep`."""
        if 0 in self.shape:
            return np.zeros(self.shape, "f4" if self.code == "BF16" else _DTYPES[self.code])
        dtype = _DTYPES[self.code]
        x: Any = np.memmap(self.path, dtype, mode="r", offset=self.offset, shape=self.shape or (1,)).reshape(self.shape)
        return bfloat16_of(x, keep=keep) if self.code == "BF16" else x


_FP4 = np.array([sign * x for sign in (1, -1) for x in (0, 0.5, 1, 1.5, 2, 3, 4, 6)], "f4")  # by 4 bits
_FP4_PAIRS = np.stack([np.tile(_FP4, 16), np.repeat(_FP4, 16)], axis=1)  # by byte: its lower, then its upper half
_POWERS = np.append(np.ldexp(np.float32(1), np.arange(255) - 127), np.float32(np.nan))  # by exponent


@dataclass(frozen=True)
class MXFP4Entry(TensorEntry):
    """Matrices of 4 bits for each value (MXFP4): blocks of 32 values, with a power of two as scale (gpt-oss).

    Attributes:
        blocks: Bytes of the values, (matrices, out_features, blocks, 16).
        scales: Exponents, biased by 127, (matrices, out_features, blocks).
    """

    blocks: TensorEntry
    scales: TensorEntry

    @classmethod
    def of(cls, name: str, blocks: TensorEntry, scales: TensorEntry) -> MXFP4Entry:
        """Return the entry of two tensors; raise CheckpointError if their dtypes and shapes do not fit."""
        if (blocks.code, scales.code) != ("U8", "U8") or len(scales.shape) != 3 or blocks.shape != (*scales.shape, 16):
            received = f"{name}_blocks has dtype {blocks.code} and shape {blocks.shape}, {name}_scales {scales.code}"
            expected = "expected U8, (matrices, features, blocks, 16) and (..., blocks)"
            raise CheckpointError(f"{blocks.path}: {received} and {scales.shape}; {expected}")
        matrices, features, num_blocks = scales.shape
        return cls(blocks.path, "MXFP4", (matrices, 32 * num_blocks, features), blocks.offset, blocks, scales)

    def read(self, *, keep: bool = False) -> Any:
        """Return the values in float32, (matrices, in_features, out_features)."""
        values = _FP4_PAIRS[self.blocks.read()]
        values *= _POWERS[self.scales.read()][..., None, None]
        matrices, in_features, out_features = self.shape
        return values.reshape(matrices, out_features, in_features).swapaxes(1, 2)


class TensorFiles(dict[str, TensorEntry]):
    """The tensors of a directory by name, read one at a time; files are mapped into memory, never read as a whole.

    Args:
        directory: Directory with model.safetensors, or else model.safetensors.index.json and the files that it names.

    Raises:
        CheckpointError: If the files are missing, damaged or in another format.
    """

    def __init__(self, directory: Path) -> None:
        super().__init__()
        single, index = directory / "model.safetensors", directory / _INDEX
        if single.exists():
            self |= read_header(single)
            if index.exists() and any(directory.glob(_SHARDS)):
                warnings.warn(
                    f"{directory} has {single.name} and shards with {index.name}; {single.name} is read, as by "
                    "transformers: delete the files that are outdated",
                    stacklevel=2,
                )
        elif index.exists():
            weight_map = read_json(index, "index").get("weight_map")
            if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
                raise CheckpointError(f"{index} has no weight_map; expected {{tensor: file}}")
            for name in sorted(set(weight_map.values())):
                if Path(name).name != name:
                    raise CheckpointError(f"{index} names the file {name!r}; expected a file of the same directory")
                self |= read_header(directory / name)
            if missing := weight_map.keys() - self.keys():
                raise CheckpointError(f"{index} lists {min(missing)}, which is in none of its files")
        else:
            raise CheckpointError(_describe_missing(directory))
        for name in [name.removesuffix("_blocks") for name in self if name.endswith("_blocks")]:
            if f"{name}_scales" in self:
                parts = self.pop(f"{name}_blocks"), self.pop(f"{name}_scales")
                self[name] = MXFP4Entry.of(name, *parts)

    def read_blocks(self, name: str) -> Any:
        """Return None, as safetensors files have no quantized blocks."""
        return None

    def dtype(self) -> str:
        """Return the name of the most frequent floating dtype."""
        codes = [entry.code for entry in self.values() if entry.code in DTYPE_NAMES]
        return DTYPE_NAMES[max(set(codes), key=codes.count)] if codes else "float32"


def remove_shards(directory: Path) -> None:
    """Remove the index of a checkpoint in shards and the shards, which model.safetensors replaces."""
    for path in (directory / _INDEX, *directory.glob(_SHARDS)):
        path.unlink(missing_ok=True)


def read_header(path: Path) -> dict[str, TensorEntry]:
    """Return the position, dtype and shape of each tensor of a safetensors file.

    Raises:
        CheckpointError: If the file is missing, truncated or not a safetensors file, or has an unknown dtype.
    """
    entries = {}
    for name, (code, shape, offset, _) in io.read_header(path)[0].items():
        if code not in _DTYPES:
            expected = f"one of {', '.join(_DTYPES)}: quantized checkpoints are not supported"
            raise CheckpointError(f"{path}: {name} has dtype {code}; expected {expected}")
        entries[name] = TensorEntry(path, code, shape, offset)
    return entries


def _describe_missing(directory: Path) -> str:
    for pattern in ("pytorch_model*.bin", "*.pt", "*.pth", "*.ckpt", "*.msgpack", "*.h5"):
        if found := sorted(directory.glob(pattern)):
            return (
                f"{directory} has its weights in {found[0].name}, a format that can run code or that xformer does not "
                "read; expected model.safetensors: convert it with save_pretrained of transformers"
            )
    return f"{directory} has neither model.safetensors nor model.safetensors.index.json"
