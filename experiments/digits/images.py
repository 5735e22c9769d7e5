"""The images of handwritten digits, 1,797 of 8x8 pixels.

Source: E. Alpaydin and C. Kaynak, "Optical Recognition of Handwritten Digits", UCI
Machine Learning Repository, 1998, https://doi.org/10.24432/C50P49 (CC BY 4.0): its test
set, which is `load_digits` of scikit-learn, in the same order.
"""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

_TEST_EXAMPLES = 360


@functools.cache
def split():
    """Returns training and test examples, split by a fixed permutation.

    Images are float32 of shape (examples, 8, 8, 1), from 0 to 1; labels int32.
    """
    with np.load(pathlib.Path(__file__).with_name("digits.npz")) as digits:
        image = digits["image"]
        label = digits["label"]
    order = np.random.default_rng(0).permutation(len(label))
    image = (image / 16).astype(np.float32)[order, ..., None]
    label = label.astype(np.int32)[order]
    test = {"image": image[:_TEST_EXAMPLES], "label": label[:_TEST_EXAMPLES]}
    train = {"image": image[_TEST_EXAMPLES:], "label": label[_TEST_EXAMPLES:]}
    return train, test


def shift(key, images, limit):
    """Shifts each image randomly by up to `limit` pixels in both dimensions.

    The pixels that enter are zero.
    """
    if not limit:
        return images
    padded = jnp.pad(images, ((0, 0), (limit, limit), (limit, limit), (0, 0)))
    corners = jax.random.randint(key, (len(images), 2), 0, 2 * limit + 1)

    def crop(image, corner):
        return jax.lax.dynamic_slice(image, (*corner, 0), images.shape[1:])

    return jax.vmap(crop)(padded, corners)
