"""The language model over tokens, on 2 CPU cores. The run trains its tokenizer, and
packs files into rows.

Text: as for `lm_tiny`. For two sources, with a quarter of the tokens from the second:
--config.text.files="('books','poems')" --config.text.weights="(3,1)".

Cost: five minutes on 2 shared cores. Expected: 2.11 bits per byte of the held-out text
(seed 0).

Command: python -m xshard.main --config=configs/lm_words.py --workdir=runs/lm_words
--cpu_devices=2
"""

import ml_collections

from configs import lm_tiny


def get_config() -> ml_collections.ConfigDict:
    """Returns the config of `lm_tiny` over tokens."""
    config = lm_tiny.get_config()
    config.experiment = "experiments.lm.words.Words"
    config.steps = 600
    config.text.update(
        {
            # The number of tokens to predict per row, including padding.
            "length": 64,
            "vocabulary": 2048,
            # A tokenizer file of the package tokenizers; empty: the run trains one on
            # `tokenizer_files` files.
            "tokenizer": "",
            "tokenizer_files": 100,
            # The share of tokens from each entry of text.files; empty: all entries are
            # one source.
            "weights": (),
            # The number of streams that fill a batch. A run resumes with the same
            # streams on any number of processes.
            "streams": 4,
        }
    )
    config.sample.length = 60
    return config
