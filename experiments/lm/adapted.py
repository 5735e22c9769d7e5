"""The language model over tokens, adapted to another text by low-rank matrices."""

import xshard
from experiments.lm import text, words


class Adapted(words.Words):
    """Adapts the arrays that `config.lora` selects; with rank 0, trains all of them.

    It is to begin with the network of another run, and has that run's tokenizer.
    """

    def lora(self):
        if not self.config.lora.rank:
            return None
        return xshard.lora(**self.config.lora)

    def _tokenizer_texts(self):
        train, _ = text.documents(
            tuple(self.config.text.base_files), self.config.text.base_held_out
        )
        return train
