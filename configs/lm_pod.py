"""A language model of bytes with 6.5 billion parameters, the shape of Llama 2 7B, for a
pod of 256 chips.

Not run. According to the dry run, `python -m xshard.dryrun --config=configs/lm_pod.py
--topology=v5e:16x16`, it needs 10.5 of a chip's 16 GiB, and a step over 4.2 million
bytes takes at least 4.6 s.

Command: python -m xshard.main --config=configs/lm_pod.py --workdir=runs/lm_pod \
  --config.checkpoint.directory=gs://BUCKET/lm_pod
  --config.text.files="('/data/**/*.txt',)"
"""

import ml_collections

from configs import lm


def get_config() -> ml_collections.ConfigDict:
    """Returns the config of `lm` at a shape for a pod."""
    config = lm.get_config()
    config.steps = 32_000
    config.batch_size = 1024
    config.eval_batch_size = 64
    config.micro_batches = 32
    config.model_parallel = 8
    config.reduction.shard_update = True
    config.text.update({"length": 4096, "held_out": 0.01, "eval_windows": 4096})
    config.model.update(
        {"layers": 32, "width": 4096, "heads": 32, "feed_forward": 11008, "remat": True}
    )
    config.optimizer.update({"learning_rate": 3e-4, "warmup_fraction": 0.06})
    return config
