"""Every optimizer in optax's public list that takes (grads, state, params)."""

import inspect
from collections.abc import Callable
from typing import Any

import haiku as hk
import optax
from optax import contrib

from tests.optimizers import harness
from xshard.optimizers import (
    base,
    cross_shard,
    loss_scale,
    moving_average,
    outer,
)
from xshard.optimizers import optax as optax_optimizer

# Each optimizer has a step size that moves the parameters of the harness visibly.
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "adabelief": lambda: optax.adabelief(0.1),
    "adadelta": lambda: optax.adadelta(1.0),
    "adafactor": lambda: optax.adafactor(0.1, min_dim_size_to_factor=2),
    "adagrad": lambda: optax.adagrad(0.1),
    "adam": lambda: optax.adam(0.1),
    "adamax": lambda: optax.adamax(0.1),
    "adamaxw": lambda: optax.adamaxw(0.1),
    "adamw": lambda: optax.adamw(optax.cosine_decay_schedule(0.1, 10)),
    "adan": lambda: optax.adan(0.1),
    "amsgrad": lambda: optax.amsgrad(0.1),
    "fromage": lambda: optax.fromage(0.1),
    "lamb": lambda: optax.lamb(0.1),
    "lars": lambda: optax.lars(0.1),
    "lbfgs": lambda: optax.lbfgs(0.1, linesearch=None),
    "lion": lambda: optax.lion(0.1),
    "nadam": lambda: optax.nadam(0.1),
    "nadamw": lambda: optax.nadamw(0.1),
    "noisy_sgd": lambda: optax.noisy_sgd(0.1),
    "novograd": lambda: optax.novograd(0.1),
    "optimistic_adam_v2": lambda: optax.optimistic_adam_v2(0.1),
    "optimistic_gradient_descent": lambda: optax.optimistic_gradient_descent(0.1),
    "radam": lambda: optax.radam(0.1),
    "rmsprop": lambda: optax.rmsprop(0.1, momentum=0.9, centered=True),
    "rprop": lambda: optax.rprop(0.1),
    "sgd": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "sign_sgd": lambda: optax.sign_sgd(0.1),
    "signum": lambda: optax.signum(0.1),
    "sm3": lambda: optax.sm3(0.1),
    "yogi": lambda: optax.yogi(0.1),
    "contrib.acprop": lambda: contrib.acprop(0.1),
    "contrib.ademamix": lambda: contrib.ademamix(0.1),
    "contrib.adopt": lambda: contrib.adopt(0.1),
    "contrib.cocob": lambda: contrib.cocob(0.1),
    "contrib.dadapt_adamw": lambda: contrib.dadapt_adamw(1.0),
    "contrib.galore": lambda: contrib.galore(0.1, rank=2),
    "contrib.madgrad": lambda: contrib.madgrad(0.1),
    "contrib.mechanize": lambda: contrib.mechanize(optax.adam(0.1)),
    "contrib.muon": lambda: contrib.muon(0.1),
    "contrib.prodigy": lambda: contrib.prodigy(1.0),
    "contrib.sam": lambda: contrib.sam(optax.sgd(0.1), optax.sgd(0.05), sync_period=2),
    "contrib.schedule_free_adamw": lambda: contrib.schedule_free_adamw(0.1),
    "contrib.schedule_free_sgd": lambda: contrib.schedule_free_sgd(0.1),
    "contrib.simplified_ademamix": lambda: contrib.simplified_ademamix(0.1),
    "MultiSteps": lambda: optax.MultiSteps(optax.adam(0.1), 2),
    "chain": lambda: optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.add_decayed_weights(1e-3),
        optax.adam(0.1),
        optax.ema(0.9),
    ),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adam)(
        learning_rate=0.1
    ),
    "back_off": lambda: optax_optimizer.with_back_off(optax.adam(0.1)),
    "apply_every": lambda: optax.chain(optax.apply_every(2), optax.sgd(0.1)),
    "partition": lambda: optax.partition(
        {"w": optax.adam(0.1), "b": optax.sgd(0.1)},
        {"mlp/linear_0": {"w": "w", "b": "b"}, "mlp/linear_1": {"w": "w"}},
    ),
}


