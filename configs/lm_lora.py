"""The language model of `lm_words`, which has learnt Python, adapted to English.

Text: this project's documents; or --config.text.files="('books',)". The base is the
last network of a run of `lm_words`: --init_from=runs/lm_words.

Cost: half a minute on 2 cores. Measured once, at commit 9a1e161b, whose documents had
twice the words: about 2.2 bits per byte of the held-out text, after 3.4 before the
first step; 2.1 with --config.lora.rank=0 and
--config.optimizer.learning_rate=4e-3, which trains all parameters (seed 0).

Command: python -m xshard.main --config=configs/lm_lora.py --workdir=runs/lm_lora
--init_from=runs/lm_words --cpu_devices=2
"""

import ml_collections

from configs import lm_words


def get_config() -> ml_collections.ConfigDict:
    """Returns the config of `lm_words` over another text."""
    config = lm_words.get_config()
    config.experiment = "experiments.lm.adapted.Adapted"
    config.steps = 200
    config.text.update(
        {
            "files": ("docs/*.md", "*.md", "experiments/*/README.md"),
            "held_out": 0.2,
            # The text.files and the text.held_out of the base, whose tokenizer this run
            # needs.
            "base_files": (),
            "base_held_out": 0.05,
        }
    )
    config.lora = {
        # 0: all parameters are trained, which is what to compare with.
        "rank": 16,
        "alpha": 32.0,
        # The arrays to adapt, by a regular expression.
        "select": "",
        # Those to train as they are.
        "train": "",
    }
    config.optimizer.learning_rate = 1e-2
    config.eval_every_steps = 100
    config.samples_every_steps = 100
    config.sample.prompts = ("The ", "A checkpoint ", "To ")
    return config
