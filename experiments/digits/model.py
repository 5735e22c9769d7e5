"""A small convolutional network for 8x8 images."""

import haiku as hk
import jax


class ConvNet(hk.Module):
    """Two convolutions, one hidden layer, and logits.

    The first convolution keeps the resolution. The second halves it, so the hidden
    layer sees 4x4 positions.
    """

    def __init__(self, channels: int, hidden: int, classes: int, dropout: float):
        super().__init__(name="conv_net")
        self._channels = channels
        self._hidden = hidden
        self._classes = classes
        self._dropout = dropout

    def __call__(self, images: jax.Array, *, is_training: bool) -> jax.Array:
        """Returns the logits of images.

        Args:
          images: an array of shape (batch, 8, 8, 1).
          is_training: whether to drop out.

        Returns:
          Logits of shape (batch, classes).
        """
        x = hk.Conv2D(self._channels, 3, name="conv_0")(images)
        x = jax.nn.relu(x)
        x = hk.Conv2D(2 * self._channels, 3, stride=2, name="conv_1")(x)
        x = jax.nn.relu(x)
        x = hk.Flatten()(x)
        x = hk.Linear(self._hidden, name="hidden")(x)
        x = jax.nn.relu(x)
        if is_training and self._dropout:
            x = hk.dropout(hk.next_rng_key(), self._dropout, x)
        return hk.Linear(self._classes, name="logits")(x)
