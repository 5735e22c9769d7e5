"""What an array is, wherever one enters."""

from typing import Any

import jax
import numpy as np


def is_array(value: Any) -> bool:
    """Returns whether a value is an array of JAX's, or one of NumPy's own.

    Others only look like one: the rows of a Series are labels, and a masked array loses
    its mask when it is copied.
    """
    return type(value) in (np.ndarray, np.memmap) or isinstance(value, jax.Array)
