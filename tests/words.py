"""The token language model, with a log of the tokens that it has seen, for tests with
real processes.
"""

import jax.numpy as jnp

from experiments.lm import words


class Seen(words.Words):
    """Logs a number that changes if a row has other tokens, or the same tokens in other
    places.
    """

    def loss(self, outputs, batch):
        value, scalars = super().loss(outputs, batch)
        text = batch["text"] + 7 * batch["text_segment_ids"]
        # float32 represents these integers exactly, so the sum does not depend on the
        # number of replicas.
        return value, {
            **scalars,
            "seen": jnp.sum(text * (1 + jnp.arange(text.shape[1]))),
        }
