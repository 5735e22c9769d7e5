"""Tests of samples, and of their rows."""

import json
import struct
import zlib

import numpy as np
import pytest

import xshard
from xshard import errors, samples
from xshard.metrics import writers


def pixels_of(content):
    """Returns the pixels of a PNG file, after checks of each chunk and line."""
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    place = 8
    chunks = {}
    while place < len(content):
        (length,) = struct.unpack_from(">I", content, place)
        body = content[place + 4 : place + 8 + length]
        end = place + 8 + length
        (checksum,) = struct.unpack_from(">I", content, end)
        assert checksum == zlib.crc32(body)
        chunks[body[:4]] = body[4:]
        place = end + 4
    width, height, depth, color_type = struct.unpack(">IIBB", chunks[b"IHDR"][:10])
    assert depth == 8 and list(chunks)[-1] == b"IEND"
    rows = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8).reshape(height, -1)
    assert not rows[:, 0].any()
    return rows[:, 1:].reshape(height, width, {0: 1, 2: 3}[color_type])


@pytest.mark.parametrize("shape", [(3, 5), (3, 5, 1), (3, 5, 3)])
def test_an_image_becomes_a_png_file_of_its_pixels(shape):
    whole = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    item = xshard.Image(whole).item()
    np.testing.assert_array_equal(pixels_of(samples.png(item)).reshape(shape), whole)
    assert (item["height"], item["width"]) == (3, 5)
    # A float becomes the nearest of 256 shades. NaN and values below 0 become black,
    # values above 1 white.
    np.testing.assert_array_equal(
        xshard.Image(whole / np.float32(255)).pixels.reshape(shape), whole
    )
    below = (np.arange(255.0) + 0.49) / 255
    assert xshard.Image([below]).pixels.ravel().tolist() == list(range(255))
    odd = xshard.Image(np.array([[np.nan, -1.0, 2.0, np.inf]])).pixels
    assert odd.ravel().tolist() == [0, 0, 255, 255]


def test_a_histogram_counts_the_finite_values_only():
    values = np.array([0.0, 1.0, 1.0, np.nan, 3.0, -np.inf])
    item = json.loads(json.dumps(xshard.Histogram(values).item()))
    assert sum(item["counts"]) == 4 and (item["sum"], item["squares"]) == (5.0, 11.0)
    assert (item["edges"][0], item["edges"][-1]) == (0.0, 3.0)
    assert sum(xshard.Histogram(np.full(3, np.nan)).item()["counts"]) == 0


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (
            lambda: xshard.Image(np.zeros((2, 3, 4))),
            r"of shape \(2, 3, 4\); an image is of",
        ),
        (lambda: xshard.Image(np.zeros(4)), "an image is of shape"),
        (
            lambda: xshard.Image(np.zeros((2, 2), int)),
            "array of int64; pixels are uint8, or .* / 255",
        ),
        (lambda: xshard.Histogram(np.zeros((2, 2))), "in one dimension: values.ravel"),
        (
            lambda: samples.named("X.samples", 5),
            "X.samples returned int. It must return a text, or",
        ),
        (lambda: samples.named("X.samples", {3: "a"}), "a sample called 3"),
    ],
)
def test_invalid_samples_are_refused(make, match):
    with pytest.raises(errors.UserError, match=match):
        make()


def test_rows_and_samples_are_merged_in_the_order_of_steps(tmp_path):
    rows = [{"step": 1, "loss": 1.0}, {"step": 4, "loss": 2.0}, {"step": 1.5}]
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    shown = [{"step": step, "samples": {}} for step in (1, 3)]
    path = tmp_path / "samples.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in shown))
    part = writers.Part(tmp_path, 4, {})
    assert list(part.everything()) == [rows[0], shown[0], shown[1], rows[1]]
