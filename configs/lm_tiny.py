"""The language model on 2 CPU cores: float16 with a dynamic loss scale, on two
replicas.

Text: the local Python's own sources; or --config.text.files="('books/*.txt',)".

Cost: two to three minutes on 2 cores. Expected: 2.06 bits per byte of the held-out text
(seeds 0 and 1).

Command: python -m xshard.main --config=configs/lm_tiny.py --workdir=runs/lm_tiny
--cpu_devices=2
"""

import ml_collections

from configs import lm


def get_config() -> ml_collections.ConfigDict:
    """Returns the config of `lm` at a shape for CPUs."""
    config = lm.get_config()
    config.steps = 1100
    config.batch_size = 16
    config.eval_batch_size = 64
    config.precision = "params=float32,compute=float16,output=float32"
    config.text.update({"length": 128, "eval_windows": 512})
    config.model.update({"layers": 2, "width": 128, "heads": 4, "feed_forward": 384})
    config.optimizer.learning_rate = 4e-3
    config.loss_scale.kind = "dynamic"
    config.sample.length = 160
    config.eval_every_steps = 500
    return config
