"""Images become the pixels that transformers' processors with Pillow make."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tests.reference import normal, raises_line
from xformer.data.images import PROCESSOR_FILE, ImageProcessor, read_image
from xformer.errors import CheckpointError, ConfigError, DataError

Image = pytest.importorskip("PIL.Image")

# Smooth colors with noise, so that filters differ.
ROWS, COLUMNS = np.mgrid[:37, :61]
COLORS = np.stack([ROWS * 6.0, COLUMNS * 4.0, (ROWS * COLUMNS) % 256], axis=-1) + 20.0 * normal(0, 37, 61, 3)
PICTURE = np.clip(COLORS, 0, 255).astype(np.uint8)

VIT = {
    "image_processor_type": "ViTImageProcessor", "do_resize": True, "size": {"height": 16, "width": 16}, "resample": 2,
    "do_rescale": True, "rescale_factor": 0.00392156862745098, "do_normalize": True,
    "image_mean": [0.5, 0.4, 0.3], "image_std": [0.5, 0.6, 0.7],
}  # fmt: skip
CLIP = {
    **VIT, "image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 20}, "resample": 3,
    "do_center_crop": True, "crop_size": {"height": 16, "width": 18}, "do_convert_rgb": True,
}  # fmt: skip


def processor(directory, settings):
    (directory / PROCESSOR_FILE).write_text(json.dumps(settings))
    return ImageProcessor.from_pretrained(directory)


# Pixels in row 4 and column 7, and the mean of all, by the processors with Pillow of transformers 5.23.0.
# Another version of Pillow may round a pixel in another way.
CASES = {
    "square": (VIT, PICTURE, [-0.5922, 0.0719, 0.014, 0.0553]),
    "shorter side": (CLIP, PICTURE, [-0.4275, 0.0261, -0.1709, 0.0833]),
    "upright": (CLIP, np.swapaxes(PICTURE, 0, 1), [-0.349, -0.1373, 0.0588, 0.0763]),
    "smaller than the crop": ({**CLIP, "size": {"shortest_edge": 11}}, PICTURE, [-0.8118, -0.0588, 0.2549, -0.1802]),
    "without resizing": ({**CLIP, "do_resize": False, "do_normalize": False}, PICTURE, [0.2745, 0.3725, 0.451, 0.4513]),
    "gray": (VIT, PICTURE[:, :, 2], [-0.3804, -0.1503, 0.014, 0.0546]),
}


@pytest.mark.parametrize("name", CASES)
def test_pixels_are_those_of_transformers(tmp_path, name):
    settings, picture, expected = CASES[name]
    pixels = processor(tmp_path, settings)([picture])
    assert pixels.dtype == np.float32
    np.testing.assert_allclose([*pixels[0, :, 4, 7], pixels.mean()], expected, atol=0.01)


def test_old_files_have_one_number_for_a_size(tmp_path):
    square = processor(tmp_path, {**VIT, "size": 16, "feature_extractor_type": "ViTFeatureExtractor"})
    assert square.size == (16, 16)
    shorter = processor(
        tmp_path, {**CLIP, "image_processor_type": "CLIPImageProcessorFast", "size": 20, "crop_size": 16}
    )
    assert (shorter.size, shorter.crop) == (20, (16, 16))


def test_files_and_images_of_pillow_have_the_pixels_of_their_array(tmp_path):
    make = processor(tmp_path, VIT)
    expected = make([PICTURE])
    path = tmp_path / "a.png"
    Image.fromarray(PICTURE).save(path)
    np.testing.assert_array_equal(make([path, str(path), Image.fromarray(PICTURE)]), np.repeat(expected, 3, axis=0))
    turned = tmp_path / "turned.png"
    image = Image.fromarray(np.rot90(PICTURE))  # a camera that was held upright
    exif = image.getexif()
    exif[0x0112] = 6
    image.save(turned, exif=exif)
    np.testing.assert_array_equal(make([turned]), expected)
    transparent = Image.fromarray(PICTURE).convert("RGBA")
    np.testing.assert_array_equal(make([transparent]), expected)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"image_processor_type": "ConvNextImageProcessor"}, "image_processor_type 'ConvNextImageProcessor'"),
        ({"size": {"height": 0, "width": 16}}, "has size .*; expected a number of pixels"),
        ({"resample": 9}, "has resample 9; expected 0 to 5"),
        ({"rescale_factor": "x"}, "has rescale_factor 'x'; expected a number"),
        ({"image_mean": [1e300] * 3}, r"has image_mean \[1e\+300, .*; expected one or three numbers up to 1e6"),
        ({"image_std": [0.5, 0.0, 0.5]}, r"has image_std \[0.5, 0.0, 0.5\]; expected one or three positive numbers"),
        ({"do_pad": True}, "has do_pad true; expected false"),
    ],
)
def test_settings_that_are_damaged_or_unknown_are_refused(tmp_path, changes, match):
    with raises_line(CheckpointError, match):
        processor(tmp_path, {**VIT, **changes})


def test_what_is_no_image_is_refused(tmp_path):
    make = processor(tmp_path, VIT)
    text = tmp_path / "a.txt"
    text.write_text("no image")
    with raises_line(DataError, "a.txt is no image that Pillow reads"):
        make([text])
    for missing in (tmp_path / "missing.png", "https://example.com/cat.png"):
        with pytest.raises(FileNotFoundError, match=str(missing)):
            make([missing])
    for images in ("a.png", PICTURE, Image.fromarray(PICTURE), None):
        with raises_line(DataError, "images is .*; expected a list of images"):
            make(images)
    shorter = processor(tmp_path, {**CLIP, "do_center_crop": False})
    assert shorter([PICTURE, PICTURE]).shape == (2, 3, 20, 32)
    with raises_line(DataError, "images have the sizes .* after resizing; expected images of one size"):
        shorter([PICTURE, PICTURE[:30]])
    with raises_line(DataError, r"images is \[\]; expected at least one image"):
        make([])
    for changes in ({"mean": (0.5,) * 4}, {"std": (1.0, 0.0, 1.0)}, {"std": (float("nan"),)}, {"mean": ()}):
        with raises_line(ConfigError, r"(mean|std) is \(.*\); expected one or three (positive )?numbers"):
            make._replace(**changes)([PICTURE])
    np.testing.assert_array_equal(make._replace(mean=(0.5,))([PICTURE]), make._replace(mean=(0.5,) * 3)([PICTURE]))
    for image in (PICTURE / 255.0, PICTURE[None], np.zeros((0, 4, 3), np.uint8), PICTURE[:, :, :2], 7):
        with raises_line(DataError, r"an image is .*; expected 8 bits, \(height, width, 3\) or \(height, width\)"):
            read_image(image)
