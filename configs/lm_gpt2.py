"""GPT-2 of 124 million parameters, which begins with the weights of the hub.

Needed from the hub's repository of GPT-2: `model.safetensors` and `tokenizer.json`.
Text: as for `lm_tiny`.

Cost: not trained; `tests/hub_test.py` trains a small one.

Command: python -m xshard.main --config=configs/lm_gpt2.py --workdir=runs/lm_gpt2
--init_from=model.safetensors --init_convert=experiments.lm.gpt2.HUB
"""

import ml_collections

from configs import lm_words


def get_config() -> ml_collections.ConfigDict:
    """Returns the config of `lm_words` with GPT-2's network and tokens."""
    config = lm_words.get_config()
    config.experiment = "experiments.lm.gpt2.LanguageModel"
    config.steps = 200
    config.batch_size = 8
    config.eval_batch_size = 8
    config.optimizer.learning_rate = 3e-5
    config.model = ml_collections.ConfigDict(
        {
            "layers": 12,
            "width": 768,
            "heads": 12,
            "feed_forward": 3072,
            "attention": "auto",
            # The positions that have a parameter.
            "positions": 1024,
        }
    )
    config.text.update(
        {
            "length": 256,
            "vocabulary": 50257,
            "tokenizer": "tokenizer.json",
            # The token that ends a text.
            "end": "<|endoftext|>",
        }
    )
    return config
