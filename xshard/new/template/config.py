"""Two spirals in float16 with a dynamic loss scale.

Cost: some seconds on a CPU. Expected: 100 % of the points between the training points (seeds 0 to 2).

Command: python -m xshard.main --config=config.py --workdir=runs/first
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
    """All values of the run; --config.name=value on the command line changes one."""
    config = ml_collections.ConfigDict()

    # Yours: whatever your experiment reads as self.config.NAME.
    config.experiment = "experiment.Spirals"
    config.model = {"hidden": (64, 64)}
    config.optimizer = {"learning_rate": 1e-2}
    # Arguments of DynamicLossScale.
    config.loss_scale = {"initial_loss_scale": 2.0**15, "increment_period": 200, "multiplier": 2.0}

    # What follows has every run; your values, the same names.
    config.seed = 0
    config.steps = 1000
    # The examples of a step on all replicas together, which divide it.
    config.batch_size = 192
    config.eval_batch_size = 192
    # Matrix products in float16, parameters and what is added up in float32.
    config.precision = "params=float32,compute=float16,output=float32"
    # At a loss or gradients that are not finite: 'stop'; 'skip', which leaves out steps with such gradients,
    # whatever the rule; or 'warn', which says so and goes on.
    config.on_nonfinite = "stop"
    # So many steps skipped in a row, with no loss scale left to be lowered, end the run.
    config.max_skips_in_a_row = 100
    # Where rows go: 'jsonl' always, 'csv', 'tensorboard', 'wandb', or the dotted path of a class of yours.
    config.writers = ("jsonl", "csv", "tensorboard")
    config.log_every_steps = 200
    config.eval_every_steps = 500

    # Parts of a batch that a replica computes one after the other, where memory is short, and how their
    # gradients are summed: a running sum, or 'EXPERIMENTAL_TREE', in pairs.
    config.micro_batches = 1
    config.aggregation_method = "EXPERIMENTAL_ACCUMULATE_N"
    # The replicas of each group, as [[0, 1, 2, 3], [4, 5, 6, 7]], to train a model each; empty: all in one.
    config.group_assignment = ()
    # Pods, or machines, that a slower network joins.
    config.slices = 1
    # The devices that hold one replica's parameters together.
    config.model_parallel = 1
    # Arguments of CrossShardOptimizer.
    config.reduction = {
        "reduction": "mean",
        "reduce_dtype": "float32",
        "slice_dtype": "float32",
        "shard_update": False,
    }

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
        "best_metric": "accuracy",
        "best_mode": "max",
        # When a save fails: 'stop', or 'go_on' without it.
        "on_failure": "stop",
        # Host memory for what is being saved or read, beside the state.
        "budget_gb": 4.0,
    }
    return config
