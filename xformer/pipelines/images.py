"""Classes of images, with a Vision Transformer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np

from xformer.backends import to_host
from xformer.config import check_count
from xformer.data.images import ImageProcessor, Images, check_images
from xformer.errors import CheckpointError, ConfigError, DataError, check_arguments
from xformer.models import ImageEncoder, ImageTextEncoder
from xformer.pipelines.base import Pipeline, check_class
from xformer.pipelines.encoders import Prediction, class_predictions, label_names, predictions
from xformer.text.normalize import check_texts
from xformer.tokenizers import PretrainedTokenizer, load_tokenizer


class _ImagePipeline(Pipeline):
    """A model with the processor of its images."""

    processor: ImageProcessor

    def _check(self, model: Any, processor: ImageProcessor) -> None:
        """Raise ConfigError for objects of other classes, and unless the processor makes the images of the model."""
        check_class("model", model, *self.model_classes)
        check_class("processor", processor, ImageProcessor)
        config = getattr(model.config, "image", model.config)
        side, size = config.image_size, processor.crop or processor.size
        if size not in ((side, side), None) and not config.resize_positions:
            raise ConfigError(f"processor makes images of the size {size}; the model expects {(side, side)}")

    def _logits(self, images: Images, batch_size: int, function: Callable[[Any], Any]) -> Any:
        """Return function(pixels) of all images as a NumPy array, with `batch_size` of them at a time."""
        batches = [images[start : start + batch_size] for start in range(0, len(images), batch_size)]
        logits = self._run_batches(lambda batch: to_host(function(self.processor(batch))), batches)
        return np.concatenate(list(logits))


class ImageClassifier(_ImagePipeline):
    """Classify images: `ImageClassifier.from_pretrained("vit-base-patch16-224")(["cat.jpg"])`.

    Files are read with Pillow, the extra `images`. Probabilities are those of `Classifier`.

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
        self._check(model, processor)
        self.labels = label_names(type(self).__name__, model.config, labels)
        self.model, self.processor = model, processor

    @classmethod
    def _from_checkpoint(cls, model: Any, directory: Path) -> Self:
        return cls(model, ImageProcessor.from_pretrained(directory))

    def __call__(self, images: Images, *, batch_size: int = 16) -> list[Prediction]:
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
        logits = self._logits(images, batch_size, lambda pixels: self.model.class_logits(self.model(pixels)))
        return class_predictions(logits, self.labels, self.model.config.problem_type)


class ZeroShotImageClassifier(_ImagePipeline):
    """Classify images by texts: `ZeroShotImageClassifier.from_pretrained("clip-vit-base-patch32")(["1.jpg"], ["cat"])`.

    The probabilities of CLIP are a softmax over the labels; those of SigLIP are independent of each other.

    Args:
        model: The model.
        processor: Resizing and normalization of its images.
        tokenizer: Tokenizer of its texts.

    Raises:
        ConfigError: If the processor makes images of another size.
        CheckpointError: If texts are padded to one length (SigLIP), and the tokenizer has no padding token.
    """

    task = "zero-shot image classification"
    model_classes = (ImageTextEncoder,)

    def __init__(self, model: ImageTextEncoder, processor: ImageProcessor, tokenizer: PretrainedTokenizer) -> None:
        self._check(model, processor)
        check_class("tokenizer", tokenizer, PretrainedTokenizer)
        text = model.config.text
        self.max_length = min(tokenizer.model_max_length or text.max_positions, text.max_positions)
        fill = text.padding_id if text.eos_id is None else text.eos_id
        self._pads_to_max_length = fill is None
        fill = tokenizer.pad_id if fill is None else fill
        if fill is None:
            raise CheckpointError(
                f"{tokenizer.directory} names no pad_token; expected one, which texts are padded with"
            )
        self._fill = fill
        self.model, self.processor, self.tokenizer = model, processor, tokenizer

    @classmethod
    def _from_checkpoint(cls, model: Any, directory: Path) -> Self:
        return cls(model, ImageProcessor.from_pretrained(directory), load_tokenizer(directory))

    @check_arguments(
        candidate_labels="use labels", hypothesis_template="use template", top_k="use probabilities of the result"
    )
    def __call__(
        self, images: Images, labels: Sequence[str], *, template: str = "This is a photo of {}.", batch_size: int = 16
    ) -> list[Prediction]:
        """Return the class of each image.

        Args:
            images: As for `ImageClassifier`.
            labels: Names of the classes, e.g. ["a cat", "two dogs"].
            template: Text with {} where a name goes; "{}" is the name alone.
            batch_size: As for `ImageClassifier`.

        Raises:
            DataError: For a single text or no text as labels, equal labels, and one that is too long for the model; and
                as for `ImageClassifier`.
            ConfigError: For a template without {}.
        """
        check_count("batch_size", batch_size)
        check_images(images)
        check_texts(labels, "labels")
        labels = list(labels)
        if len(set(labels)) < max(1, len(labels)):
            raise DataError(f"labels is {labels!r:.60}; expected at least one text, and different ones")
        if not isinstance(template, str) or "{}" not in template:
            raise ConfigError(f"template is {template!r:.60}; expected a text with {{}} where a label goes")
        if not len(images):
            return []
        tokens, mask = self._encode_labels(labels, template)
        texts = self.model.encode_text(tokens, mask=mask)
        logits = self._logits(images, batch_size, lambda x: self.model.logits(self.model.encode_image(x), texts))
        return predictions(logits, labels, "sigmoid" if self.model.config.sigmoid else "softmax")

    def token_ids(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of texts, special tokens included, without padding.

        Raises:
            DataError: For a single text instead of a list, and texts that are too long for the model.
        """
        encoded = self.tokenizer.encode_batch(texts)
        for text, ids in zip(texts, encoded, strict=True):
            if len(ids) > self.max_length:
                raise DataError(f"{text!r:.60} has {len(ids)} tokens; expected at most {self.max_length}")
        return encoded

    def _encode_labels(self, labels: Sequence[str], template: str) -> tuple[list[list[int]], Any]:
        """Return the padded token ids of labels, and the mask that transformers would pass, or None."""
        encoded = self.token_ids([template.replace("{}", label) for label in labels])
        length = self.max_length if self._pads_to_max_length else max(map(len, encoded))
        tokens = [[*ids, *[self._fill] * (length - len(ids))] for ids in encoded]
        names = self.tokenizer.model_input_names
        if not self._pads_to_max_length or (names is not None and "attention_mask" not in names):
            return tokens, None
        return tokens, np.arange(length) < np.asarray([[len(ids)] for ids in encoded])
