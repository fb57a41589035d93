"""Models as safetensors files: parameters by name, and the configuration to build them from."""

from __future__ import annotations

import json
import os
from typing import Any, ClassVar, Self

from xformer.backends import Device, DType, dtype_name
from xformer.errors import CheckpointError, ConfigError, ShapeError
from xformer.io import load_arrays, restorable_dtype, restore_like, save_arrays
from xformer.models.config import ModelConfig
from xformer.tree import Module, flatten, replace

_FIRST_KIND = "Transformer"  # what files without a kind hold


class BaseModel(Module):
    """A whole network that is made from one configuration, and saved and loaded with it."""

    config_class: ClassVar[type[ModelConfig]]
    config: ModelConfig

    def __init__(
        self,
        config: Any,
        *,
        xp: Any,
        seed: Any = 0,
        dtype: DType | str | None = None,
        device: Device = None,
    ):
        raise NotImplementedError("a kind of model makes its own parts")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write parameters and configuration to one safetensors file, atomically."""
        metadata = {
            "format": "xformer",
            "model": type(self).__name__,
            "config": json.dumps(self.config.to_dict()),
            "dtype": dtype_name(flatten(self)[0][0].dtype),
        }
        save_arrays(path, dict(self.named_parameters()), metadata)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        *,
        xp: Any,
        dtype: DType | str | None = None,
        device: Device = None,
    ) -> Self:
        """Read a model that `save` wrote, into any library.

        dtype: default the one it was saved in; where the library does not have it, and for bfloat16 in NumPy, float32.

        Raises CheckpointError when the file is not such a model, BackendError when library, dtype or device is not
        there.
        """
        arrays, metadata = load_arrays(path)
        if metadata.get("format") != "xformer" or "config" not in metadata:
            raise CheckpointError(f"{path} is a safetensors file, but not an xformer model: it has no configuration")
        kind = metadata.get("model", _FIRST_KIND)
        if kind != cls.__name__:
            raise CheckpointError(f"{path} holds a {kind}; expected a {cls.__name__}; load it as what it is")
        try:
            config = cls.config_class.from_dict(json.loads(metadata["config"]))
            stored = restorable_dtype(xp, metadata.get("dtype", "float32"))
            blank = cls(config, xp=xp, dtype=stored if dtype is None else dtype, device=device)
            return replace(blank, restore_like(arrays, dict(blank.named_parameters())))  # type: ignore[no-any-return]
        except (ConfigError, ShapeError, ValueError) as error:
            raise CheckpointError(
                f"{path} does not hold the model that its configuration describes: {error}"
            ) from error