# The decay of the averages of `WRAPPED`.
DECAY = 0.9


def _averaged(opt: Any) -> base.Optimizer:
    return moving_average.MovingAverageOptimizer(opt, DECAY, "count")


def _outer(opt: Any) -> base.Optimizer:
    # Of one slice, which it moves to where the slice is.
    return outer.OuterOptimizer(
        opt, optax.sgd(1.0), every_steps=2, axis_name=harness.GROUP_AXIS
    )


# Wrappers of xshard around one of these optimizers: its name, the place of the wrapper,
# and its constructor.
WRAPPED: dict[str, tuple[str, str, Callable[[Any], base.Optimizer]]] = {
    "MovingAverageOptimizer inside": ("adam", "inside", _averaged),
    "MovingAverageOptimizer outside": ("adam", "outside", _averaged),
    "OuterOptimizer inside": ("adam", "inside", _outer),
    "OuterOptimizer outside": ("adam", "outside", _outer),
}
NAMES = sorted({*OPTIMIZERS, *WRAPPED})

# The functions in optax's list that the table leaves out, by reason.
TAKES_THE_LOSS = {
    "polyak_sgd",
    "contrib.momo",
    "contrib.momo_adam",
    "contrib.reduce_on_plateau",
    "contrib.sophia",
}
DEPRECATED = {"optimistic_adam"}
TAKES_PER_EXAMPLE_GRADIENTS = {
    "contrib.dpsgd",
    "contrib.differentially_private_aggregate",
}
NOT_AN_OPTIMIZER = {
    "adaptive_grad_clip", "add_decayed_weights", "add_noise", "apply_every",
    "apply_if_finite", "centralize", "chain", "clip", "clip_by_block_rms",
    "clip_by_global_norm", "conditionally_mask", "conditionally_transform", "ema",
    "flatten", "freeze", "identity", "inject_hyperparams",
    "inject_stateful_hyperparams", "keep_params_nonnegative", "lookahead", "masked",
    "measure_with_ema", "multi_transform", "named_chain", "normalize_by_update_norm",
    "partition", "scale", "selective_transform", "set_to_zero", "snapshot", "stateless",
    "stateless_with_tree_map", "trace", "with_extra_args_support", "zero_nans",
    "contrib.normalize", "contrib.schedule_free", "contrib.split_real_and_imaginary",
}  # fmt: skip


def public_list() -> set[str]:
    """Returns the names of all public optax functions that return a transformation.

    Except `scale_by_*`.
    """
    names = set()
    for prefix, module in (("", optax), ("contrib.", contrib)):
        for name, f in inspect.getmembers(module, inspect.isfunction):
            returns = str(inspect.signature(f).return_annotation)
            if "GradientTransformation" in returns and not name.startswith(
                ("scale_by_", "_")
            ):
                names.add(prefix + name)
    return names


def bare(name: str) -> Any:
    """Returns the optax transformation in one optimizer of the table."""
    return OPTIMIZERS[WRAPPED[name][0] if name in WRAPPED else name]()


def make_optimizer(name: str, **options: Any) -> Callable[[], Any]:
    """Returns a constructor of one optimizer in both rules.

    The options are for CrossShardOptimizer.
    """
    _, place, wrap = WRAPPED.get(name, (name, "", None))

    def make() -> Any:
        at = lambda where, opt: wrap(opt) if wrap and place == where else opt
        opt = at("inside", optax_optimizer.OptaxOptimizer(bare(name), name="opt"))
        scale = loss_scale.DynamicLossScale(increment_period=2)
        opt = cross_shard.CrossShardOptimizer(opt, **options)
        return at("outside", loss_scale.MixedPrecisionLossScaleOptimizer(opt, scale))

    return make


def make_step(name: str) -> hk.TransformedWithState:
    """Returns a transformed step of one optimizer of the table."""
    return harness.transform_step(make_optimizer(name))
