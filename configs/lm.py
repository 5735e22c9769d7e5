"""A language model of bytes, of 26 million parameters, in bfloat16: for accelerators.

Text: Python's own sources, wherever this runs; or --config.text.files="('books/*.txt',)".

Cost: 4.0e16 floating-point operations, minutes on one accelerator. Not run: there was none here; what was run is
configs/lm_tiny.py, the same at another shape.

Command: python -m xshard.main --config=configs/lm.py --workdir=runs/lm
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
    """All values of the run; --config.name=value on the command line changes one."""
    config = ml_collections.ConfigDict()
    config.experiment = "experiments.lm.experiment.LanguageModel"
    config.seed = 0
    config.steps = 3000
    # Windows of text.
    config.batch_size = 64
    config.eval_batch_size = 64
    config.micro_batches = 1
    config.aggregation_method = "EXPERIMENTAL_ACCUMULATE_N"
    config.precision = "params=float32,compute=bfloat16,output=float32"
    # At a loss or gradients that are not finite: 'stop'; 'skip', which leaves out steps with such gradients,
    # whatever the rule; or 'warn', which says so and goes on.
    config.on_nonfinite = "stop"
    # So many steps skipped in a row, with no loss scale left to be lowered, end the run.
    config.max_skips_in_a_row = 100

    # The replicas of each group, as [[0, 1, 2, 3], [4, 5, 6, 7]]; empty: all in one.
    config.group_assignment = ()
    # Pods, or machines, that a slower network joins.
    config.slices = 1
    # The devices that heads and feed-forward layers are spread over; it divides both.
    config.model_parallel = 1
    # Arguments of CrossShardOptimizer.
    config.reduction = {
        "reduction": "mean",
        "reduce_dtype": "float32",
        "slice_dtype": "float32",
        "shard_update": False,
    }

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

    config.log_every_steps = 50
    config.eval_every_steps = 500
    # Where rows go: 'jsonl' always, 'csv', 'tensorboard', 'wandb', or the dotted path of one's own.
    config.writers = ("jsonl", "csv", "tensorboard")
    config.checkpoint = {
        # Empty: in the work directory; or a path, gs://BUCKET/FOLDER, s3://BUCKET/FOLDER.
        "directory": "",
        "every_steps": 500,
        "every_minutes": 0.0,
        "keep_last": 3,
        # Those of steps that this divides are kept for good; 0: none.
        "keep_every_steps": 0,
        # So many of the best are kept by a metric of the evaluation, 'max' or 'min'.
        "keep_best": 0,
        "best_metric": "bits_per_byte",
        "best_mode": "min",
        # When a save fails: 'stop', or 'go_on' without it.
        "on_failure": "stop",
        # Host memory for what is being saved or read, beside the state.
        "budget_gb": 4.0,
    }
    return config
