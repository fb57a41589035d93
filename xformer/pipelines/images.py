"""Classes of images, with a Vision Transformer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np

from xformer.backends import to_host
from xformer.config import check_count
from xformer.data.images import ImageProcessor, ImageSource, check_images
from xformer.errors import ConfigError
from xformer.models import ImageEncoder
from xformer.pipelines.base import Pipeline, check_class
from xformer.pipelines.batching import run_batches
from xformer.pipelines.encoders import Prediction, label_names, predictions


class ImageClassifier(Pipeline):
    """Classify images: `ImageClassifier.from_pretrained("vit-base-patch16-224")(["cat.jpg"])`.

    Files are read with Pillow, the extra `images`.

    Args:
        model: A model with a classifier.
        processor: Resizing and normalization of its images.
        labels: Names of the classes. Default: those of the model's configuration, else "LABEL_0", ...

    Raises:
        ConfigError: If the model has no classifier, the number of labels is wrong, or the processor makes images of
            another size.
    """

    task = "image classification"
    model_classes = (ImageEncoder,)

    def __init__(self, model: ImageEncoder, processor: ImageProcessor, *, labels: Sequence[str] | None = None) -> None:
        check_class("model", model, ImageEncoder)
        check_class("processor", processor, ImageProcessor)
        self.labels = label_names(type(self).__name__, model.config, labels)
        side, size = model.config.image_size, processor.crop or processor.size
        if size not in ((side, side), None) and not model.config.resize_positions:
            raise ConfigError(f"processor makes images of the size {size}; the model expects {(side, side)}")
        self.model, self.processor = model, processor

    @classmethod
    def _from_checkpoint(cls, model: Any, directory: Path) -> Self:
        return cls(model, ImageProcessor.from_pretrained(directory))

    def __call__(self, images: Sequence[ImageSource], *, batch_size: int = 16) -> list[Prediction]:
        """Return the class of each image.

        Args:
            images: Paths of files, images of Pillow, or arrays of 8 bits, (height, width, 3) or (height, width).
            batch_size: Images that are read and classified at a time; after resizing they have one size. On NumPy each
                core runs one batch.

        Raises:
            DataError: For a single image instead of a list, files that are not images, and arrays of other shapes.
        """
        check_count("batch_size", batch_size)
        check_images(images)
        if not len(images):
            return []

        def run(batch: Sequence[ImageSource]) -> Any:
            return to_host(self.model.class_logits(self.model(self.processor(batch))))

        batches = [images[start : start + batch_size] for start in range(0, len(images), batch_size)]
        return predictions(np.concatenate(list(run_batches(run, batches, self.model))), self.labels)
