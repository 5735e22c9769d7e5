"""The language model over tokens, on 2 CPU cores: a tokenizer trained on the spot, and packed files.

Text: as of `lm_tiny`; two sources, of which a quarter of the tokens come from the second:
--config.text.files="('books','poems')" --config.text.weights="(3,1)".

Cost: five minutes on 2 cores beside other work. Expected: 2.11 bits a byte of the held-out text (seed 0).

Command: python -m xshard.main --config=configs/lm_words.py --workdir=runs/lm_words --cpu_devices=2
"""

import ml_collections

from configs import lm_tiny


def get_config() -> ml_collections.ConfigDict:
    """The config of `lm_tiny` over tokens."""
    config = lm_tiny.get_config()
    config.experiment = "experiments.lm.words.Words"
    config.steps = 600
    config.text.update(
        {
            # Tokens; a row has as many to predict, or to fill up.
            "length": 64,
            "vocabulary": 2048,
            # A file of the package tokenizers; empty: trained on so many of the files, evenly spread.
            "tokenizer": "",
            "tokenizer_files": 100,
            # Of each entry of text.files, the part of the tokens that it gives; empty: all are one source.
            "weights": (),
            # They feed the rows of a batch; a run goes on with as many, on however many processes.
            "streams": 4,
        }
    )
    config.sample.length = 60
    return config
