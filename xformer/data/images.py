"""Images: from files to the pixels that a model expects, with Pillow."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from xformer.errors import CheckpointError, ConfigError, DataError
from xformer.io import StrPath, read_json
from xformer.text.extras import require

PROCESSOR_FILE = "preprocessor_config.json"
# Types of preprocessor_config.json whose steps are those of `ImageProcessor`. An integer size is the shorter side in
# files of the second group, a square in those of the first.
_SQUARE, _SHORTER = ("ViT", "DeiT", "Siglip"), ("CLIP", "Bit")
_SUFFIXES = ("ImageProcessor", "ImageProcessorFast", "FeatureExtractor")

ImageSource = StrPath | Any
Images = Sequence[ImageSource]


class ImageProcessor(NamedTuple):
    """Resizing, cropping and normalization of images, in this order, as transformers does it with Pillow.

    Attributes:
        size: Height and width of the resized image, or the length of its shorter side; None keeps the size.
        crop: Height and width of the part in the middle; black where the image is smaller. None keeps all.
        resample: Number of Pillow's filter: 2 is bilinear, 3 is bicubic.
        scale: Factor of the pixels, which are 0 to 255; None is 1.
        mean: Mean of each channel, which is subtracted; None: pixels are not normalized.
        std: Standard deviation of each channel, which they are divided by.
    """

    size: tuple[int, int] | int | None
    crop: tuple[int, int] | None = None
    resample: int = 2
    scale: float | None = 1.0 / 255.0
    mean: tuple[float, ...] | None = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)

    @classmethod
    def from_pretrained(cls, directory: StrPath) -> ImageProcessor:
        """Read preprocessor_config.json of a checkpoint.

        Raises:
            CheckpointError: If the file is missing or damaged, or has other steps than these.
        """
        path = Path(directory) / PROCESSOR_FILE
        values = read_json(path, "image settings")
        name = str(values.get("image_processor_type", values.get("feature_extractor_type", "ViTImageProcessor")))
        if name not in {kind + suffix for kind in (*_SQUARE, *_SHORTER) for suffix in _SUFFIXES}:
            raise CheckpointError(f"{path} has an image_processor_type {name!r}, whose steps xformer does not have")
        if values.get("do_pad"):
            raise CheckpointError(f"{path} has do_pad true; expected false")

        def value(key: str, expected: str, is_valid: Any) -> Any:
            if not is_valid(values.get(key)):
                raise CheckpointError(f"{path} has {key} {values.get(key)!r:.60}; expected {expected}")
            return values[key]

        def sides(key: str, *, is_square: bool) -> tuple[int, int] | int:
            x = value(key, f"a number of pixels up to {_MAX_SIDE}, height and width, or shortest_edge", _is_size)
            if not isinstance(x, dict):
                return (x, x) if is_square else x
            return x["shortest_edge"] if "shortest_edge" in x else (x["height"], x["width"])

        is_square = name.startswith(_SQUARE)
        values = {"resample": 2 if is_square else 3, "rescale_factor": 1.0 / 255.0, **values}
        fields: dict[str, Any] = {"size": None, "scale": None, "mean": None}
        if values.get("do_resize", True):
            fields["size"] = sides("size", is_square=is_square)
            fields["resample"] = value("resample", "0 to 5", lambda x: type(x) is int and x in range(6))
        if values.get("do_center_crop", not is_square):
            fields["crop"] = sides("crop_size", is_square=True)
        if values.get("do_rescale", True):
            fields["scale"] = value("rescale_factor", "a number up to 1e6", _is_number)
        for field, (expected, is_valid) in _CHANNELS.items() if values.get("do_normalize", True) else ():
            fields[field] = tuple(value(f"image_{field}", expected, is_valid))
        return cls(**fields)

    def __call__(self, images: Images) -> Any:
        """Return the pixels of images as a NumPy array (images, channels, height, width) of float32.

        Args:
            images: Paths of files, images of Pillow, or arrays of 8 bits, (height, width, 3) or (height, width).

        Raises:
            DataError: For a single image or none instead of a list, files that are not images, and arrays of other
                shapes.
            ConfigError: For a mean or std with other than one or three numbers, and a std that is not positive.
        """
        check_images(images)
        if not len(images):
            raise DataError(f"images is {images!r:.60}; expected at least one image")
        for field, (expected, is_valid) in _CHANNELS.items():
            if self.mean is not None and not is_valid(x := getattr(self, field)):
                raise ConfigError(f"{field} is {x!r:.60}; expected {expected}")
        pixels = [self._pixels(read_image(image)) for image in images]
        if len(shapes := {x.shape[1:] for x in pixels}) != 1:
            raise DataError(f"images have the sizes {sorted(shapes)!r:.60} after resizing; expected images of one size")
        return np.stack(pixels)

    def _pixels(self, image: Any) -> Any:
        """Return the pixels (channels, height, width) of an image of Pillow."""
        width, height = image.size
        if self.size is not None:
            if isinstance(self.size, int):
                longer = int(self.size * max(width, height) / min(width, height))
                height, width = (longer, self.size) if width <= height else (self.size, longer)
            else:
                height, width = self.size
            image = image.resize((width, height), resample=self.resample)
        if self.crop is not None:
            top, left = (height - self.crop[0]) // 2, (width - self.crop[1]) // 2
            image = image.crop((left, top, left + self.crop[1], top + self.crop[0]))
        pixels = np.asarray(image)
        x: Any = (pixels if self.scale is None else pixels.astype(np.float64) * self.scale).astype(np.float32)
        if self.mean is not None:
            x = (x - np.asarray(self.mean, np.float32)) / np.asarray(self.std, np.float32)
        return np.moveaxis(x, -1, 0)


def check_images(images: Any) -> None:
    """Raise DataError for a single image, or an iterator, instead of a list."""
    if isinstance(images, str | os.PathLike) or not hasattr(images, "__len__") or hasattr(images, "shape"):
        raise DataError(f"images is {_described(images)}; expected a list of images")


def read_image(image: ImageSource) -> Any:
    """Return a Pillow image in RGB; files are rotated by their EXIF orientation.

    Args:
        image: Path of a file, image of Pillow, or array of 8 bits, (height, width, 3) or (height, width).

    Raises:
        DataError: If it is none of these, or damaged.
        OSError: If the file cannot be opened.
    """
    pil, operations = require("PIL.Image"), require("PIL.ImageOps")
    if isinstance(image, str | os.PathLike):
        with open(image, "rb") as file:
            try:
                return operations.exif_transpose(pil.open(file)).convert("RGB")
            except Exception as error:  # Pillow has many for damaged files
                reason = " ".join(str(error).split())[:100]
                raise DataError(f"{image} is no image that Pillow reads ({reason}); use another file") from error
    if isinstance(image, pil.Image):
        return image.convert("RGB")
    x = np.asarray(image)
    if x.dtype != np.uint8 or x.ndim not in (2, 3) or (x.ndim == 3 and x.shape[2] != 3) or 0 in x.shape:
        raise DataError(f"an image is {_described(image)}; expected 8 bits, (height, width, 3) or (height, width)")
    return pil.fromarray(x).convert("RGB")


def _described(x: Any) -> str:
    has_shape = hasattr(x, "shape") and hasattr(x, "dtype")
    return f"an array of shape {tuple(x.shape)} and dtype {x.dtype}" if has_shape else f"{x!r:.60}"


def _is_number(x: Any) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool) and abs(x) <= 1e6


def _is_mean(x: Any) -> bool:
    return isinstance(x, list | tuple) and len(x) in (1, 3) and all(map(_is_number, x))


_MAX_SIDE = 8192  # pixels of a resized image

# What mean and std are, and the function that checks it.
_CHANNELS = {
    "mean": ("one or three numbers up to 1e6", _is_mean),
    "std": ("one or three positive numbers, 1e-6 to 1e6", lambda x: _is_mean(x) and min(x) >= 1e-6),
}


def _is_size(x: Any) -> bool:
    if isinstance(x, dict):
        sides = [x["shortest_edge"]] if set(x) == {"shortest_edge"} else [x.get("height"), x.get("width")]
    else:
        sides = [x]
    return all(type(side) is int and 0 < side <= _MAX_SIDE for side in sides)
