"""A language model of bytes with 26 million parameters, in bfloat16, for accelerators.

Text: the local Python's own sources; or --config.text.files="('books/*.txt',)".

Cost: 4.0e16 floating-point operations, minutes on one accelerator. Not run: there was
no accelerator here. configs/lm_tiny.py, the same model at another shape, was run.

Command: python -m xshard.main --config=configs/lm.py --workdir=runs/lm
"""

import ml_collections
from ml_collections import config_dict

import xshard


def get_config() -> ml_collections.ConfigDict:
    """Returns the defaults with this run's changes; --config.name=value on the command
    line overrides a value.
    """
    config = xshard.config.default()
    config.experiment = "experiments.lm.experiment.LanguageModel"
    config.steps = 3000
    # The number of windows of text.
    config.batch_size = 64
    config.eval_batch_size = 64
    config.precision = "params=float32,compute=bfloat16,output=float32"

    config.text = {
        # Files, patterns, folders; empty: the sources of Python's standard library.
        "files": (),
        # The approximate fraction of the files to hold out.
        "held_out": 0.05,
        # The number of bytes to predict per window.
        "length": 1024,
        # The number of windows of held-out text to evaluate, evenly spread; 0: all.
        "eval_windows": 0,
    }
    config.model = {
        "layers": 8,
        "width": 512,
        "heads": 8,
        "feed_forward": 1408,
        # Which of a layer's activations are computed again for its gradient, instead of
        # kept: True, all; or a policy such as 'dots_saveable': see
        # `xshard.remat_policy`. The reference has the type of both, so that a flag may
        # give either.
        "remat": config_dict.FieldReference(False, field_type=object),
        # 'auto': the backend's kernel, if it has one for these shapes; 'xla': XLA's,
        # which writes all scores to memory.
        "attention": "auto",
    }
    config.optimizer = {
        "learning_rate": 1e-3,
        "warmup_fraction": 0.05,
        # The learning rate at the last step, as a fraction of learning_rate.
        "final_fraction": 0.1,
        "b1": 0.9,
        "b2": 0.95,
        "weight_decay": 0.1,
        # The largest global norm of the gradients' mean over all replicas.
        "clip_norm": 1.0,
    }
    config.loss_scale = {
        # 'dynamic', 'fixed' at the initial scale, or 'none'. bfloat16 has float32's
        # range and needs no scale.
        "kind": "none",
        "initial_loss_scale": 2.0**15,
        "increment_period": 200,
        "multiplier": 2.0,
    }
    config.sample = {
        "prompts": ("def ", "class ", "import "),
        # The number of bytes to sample after each prompt.
        "length": 400,
        # 1: sample from the model's distribution; 0: take the most likely byte.
        "temperature": 0.8,
    }
    config.samples_every_steps = 1000
    config.checkpoint.best_metric = "bits_per_byte"
    return config
