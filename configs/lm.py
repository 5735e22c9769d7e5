"""A language model of bytes, of 26 million parameters, in bfloat16: for accelerators.

Text: Python's own sources, wherever this runs; or --config.text.files="('books/*.txt',)".

Cost: 4.0e16 floating-point operations, minutes on one accelerator. Not run: there was none here; what was run is
configs/lm_tiny.py, the same at another shape.

Command: python -m xshard.main --config=configs/lm.py --workdir=runs/lm
"""

import ml_collections

import xshard


def get_config() -> ml_collections.ConfigDict:
    """What differs from `xshard.config.default()`; --config.name=value on the command line changes a value."""
    config = xshard.config.default()
    config.experiment = "experiments.lm.experiment.LanguageModel"
    config.steps = 3000
    # Windows of text.
    config.batch_size = 64
    config.eval_batch_size = 64
    config.precision = "params=float32,compute=bfloat16,output=float32"

    config.text = {
        # Files, patterns, folders; empty: the sources of Python's standard library.
        "files": (),
        # About which part of the files is held out.
        "held_out": 0.05,
        # The bytes that a window is predicted over.
        "length": 1024,
        # So many windows of the held-out text are evaluated, evenly spread; 0: all.
        "eval_windows": 0,
    }
    config.model = {
        "layers": 8,
        "width": 512,
        "heads": 8,
        "feed_forward": 1408,
        # Computes a layer's activations again for its gradient, instead of keeping them.
        "remat": False,
        # 'auto': by the kernel that the backend has for these shapes; 'xla': by XLA, which writes all scores to memory.
        "attention": "auto",
    }
    config.optimizer = {
        "learning_rate": 1e-3,
        "warmup_fraction": 0.05,
        # Of the learning rate, at the last step.
        "final_fraction": 0.1,
        "b1": 0.9,
        "b2": 0.95,
        "weight_decay": 0.1,
        # Of the gradients' mean over all replicas.
        "clip_norm": 1.0,
    }
    config.loss_scale = {
        # 'dynamic', 'fixed' at the initial one, or 'none'. bfloat16 has float32's range and needs none.
        "kind": "none",
        "initial_loss_scale": 2.0**15,
        "increment_period": 200,
        "multiplier": 2.0,
    }
    config.sample = {
        "prompts": ("def ", "class ", "import "),
        # Bytes that are drawn for each.
        "length": 400,
        # 1: as likely as the model says; 0: the most likely.
        "temperature": 0.8,
    }
    config.samples_every_steps = 1000
    config.checkpoint.best_metric = "bits_per_byte"
    return config
