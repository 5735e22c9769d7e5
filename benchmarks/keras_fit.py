"""The same training by Keras' `fit` on JAX, as a peer of the training loop.

Keras reads the name of its backend from the environment when it is imported, so the
benchmark sets KERAS_BACKEND before that.
"""

import os
import time
from typing import Any

import numpy as np

from benchmarks import models


class Timed:
    """Times `fit` on a perceptron with Adam, like `models.Wide`."""

    def __init__(self, size: models.Size, steps: int, steps_per_execution: int):
        """Compiles the training.

        Args:
          size: the size of the perceptron and of its batches.
          steps: the number of steps that are timed.
          steps_per_execution: as Keras' argument: the number of steps of a dispatch.
        """
        os.environ["KERAS_BACKEND"] = "jax"
        import keras

        rng = np.random.default_rng(0)
        # As many examples as the loop has: an epoch of Keras' is a hundred steps.
        self._x = rng.normal(size=(100 * size.batch, 3)).astype(np.float32)
        self._y = (self._x @ np.array([1.0, -2.0, 0.5], np.float32))[:, None]
        layers: list[Any] = [keras.Input((3,))]
        for _ in range(size.layers):
            layers.append(keras.layers.Dense(size.width, activation="relu"))
        layers.append(keras.layers.Dense(1))
        self._model = keras.Sequential(layers)
        self._model.compile(
            optimizer=keras.optimizers.Adam(0.1),
            loss="mse",
            steps_per_execution=steps_per_execution,
        )
        self._size = size
        self._steps = steps
        self._fit(epochs=1)

    def seconds(self) -> float:
        """Returns the seconds per step of `fit`, without its first epoch."""
        # Whole epochs, since Keras ends a dispatch with an epoch.
        epochs = max(1, self._steps // 100)
        begin = time.perf_counter()
        self._fit(epochs)
        return (time.perf_counter() - begin) / (100 * epochs)

    def _fit(self, epochs: int) -> None:
        self._model.fit(
            self._x, self._y, batch_size=self._size.batch, epochs=epochs, verbose=0
        )
