"""A test for each fault that others have found in this package, with its kind.

The number of a test is that of the fault in the order in which they were found. The
units' own tests have more of each.
"""

import base64
import codecs
import collections
import contextlib
import copy
import datetime
import decimal
import enum
import fcntl
import functools
import io
import json
import math
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
import types
import warnings
import zlib

import haiku as hk
import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import optax
import pytest
import tokenizers
from jax import export as jax_export
from ml_collections import config_dict
from optax import contrib
from safetensors import numpy as safetensors

import xshard
from configs import lm_words
from experiments.lm import words
from launch import engine, sweep
from tests import disks, rows, toy, winged
from tests.checkpoint import harness as checkpoint_harness
from tests.checkpoint import suspended
from tests.faults import lacking_disk
from tests.launch import harness
from xshard import (
    checkpoint,
    config_values,
    data,
    errors,
    export,
    loop,
    methods,
)
from xshard import config as config_lib
from xshard import experiment as experiment_lib
from xshard import mesh as mesh_lib
from xshard.base import clock, primitives
from xshard.checkpoint import lock
from xshard.checkpoint import store as store_lib
from xshard.data import batches, pipelines, text
from xshard.files import claim, disk, identity, jsonfile, tensors, workdir
from xshard.learners import validation
from xshard.metrics import rows as rows_lib
from xshard.metrics import writer, writers
from xshard.optimizers import gathering, trees
from xshard.pod import (
    attempts,
    exit_codes,
    heartbeat,
    rendezvous,
    request,
    startup,
    status,
    watchdog,
)
from xshard.replay import replayer
from xshard.report import runs as report_runs
from xshard.run import checkpoints, preflight
from xshard.training import state as state_lib
from xshard.training import step as step_lib

# Numbers of a step: skipped steps, sums, means, types.

# Divisible by 1, 2, 3, 4, 6 and 8 replicas, each with 1, 2 or 3 micro-batches.
NUMERICS_ROWS = 144


class NumericsNormalized(toy.Normalized):
    """Has a batch norm, and a rule whose steps are skipped if they are not finite."""

    def optimizer(self):
        reduction = self.config.reduction
        if self.config.rule == "averages":
            rule = xshard.CrossShardOptimizer(optax.adam(0.1), **reduction)
            return xshard.MovingAverageOptimizer(rule, 0.5)
        if self.config.rule == "free":
            rule = optax.contrib.schedule_free_sgd(0.1)
            return xshard.CrossShardOptimizer(rule, **reduction)
        rule = xshard.CrossShardOptimizer(optax.adam(0.1), **reduction)
        rule = xshard.MovingAverageOptimizer(rule, 0.5)
        return xshard.MixedPrecisionLossScaleOptimizer(rule, "dynamic")


def _numerics_config(**changes):
    config = toy.get_config()
    config.batch_size = NUMERICS_ROWS
    config.reduction.update(changes.pop("reduction", {}))
    with config.unlocked():
        config.update(changes)
    return config.lock()


def _numerics_batch():
    x = np.random.default_rng(0).normal(size=(NUMERICS_ROWS, 3)).astype(np.float32)
    return {"x": x, "y": x.sum(1)}


class _NumericsSteps:
    """Makes steps of an experiment on some devices.

    Attributes:
      state: the state after the last step.
    """

    def __init__(self, kind, devices, groups=None, **changes):
        experiment = kind(_numerics_config(**changes))
        mesh = xshard.make_mesh(groups, devices=jax.devices()[:devices])
        self.state = xshard.init(experiment, mesh, 0, _numerics_batch())
        self._step = jax.jit(xshard.make_train_step(experiment, mesh))

    def __call__(self, batch=None):
        """Makes a step; returns its metrics on the host."""
        batch = _numerics_batch() if batch is None else batch
        self.state, metrics = self._step(self.state, batch)
        return jax.device_get(metrics)

    def leaves(self):
        """Returns the arrays of the state on the host, by path."""
        return _numerics_leaves(self.state)


def _numerics_leaves(state):
    leaves = trees.present(state.experiment)
    return {path: np.asarray(x) for path, x in leaves.items()}


def _numerics_bits(x):
    return np.ascontiguousarray(x).view(np.uint8).tolist()


@pytest.mark.parametrize(
    "rule, devices, changes",
    [
        ("averages", 4, {"reduction": {"shard_update": True}}),
        ("free", 2, {}),
        ("scaled", 2, {"reduction": {"shard_params": True}}),
    ],
)
def test_01_a_skipped_step_leaves_statistics_for_evaluation(rule, devices, changes):
    changes = {"estimate_statistics": True, "on_nonfinite": "skip", **changes}
    steps = _NumericsSteps(NumericsNormalized, devices, rule=rule, **changes)
    steps()
    for bad in (np.nan, np.inf):
        before = steps.leaves()
        batch = _numerics_batch()
        batch["x"][-1, 0] = bad
        assert steps(batch)["skipped"] == 1
        after = steps.leaves()
        statistics = [path for path in after if "/statistics/" in path]
        assert len(statistics) == 4
        for path, x in after.items():
            # A skipped step changes the state of a loss scale alone.
            if not path.endswith(("current_loss_scale", "good_steps")):
                assert _numerics_bits(x) == _numerics_bits(before[path]), path
    assert steps()["skipped"] == 0
    moved = steps.leaves()
    for path in statistics:
        assert np.all(np.isfinite(moved[path]))
        assert not np.array_equal(moved[path], after[path])


class NumericsSmallest(NumericsNormalized):
    """Keeps the smallest value so far, which is infinite at first, and a mask."""

    def forward(self, batch, *, is_training):
        init = hk.initializers.Constant(jnp.inf)
        smallest = hk.get_state("smallest", [], jnp.float32, init)
        hk.get_state("mask", [2], jnp.float32, lambda *_: jnp.array([0.0, -jnp.inf]))
        if is_training:
            smallest = jnp.minimum(smallest, jnp.min(batch["x"]))
            hk.set_state("smallest", smallest)
        return super().forward(batch, is_training=is_training)


@pytest.mark.parametrize("estimates", [False, True])
def test_01_statistics_that_begin_at_infinity_become_finite(estimates):
    steps = _NumericsSteps(
        NumericsSmallest, 2, rule="averages", estimate_statistics=estimates
    )
    steps()
    steps()
    leaves = steps.leaves()
    named = lambda name: [
        x for path, x in leaves.items() if path.endswith(f"/~/{name}")
    ]
    smallest, average = named("smallest")
    assert np.isfinite(smallest)
    assert np.isfinite(average)
    for mask in named("mask"):
        assert mask.tolist() == [0.0, -np.inf]


class NumericsEmptyState(toy.Toy):
    """Has network state without elements."""

    def forward(self, batch, *, is_training):
        for dtype in (jnp.float32, jnp.float16, jnp.complex64):
            name = f"empty_{jnp.dtype(dtype).name}"
            hk.get_state(name, [0, 3], dtype, jnp.zeros)
        return super().forward(batch, is_training=is_training)


@pytest.mark.parametrize(
    "changes",
    [{}, {"micro_batches": 2}, {"slices": 2}, {"logical_replicas": 4}],
    ids=str,
)
def test_21_network_state_without_elements_trains(changes):
    steps = _NumericsSteps(NumericsEmptyState, 2, **changes)
    assert np.isfinite(steps()["loss"])


class NumericsConstant(toy.Toy):
    """Has a gradient that is a constant of the config, in each element."""

    def forward(self, batch, *, is_training):
        del is_training
        dtype = batch["x"].dtype
        return hk.get_parameter("w", (252, 8), dtype, hk.initializers.Constant(0.0))

    def loss(self, outputs, batch):
        del batch
        return jnp.sum(outputs.astype(jnp.float32)) * self.config.slope, {}

    def optimizer(self):
        return xshard.CrossShardOptimizer(
            optax.sgd(2.0**-10), slice_axis_name="slice", **self.config.reduction
        )


@pytest.mark.parametrize("dtype, devices", [("float16", 4), ("bfloat16", 3)])
@pytest.mark.parametrize(
    "changes",
    [{}, {"micro_batches": 3, "gather_once": True}],
    ids=str,
)
def test_02_a_mean_of_narrow_gradients_in_shards_is_exact(dtype, devices, changes):
    # Twice it overflows float16, and three times it needs more bits than bfloat16 has.
    slope = 41216.0
    precision = f"params={dtype},compute={dtype},output={dtype}"
    steps = _NumericsSteps(
        NumericsConstant,
        devices,
        slope=slope,
        precision=precision,
        reduction={"shard_params": True},
        **changes,
    )
    metrics = steps()
    (w,) = (x for path, x in steps.leaves().items() if path.endswith("/w"))
    np.testing.assert_array_equal(w.astype(np.float32), -slope * 2.0**-10)
    # A gradient of the mean of three parts is rounded in the narrow type.
    np.testing.assert_allclose(
        metrics["gradient_norm"], slope * np.sqrt(w.size), rtol=2e-3
    )


def test_31_parameters_that_an_exchange_leaves_alone_stay_as_they_are():
    def step(params):
        rule = xshard.OuterOptimizer(
            optax.sgd(1.0), optax.sgd(1.0), every_steps=2, delay_steps=1
        )
        grads = jax.tree.map(jnp.zeros_like, params)
        return rule.apply_gradients(grads, params)

    step = hk.transform_with_state(step)
    w = np.random.default_rng(0).normal(size=100).astype(np.float32)
    params = {"m": {"w": jnp.asarray(w)}}
    _, state = step.init(None, params)
    apply = lambda params, state: step.apply({}, state, None, params)
    apply = jax.jit(jax.vmap(apply, axis_name="slice"))
    params, state = jax.tree.map(lambda x: jnp.stack([x] * 3), (params, state))
    for _ in range(3):
        params, state = apply(params, state)
    for of_slice in np.asarray(params["m"]["w"]):
        np.testing.assert_array_equal(of_slice, w)


class NumericsGiving(xshard.OptimizerWrapper):
    """Gives each parameter without a gradient one of 3."""

    def __init__(self, opt):
        super().__init__()
        self.opt = opt

    def aggregate(self, grads):
        grads = trees.leaves_by_path(self.opt.aggregate(grads))
        if grads["~/unused"] is None:
            grads["~/unused"] = jnp.full((48, 16), 3.0)
        return {"~": {name.removeprefix("~/"): x for name, x in grads.items()}}


class NumericsUnused(toy.Toy):
    """Has a parameter that the loss does not depend on."""

    def forward(self, batch, *, is_training):
        del is_training
        hk.get_parameter("unused", (48, 16), init=jnp.zeros)
        used = hk.get_parameter("used", (48, 16), init=jnp.zeros)
        return batch["x"][:, 0] + jnp.sum(used)

    def optimizer(self):
        rule = xshard.OptaxOptimizer(optax.sgd(0.5, momentum=0.5))
        if self.config.gives_within:
            rule = NumericsGiving(rule)
        rule = xshard.CrossShardOptimizer(rule, **self.config.reduction)
        if not self.config.gives_within:
            rule = NumericsGiving(rule)
        return rule


@pytest.mark.parametrize("shard_update", [False, True])
@pytest.mark.parametrize("gives_within", [False, True])
def test_05_a_gradient_that_aggregate_gives_moves_its_parameter(
    shard_update, gives_within
):
    reduction = {"shard_update": shard_update}
    steps = _NumericsSteps(
        NumericsUnused, 3, gives_within=gives_within, reduction=reduction
    )
    steps()
    steps()
    leaves = steps.leaves()
    # Within the reduction the gradients of all replicas are summed.
    slope = 9.0 if gives_within else 3.0
    (trace,) = (x for path, x in leaves.items() if path.endswith("trace/~/unused"))
    np.testing.assert_array_equal(trace, 1.5 * slope)
    np.testing.assert_array_equal(leaves["params/~/unused"], -0.5 * 2.5 * slope)
    assert np.all(leaves["params/~/used"] != 0)


class NumericsShrinking(xshard.OptimizerWrapper):
    """Halves every parameter after an update, or where parameters are exchanged."""

    def __init__(self, opt, phase):
        super().__init__()
        self.opt = opt
        self._phase = phase

    def update(self, grads, params):
        new = self.opt.update(grads, params)
        return self._shrink(new) if self._phase == "update" else new

    def exchange(self, before, after, applied):
        new = self.opt.exchange(before, after, applied)
        return self._shrink(new) if self._phase == "exchange" else new

    def _shrink(self, params):
        return jax.tree.map(lambda x: x / 2, params)


class NumericsShrunk(toy.Toy):
    """Has parameters that are frozen, or on which the loss does not depend."""

    def forward(self, batch, *, is_training):
        del is_training
        hk.get_parameter("unused", (48, 16), init=jnp.ones)
        fixed = hk.get_parameter("fixed", (48, 16), init=jnp.ones)
        used = hk.get_parameter("used", (48, 16), init=jnp.ones)
        return batch["x"][:, 0] + jnp.mean(used + fixed)

    def frozen(self):
        return "fixed"

    def optimizer(self):
        rule = xshard.CrossShardOptimizer(optax.sgd(0.5), **self.config.reduction)
        return NumericsShrinking(rule, self.config.phase)


@pytest.mark.parametrize("phase", ["update", "exchange"])
@pytest.mark.parametrize("sharded", ["", "shard_update", "shard_params"])
def test_05_a_rule_moves_parameters_without_a_gradient(sharded, phase):
    reduction = {sharded: True} if sharded else {}
    steps = _NumericsSteps(NumericsShrunk, 3, phase=phase, reduction=reduction)
    steps()
    steps()
    leaves = steps.leaves()
    np.testing.assert_array_equal(leaves["params/~/unused"], 0.25)
    np.testing.assert_array_equal(leaves["params/~/fixed"], 0.25)
    assert np.all(leaves["params/~/used"] < 0.25)


def _numerics_regions(jaxpr):
    """Yields `prevent_cse` of the `jax.checkpoint` regions that apply tanh."""
    for eqn in primitives.all_equations(jaxpr):
        if eqn.primitive.name == "remat2":
            inner = primitives.all_equations(eqn.params["jaxpr"])
            if any(x.primitive.name == "tanh" for x in inner):
                yield eqn.params["prevent_cse"]


@pytest.mark.parametrize("scans", [False, True])
@pytest.mark.parametrize("prevent_cse", [False, True, (False, True)], ids=str)
def test_11_a_rematerialization_keeps_whether_it_prevents_cse(prevent_cse, scans):
    def layer(x, w):
        return jnp.tanh(x * w), None

    layer = jax.checkpoint(layer, prevent_cse=prevent_cse)

    def network(x):
        ws = hk.get_parameter("ws", (2, 512), init=jnp.ones)
        if scans:
            return hk.scan(layer, x, ws)[0]
        return layer(x, ws[0])[0]

    def loss_gradients(apply):
        loss = lambda params, x: jnp.sum(apply(params, {}, None, x)[0])
        return jax.grad(loss, argnums=(0, 1))

    mesh = xshard.make_mesh(devices=jax.devices()[:1])
    x = jnp.ones(512)
    transformed = hk.transform_with_state(network)
    params, _ = transformed.init(None, x)
    gatherer = gathering.Gatherer(mesh, {})
    apply = gatherer.apply(network, jnp.float32)
    expected = jax.make_jaxpr(loss_gradients(transformed.apply))(params, x)
    found = jax.make_jaxpr(loss_gradients(apply))(params, x)
    # The region around the whole network prevents it, and its own do as they are told.
    outer, *inner = _numerics_regions(found.jaxpr)
    assert outer is True
    assert inner == list(_numerics_regions(expected.jaxpr))
    np.testing.assert_array_equal(
        *(jax.jit(loss_gradients(f))(params, x)[1] for f in (transformed.apply, apply))
    )


class NumericsFixed(toy.Toy):
    """Has network state that nothing sets, or that no replica's data changes; and a
    mean of its data.
    """

    def forward(self, batch, *, is_training):
        dtype = jnp.dtype(self.config.state_dtype)
        draw = hk.initializers.RandomNormal()
        largest = hk.initializers.Constant(float(jnp.finfo(dtype).max))
        hk.get_state("table", (1000,), dtype, draw)
        hk.get_state("largest", (), dtype, largest)
        hk.get_state("masked", (2,), dtype, lambda *_: jnp.array([-jnp.inf, -0.0]))
        cooled = hk.get_state("cooled", (), dtype, jnp.ones)
        seen = hk.get_state("seen", (5,), dtype, jnp.zeros)
        if is_training:
            hk.set_state("cooled", cooled * jnp.asarray(0.9, dtype))
            hk.set_state("seen", seen + jnp.mean(batch["x"]).astype(dtype))
        return hk.Linear(1)(batch["x"])[:, 0]

    def optimizer(self):
        rule = xshard.CrossShardOptimizer(
            optax.sgd(0.1), slice_axis_name="slice", **self.config.reduction
        )
        return xshard.MovingAverageOptimizer(rule, 0.3)


def _numerics_check_fixed(before, after, steps):
    """Checks the state of `NumericsFixed` before and after some steps."""
    names = [path for path in after if path.endswith(("table", "largest", "masked"))]
    # The network's state, and its averages for evaluation.
    assert len(names) == 6
    for path in names:
        assert _numerics_bits(after[path]) == _numerics_bits(before[path]), path
    (cooled,) = (x for path, x in after.items() if path.endswith("net_state/~/cooled"))
    expected = np.ones((), cooled.dtype)
    for _ in range(steps):
        expected *= np.asarray(0.9, cooled.dtype)
    assert np.all(cooled == expected)
    (seen,) = (x for path, x in after.items() if path.endswith("net_state/~/seen"))
    # Sums in another order, and of numbers that cancel, differ by some last bits.
    mean = np.mean(_numerics_batch()["x"], dtype=np.float64)
    rtol = 1e-2 if seen.dtype == np.float16 else 1e-4
    np.testing.assert_allclose(seen.astype(np.float32), steps * mean, rtol=rtol)


@pytest.mark.parametrize(
    "devices, changes",
    [
        (3, {}),
        (6, {"reduction": {"shard_update": True}}),
        (3, {"reduction": {"shard_params": True}, "micro_batches": 3}),
        (8, {"state_dtype": "float16"}),
    ],
    ids=str,
)
def test_31_state_that_replicas_hold_alike_stays_as_it_is(devices, changes):
    steps = _NumericsSteps(
        NumericsFixed, devices, **{"state_dtype": "float32", **changes}
    )
    before = steps.leaves()
    for _ in range(3):
        steps()
    _numerics_check_fixed(before, steps.leaves(), steps=3)


def test_31_state_that_groups_hold_alike_stays_as_it_is():
    groups = ((0, 1, 2), (3, 4, 5))
    steps = _NumericsSteps(NumericsFixed, 6, groups, state_dtype="float32")
    before = steps.leaves()
    for _ in range(3):
        steps()
    for path, x in steps.leaves().items():
        if path.endswith(("table", "largest", "masked")):
            assert _numerics_bits(x) == _numerics_bits(before[path]), path


def test_31_state_that_logical_replicas_hold_alike_stays_as_it_is():
    """An exact sum rounds small elements beside large ones, on one device too."""
    config = _numerics_config(
        state_dtype="float32",
        logical_replicas=3,
        reduction={"arithmetic": "exact"},
        examples=NUMERICS_ROWS,
    )
    final = []
    for devices in (1, 3):
        experiment = NumericsFixed(config)
        mesh = experiment_lib.mesh_of(config, jax.devices()[:devices])
        batch = _numerics_batch()
        state = xshard.init(experiment, mesh, 0, batch)
        before = _numerics_leaves(state)
        step = preflight.jitted_step(experiment, mesh)
        for _ in range(3):
            state = step(state, batch).state
        final.append(_numerics_leaves(state))
        _numerics_check_fixed(before, final[-1], steps=3)
    for path, x in final[0].items():
        assert _numerics_bits(x) == _numerics_bits(final[1][path]), path


class NumericsEmpty(toy.Toy):
    """Has two trained arrays without elements."""

    def forward(self, batch, *, is_training):
        del is_training
        w = hk.get_parameter("w", (3,), init=jnp.zeros)
        empty = hk.get_parameter("none", (0,), init=jnp.zeros)
        empty_too = hk.get_parameter("nothing", (0, 4), init=jnp.zeros)
        return batch["x"] @ w + jnp.sum(empty) + jnp.sum(empty_too)

    def optimizer(self):
        rule = optax.sgd(0.1, momentum=0.9)
        return xshard.CrossShardOptimizer(rule, **self.config.reduction)


def test_21_arrays_without_elements_are_fragments_of_their_own():
    trained = []
    for fragments in (1, 3):
        outer = {"every_steps": 3, "dtype": "int8", "fragments": fragments}
        config = _numerics_config(slices=2)
        with config.unlocked():
            config.outer.update(outer)
        mesh = experiment_lib.mesh_of(config, jax.devices()[:4])
        experiment = NumericsEmpty(config)
        state = xshard.init(experiment, mesh, 0, _numerics_batch())
        step = jax.jit(xshard.make_train_step(experiment, mesh))
        for _ in range(4):
            state, _ = step(state, _numerics_batch())
        trained.append(_numerics_leaves(state)["params/~/w"])
    # The array with elements is in the first fragment.
    assert np.all(trained[0] != 0)
    np.testing.assert_array_equal(trained[1], trained[0])


class NumericsCounting(toy.Toy):
    """Logs integers, of which some are equal on all replicas."""

    def forward(self, batch, *, is_training):
        del is_training
        return hk.Linear(1)(batch["x"])[:, 0]

    def loss(self, outputs, batch):
        rows = jnp.int32(len(outputs))
        mapped = ("slice", "replica")
        index = jax.lax.axis_index(mapped)
        return jnp.mean(outputs**2), {
            "constant": jnp.int32(2**24 + 1),
            "python": -(2**31),
            "narrow": jnp.uint8(200),
            "flag": jnp.bool_(True),
            "total": jax.lax.psum(rows, mapped) + 2**24 + 1,
            "index": index.astype(jnp.int32),
            "drawn": jax.random.randint(hk.next_rng_key(), (), 0, 2**20),
            "positive": jnp.sum(batch["x"] > 0).astype(jnp.int32),
        }

    def optimizer(self):
        return xshard.CrossShardOptimizer(
            optax.sgd(0.1), slice_axis_name="slice", **self.config.reduction
        )


@pytest.mark.parametrize(
    "devices, changes",
    [
        (3, {}),
        (2, {"reduction": {"shard_params": True}, "micro_batches": 2}),
    ],
    ids=str,
)
def test_09_integers_beside_a_loss_are_kept_if_no_replica_has_its_own(devices, changes):
    steps = _NumericsSteps(NumericsCounting, devices, **changes)
    metrics = steps()
    parts = changes.get("micro_batches", 1)
    rows = NUMERICS_ROWS // parts
    kept = {
        "constant": 2**24 + 1,
        "python": -(2**31),
        "narrow": 200,
        "total": 2**24 + 1 + rows,
    }
    for name, expected in kept.items():
        assert metrics[name].dtype == np.int32 and metrics[name] == expected, name
    assert metrics["flag"].dtype == np.float32 and metrics["flag"] == 1
    # What may differ is averaged.
    for name in ("index", "drawn", "positive"):
        assert metrics[name].dtype == np.float32, name
    assert metrics["index"] == (devices - 1) / 2
    positive = np.sum(_numerics_batch()["x"] > 0)
    np.testing.assert_allclose(metrics["positive"], positive / devices / parts)


@pytest.mark.parametrize(
    "value, of_step",
    [(2**31, False), (np.int64(-(2**31) - 1), True), ("uint32", False)],
    ids=str,
)
def test_09_an_integer_that_a_row_would_round_is_refused(value, of_step):
    class Refused(toy.Toy):
        def loss(self, outputs, batch):
            return jnp.mean(outputs**2), {} if of_step else {"big": value}

        def train_step(self, state, batch, key):
            state, outcome = super().train_step(state, batch, key)
            return state, {"": outcome, "big": value} if of_step else outcome

    if value == "uint32":
        value = jnp.uint32(7)
    steps = _NumericsSteps(Refused, 1)
    with pytest.raises(
        errors.UserError, match="'big' as .*, which .*fit int32, and fl"
    ):
        steps()


class NumericsWeighted(NumericsCounting):
    """Weighs each part by the number of its rows that count, and divides by it."""

    def weight(self, batch):
        return jnp.sum(batch["counts"])

    def loss(self, outputs, batch):
        counts = batch["counts"]
        error = jnp.sum(counts * outputs**2)
        count = jnp.sum(counts)
        scalars = {
            "error": error / count,
            "constant": jnp.int32(2**24 + 1),
            "number": count.astype(jnp.int32),
        }
        return error / jnp.maximum(count, 1), scalars


def test_01_scalars_of_a_part_without_weight_do_not_count():
    batch = _numerics_batch()
    metrics = []
    for devices, parts in ((1, 1), (4, 2)):
        # On several replicas some parts have no rows that count, so no mean.
        batch["counts"] = np.arange(NUMERICS_ROWS) < NUMERICS_ROWS // 3
        batch["counts"] = batch["counts"].astype(np.float32)
        steps = _NumericsSteps(NumericsWeighted, devices, micro_batches=parts)
        metrics.append(steps(batch))
    whole, divided = metrics
    # Sums in another order.
    for name in ("loss", "error", "gradient_norm"):
        np.testing.assert_allclose(divided[name], whole[name], rtol=1e-5)
    # Averaged by weights: parts of 18 rows, two of which count wholly, and one by 12.
    assert whole["number"] == 48
    np.testing.assert_allclose(divided["number"], (18 * 18 * 2 + 12 * 12) / 48)
    assert whole["constant"] == divided["constant"] == 2**24 + 1


class NumericsNarrow(NumericsConstant):
    """Has a loss in a narrow type, near its bounds, whose parts count by a weight."""

    def weight(self, batch):
        return jnp.sum(batch["counts"])

    def loss(self, outputs, batch):
        total = jnp.sum(outputs.astype(jnp.float32)) + self.config.slope
        # The loss of each part is the same, so their mean is, too.
        return total.astype(outputs.dtype), {}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_02_a_weighted_loss_of_a_narrow_type_is_multiplied_in_a_wide_one(dtype):
    precision = f"params=float32,compute={dtype},output={dtype}"
    steps = _NumericsSteps(NumericsNarrow, 4, slope=49152.0, precision=precision)
    batch = _numerics_batch()
    # One part counts more than twice its share, which overflows float16.
    batch["counts"] = np.zeros(NUMERICS_ROWS, np.float32)
    batch["counts"][::36] = [1, 2, 6, 0]
    assert steps(batch)["loss"] == pytest.approx(49152.0, rel=1e-6)
    (w,) = (x for path, x in steps.leaves().items() if path.endswith("/w"))
    # What the loss is differentiated with is rounded to its narrow type.
    np.testing.assert_allclose(w, -(2.0**-10), rtol=2.0**-8)


# Rules, groups and the states of rules.


class RulesNoisy(toy.Toy):
    """Adds noise to its gradients, from a key of its rule or network."""

    def forward(self, batch, *, is_training):
        if self.config.noise == "network":
            hk.get_state("table", [3], init=_rules_table)
        return super().forward(batch, is_training=is_training)

    def optimizer(self):
        key = {"seed": 7, "typed": jax.random.key(7)}.get(self.config.noise, 7)
        noise = optax.add_noise(eta=0.1, gamma=0.0, key=key)
        if self.config.noise == "plain":
            noise = _rules_noise(lambda: jax.random.PRNGKey(7))
        elif self.config.noise == "constant":
            noise = _rules_noise(lambda: np.array([0, 7], np.uint32))
        elif self.config.noise == "network":
            noise = optax.identity()
        rule = optax.chain(noise, optax.sgd(0.1))
        return xshard.CrossShardOptimizer(rule, **self.config.reduction)


def _rules_table(shape, dtype):
    return jax.random.normal(jax.random.key(3), shape, dtype)


def _rules_noise(make_key):
    """Returns noise from a key that is two plain numbers."""

    def update(grads, key, params=None):
        del params
        key, draw = jax.random.split(key)
        add = lambda g: g + 0.1 * jax.random.normal(draw, g.shape, g.dtype)
        return jax.tree.map(add, grads), key

    return optax.GradientTransformation(lambda params: make_key(), update)


def _rules_config(experiment, **values):
    config = toy.get_config()
    config.experiment = f"tests.found_faults_test.{experiment}"
    config.update(values)
    return config


def _rules_keys(config):
    """Returns the plain numbers of the rule's keys in a first state, by group."""
    mesh = xshard.make_mesh(config.group_assignment, devices=jax.devices()[:4])
    experiment = RulesNoisy(config)
    state = state_lib.init(experiment, mesh, 0, experiment.train_data())
    found = []
    for x in jax.tree.leaves(state.experiment.opt_state):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            found.append(np.asarray(jax.random.key_data(x)))
        elif x.dtype == jnp.uint32:
            found.append(np.asarray(x))
    (keys,) = found
    return keys


@pytest.mark.parametrize("noise", ["seed", "typed", "plain"])
def test_30_groups_do_not_share_the_keys_of_a_rule(noise):
    config = _rules_config("RulesNoisy", noise=noise, group_assignment=((0, 1), (2, 3)))
    first, second = _rules_keys(config)
    assert first.tolist() != second.tolist()


def test_30_one_group_keeps_the_key_that_a_rule_was_given():
    config = _rules_config("RulesNoisy", noise="seed", group_assignment=((0, 1, 2, 3),))
    expected = jax.random.key_data(jax.random.key(7))
    np.testing.assert_array_equal(_rules_keys(config), expected)


@pytest.mark.parametrize("noise", ["constant", "network"])
def test_30_what_groups_share_is_said(tmp_path, capsys, noise):
    config = _rules_config(
        "RulesNoisy", noise=noise, group_assignment=((0, 1), (2, 3)), steps=1
    )
    config.model_parallel = 2
    assert loop.run(config, str(tmp_path), "") == 0
    out = capsys.readouterr().out
    assert "warning: all groups begin with the same " in out
    shared = {"constant": "opt_state/", "network": "net_state/"}[noise]
    assert f"begin with the same {shared}" in out


def test_30_an_older_run_whose_groups_share_a_key_resumes_and_says_so(
    tmp_path, capsys, monkeypatch
):
    config = _rules_config(
        "RulesNoisy", noise="seed", group_assignment=((0, 1, 2, 3), (4, 5, 6, 7))
    )
    config.steps = 2
    with monkeypatch.context() as patch:
        patch.setattr(state_lib, "random_alike", lambda *_: (frozenset(), []))
        assert loop.run(config, str(tmp_path), "") == 0
    assert "hold the same random keys" not in capsys.readouterr().out
    config.steps = 4
    assert loop.run(config, str(tmp_path), "") == 0
    out = capsys.readouterr().out
    assert "warning: all groups hold the same random keys opt_state/" in out
    # A new run has nothing to say.
    assert loop.run(config, str(tmp_path / "new"), "") == 0
    assert "random key" not in capsys.readouterr().out


def test_07_groups_have_the_replicas_of_their_numbers():
    config = toy.get_config()
    config.group_assignment = [[0, 2], [1, 3]]
    devices = jax.devices()[:4]
    mesh = experiment_lib.mesh_of(config, devices)
    assert [[x.id for x in group.flat] for group in mesh.devices] == [[0, 2], [1, 3]]
    config.group_assignment = ((3, 0), (1, 2))
    mesh = experiment_lib.mesh_of(config, devices)
    assert [[x.id for x in group.flat] for group in mesh.devices] == [[3, 0], [1, 2]]
    config.model_parallel = 2
    config.group_assignment = ((1,), (0,))
    mesh = experiment_lib.mesh_of(config, devices)
    assert [[x.id for x in group.flat] for group in mesh.devices] == [[2, 3], [0, 1]]


class _RulesDevice:
    """A device of one of two hardware slices of four."""

    platform = "cpu"

    def __init__(self, number):
        self.id = number
        self.slice_index = number // 4


def test_07_groups_that_mix_hardware_slices_are_refused():
    devices = [_RulesDevice(number) for number in range(8)]
    with pytest.raises(xshard.errors.UserError, match="mixes hardware slices"):
        xshard.make_mesh([[0, 2, 4, 6], [1, 3, 5, 7]], slices=2, devices=devices)
    in_order = [[0, 1, 2, 3], [4, 5, 6, 7]]
    mesh = xshard.make_mesh(in_order, slices=2, devices=devices)
    for number in range(2):
        places = {device.slice_index for device in mesh.devices[:, number].flat}
        assert places == {number}


def test_07_a_run_goes_on_with_its_groups_in_their_order(tmp_path):
    config = toy.get_config()
    config.group_assignment = [[0, 2, 4, 6], [1, 3, 5, 7]]
    config.steps = 2
    assert loop.run(config, str(tmp_path), "") == 0
    config.steps = 3
    config.group_assignment = [[1, 3, 5, 7], [0, 2, 4, 6]]
    with pytest.raises(xshard.errors.UserError, match="in the run's order"):
        loop.run(config, str(tmp_path), "")
    config.group_assignment = [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert loop.run(config, str(tmp_path), "") == 0


class RulesDivided(toy.Toy):
    """Sums within parts of the replicas, in the place that the config names."""

    def optimizer(self):
        halves = [[0, 1, 2, 3], [4, 5, 6, 7]]
        sgd = optax.sgd(0.1)
        if self.config.place == "all":
            return xshard.CrossShardOptimizer(sgd, group_assignment=[list(range(8))])
        if self.config.place == "by hand":
            return xshard.CrossShardOptimizer(_RulesGroupLoss(sgd, halves))
        rule = xshard.CrossShardOptimizer(sgd, group_assignment=halves)
        if self.config.place == "loss scale":
            return xshard.MixedPrecisionLossScaleOptimizer(rule, 2.0)
        if self.config.place == "within slices":
            return xshard.CrossShardOptimizer(rule, axis_name="slice")
        return rule


class _RulesGroupLoss(xshard.OptimizerWrapper):
    """Multiplies the update by the loss of a part of the replicas."""

    def __init__(self, opt, groups):
        super().__init__()
        self.opt = xshard.OptaxOptimizer(opt)
        self._groups = groups
        self._sum = jnp.float32(0)

    def compute_gradients(self, loss, params, **kwargs):
        value, grads = self.opt.compute_gradients(loss, params, **kwargs)
        if not hk.running_init():
            total = value[0] if isinstance(value, tuple) else value
            self._sum = jax.lax.psum(total, "replica", axis_index_groups=self._groups)
        return value, grads

    def update(self, grads, params):
        return self.opt.update(jax.tree.map(lambda g: g * self._sum, grads), params)


@pytest.mark.parametrize("place", ["outermost", "loss scale", "within slices"])
def test_08_a_rule_that_divides_a_run_s_group_is_refused(tmp_path, place):
    config = _rules_config("RulesDivided", place=place, fingerprint_every_steps=0)
    with pytest.raises(
        xshard.errors.UserError, match=r"group_assignment=.* would drift apart"
    ):
        loop.Run(config, str(tmp_path))


def test_08_a_value_of_parts_of_the_replicas_is_no_equal_one(tmp_path):
    config = _rules_config("RulesDivided", place="by hand", fingerprint_every_steps=0)
    with pytest.raises(xshard.errors.UserError, match="a value of a replica's own"):
        loop.Run(config, str(tmp_path))


def test_08_one_group_of_all_replicas_trains(tmp_path):
    config = _rules_config("RulesDivided", place="all", steps=1)
    assert loop.run(config, str(tmp_path), "") == 0


class RulesScheduleFree(toy.Toy):
    """Trains with other parameters than it evaluates."""

    def optimizer(self):
        rule = optax.contrib.schedule_free(optax.sgd(0.1), 0.1)
        return xshard.CrossShardOptimizer(rule, **self.config.reduction)


def test_06_a_jitted_function_tells_states_apart_by_their_rules():
    experiment = RulesScheduleFree(toy.get_config())
    mesh = xshard.make_mesh(devices=jax.devices()[:2])
    state = state_lib.init(experiment, mesh, 0, experiment.train_data())
    batch = {name: x[:16] for name, x in experiment.train_data().items()}
    train_step = jax.jit(step_lib.make_train_step(experiment, mesh))
    for _ in range(4):
        state, _ = train_step(state, batch)
    cached = train_step._cache_size()
    for _ in range(3):
        state, _ = train_step(state, batch)
    # The state of a step is no new one to the next.
    assert train_step._cache_size() == cached
    evaluated = jax.jit(step_lib.make_for_evaluation(experiment, mesh))(state)
    examples = {**experiment.eval_data(), "_mask": np.ones(10, bool)}
    eval_step = jax.jit(step_lib.make_eval_step(experiment, mesh))
    expected = eval_step(state, examples)["error"]
    assert eval_step(evaluated, examples)["error"] == expected
    assert jax.jit(eval_step)(evaluated, examples)["error"] == expected
    assert jax.tree.structure(state) != jax.tree.structure(evaluated)


def _rules_by_layer(params):
    """Labels the weights and the biases of a network, whose modules it looks up."""
    return {"linear": {"w": "weights", "b": "biases"} if params["linear"] else {}}


_RULES_WITH_LOSS = {
    "a plateau of some layers": lambda: optax.partition(
        {
            "weights": optax.chain(optax.adam(0.1), contrib.reduce_on_plateau()),
            "biases": optax.sgd(0.1),
        },
        _rules_by_layer,
    ),
    "a rule for each layer": lambda: optax.partition(
        {"weights": optax.polyak_sgd(0.1), "biases": contrib.momo(0.1)},
        _rules_by_layer,
    ),
    "masked": lambda: optax.masked(
        optax.polyak_sgd(0.1), {"linear": {"w": True, "b": False}}
    ),
    "if finite": lambda: optax.apply_if_finite(optax.polyak_sgd(0.1), 3),
    "in several steps": lambda: optax.MultiSteps(optax.polyak_sgd(0.1), 2),
    "by hand": lambda: optax.GradientTransformation(
        lambda params: (),
        lambda grads, state, params=None, *, value: (
            jax.tree.map(lambda g: -0.1 * value * g, grads),
            state,
        ),
    ),
}


@pytest.mark.parametrize(
    "name, backs_off",
    [
        *((name, True) for name in _RULES_WITH_LOSS),
        ("a rule for each layer", False),
        ("by hand", False),
    ],
)
def test_24_the_loss_reaches_every_rule_within_a_rule(name, backs_off):
    make = _RULES_WITH_LOSS[name]
    x = jnp.arange(6.0).reshape(2, 3)

    def loss(params):
        return jnp.mean((x @ params["linear"]["w"] + params["linear"]["b"] - 1) ** 2)

    def step(params):
        rule = xshard.OptaxOptimizer(make(), name="opt", backs_off=backs_off)
        return rule.minimize(loss, params)[1]

    first = {"linear": {"w": jnp.ones([3]), "b": jnp.zeros([])}}
    step = hk.transform_with_state(step)
    params = first
    _, state = step.init(None, params)
    expected = first
    transformation = make()
    with jax.numpy_dtype_promotion("standard"):
        optax_state = transformation.init(expected)
        for _ in range(4):
            value, grads = jax.value_and_grad(loss)(expected)
            updates, optax_state = transformation.update(
                grads, optax_state, expected, value=value
            )
            expected = optax.apply_updates(expected, updates)
    for _ in range(4):
        params, state = step.apply({}, state, None, params)
    # The same operations, which XLA may fuse in another way.
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6),
        params,
        expected,
    )
    assert np.all(params["linear"]["w"] != first["linear"]["w"])


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: optax.lbfgs(), "arguments: 'grad' and 'value_fn'"),
        (lambda: contrib.sophia(0.1), "obj_fn must be provided"),
        (
            lambda: optax.chain(
                optax.MultiSteps(optax.polyak_sgd(), 2).gradient_transformation()
            ),
            "argument: 'value'.* loss on to a GradientTransformationExtraArgs only",
        ),
    ],
)
def test_24_what_a_rule_cannot_be_given_is_named(make, message):
    params = {"linear": {"w": jnp.ones([3])}}
    create = hk.transform_with_state(lambda: xshard.OptaxOptimizer(make()).init(params))
    with pytest.raises(ValueError, match=message):
        create.init(None)


class RulesAveraged(xshard.Experiment):
    """Averages its parameters on the lower tier, and names its values itself."""

    def __init__(self, config):
        super().__init__(config)
        self.learner = xshard.Learner(self._network, self._rule, config)

    def train_data(self):
        return toy.Toy(self.config).train_data()

    def eval_data(self):
        return self.train_data()

    def _network(self, x):
        return hk.Linear(1)(x)[:, 0]

    def _rule(self):
        rule = xshard.CrossShardOptimizer(optax.sgd(0.1))
        return xshard.MovingAverageOptimizer(rule, 0.5)

    def init(self, key, batch):
        return self.learner.init(key, batch["x"])

    def train_step(self, state, batch, key):
        return self.learner.update(state, self._loss, batch, key)

    def _loss(self, state, batch, key):
        outputs, net_state = self.learner.apply(state, key, batch["x"])
        return jnp.mean((outputs - batch["y"]) ** 2), net_state, {}

    def for_evaluation(self, state):
        return self.learner.for_evaluation(state)

    def eval_step(self, state, batch, key):
        values = {"error": self._error(self.for_evaluation(state), batch)}
        if self.config.names_raw:
            values["raw/error"] = self._error(state, batch)
        return values

    def _error(self, state, batch):
        outputs, _ = self.learner.apply(state, None, batch["x"])
        return (outputs - batch["y"]) ** 2


@pytest.mark.parametrize("names_raw", [False, True])
def test_34_raw_values_are_announced_where_there_are_some(tmp_path, capsys, names_raw):
    config = _rules_config("RulesAveraged", names_raw=names_raw, steps=1)
    assert loop.run(config, str(tmp_path), "") == 0
    out = capsys.readouterr().out
    assert "of MovingAverageOptimizer.evaluation_params" in out
    assert ("'raw/...' are those that train" in out) == names_raw
    assert ("raw/error" in rows.results(tmp_path)["eval"]) == names_raw


@pytest.mark.parametrize(
    "experiment, precision, warns",
    [
        ("RulesAveraged", "params=float32,compute=float16,output=float32", True),
        ("RulesAveraged", "params=half,compute=float32,output=float32", True),
        ("RulesAveraged", "params=float32,compute=bfloat16,output=float32", False),
        ("RulesScaled", "params=float32,compute=float16,output=float32", False),
    ],
)
def test_35_float16_without_a_loss_scale_is_said_once(experiment, precision, warns):
    config = _rules_config(experiment, precision=precision)
    made = experiment_lib.load(config.experiment)(config_lib.ReadConfig(config))
    mesh = xshard.make_mesh(devices=jax.devices()[:2])
    state = state_lib.abstract_state(made, mesh, 0, made.train_data())
    said = list(preflight.warnings(made, config, state, None, ()))
    assert "\n".join(said).count("warning: float16 without a loss scale") == warns


def test_35_a_run_says_so_when_it_begins(tmp_path, capsys):
    config = _rules_config("RulesAveraged", names_raw=False, steps=1)
    config.precision = "params=float32,compute=float16,output=float32"
    loop.run(config, str(tmp_path), "")
    out = capsys.readouterr().out
    assert out.count("warning: float16 without a loss scale") == 1


class RulesScaled(RulesAveraged):
    """Scales the loss by a number that is fixed."""

    def _rule(self):
        return xshard.MixedPrecisionLossScaleOptimizer(super()._rule(), 128.0)


class _RulesKeepsLoss(xshard.Optimizer):
    """Keeps its loss where it must not."""

    def compute_gradients(self, loss, params, **kwargs):
        value, grads = super().compute_gradients(loss, params, **kwargs)
        hk.set_state("loss", value)
        return value, grads

    def update(self, grads, params):
        return params


class _RulesKeepsAround(xshard.OptimizerWrapper):
    """Keeps its loss, after the rule within has returned it."""

    def __init__(self, opt):
        super().__init__()
        self.opt = opt

    def compute_gradients(self, loss, params, **kwargs):
        value, grads = self.opt.compute_gradients(loss, params, **kwargs)
        hk.set_state("loss", value)
        return value, grads


@pytest.mark.parametrize(
    "make, name",
    [
        (lambda: xshard.CrossShardOptimizer(_RulesKeepsLoss()), "_RulesKeepsLoss"),
        (
            lambda: xshard.MixedPrecisionLossScaleOptimizer(
                xshard.CrossShardOptimizer(_RulesKeepsLoss()), 2.0
            ),
            "_RulesKeepsLoss",
        ),
        (
            lambda: xshard.CrossShardOptimizer(
                _RulesKeepsAround(xshard.OptaxOptimizer(optax.sgd(0.1)))
            ),
            "_RulesKeepsAround",
        ),
    ],
)
def test_27_the_rule_that_keeps_state_in_compute_gradients_is_named(make, name):
    params = {"m": {"w": jnp.ones([])}}
    step = hk.transform_with_state(
        lambda: make().minimize(lambda params: params["m"]["w"], params)
    )
    message = f"^{name}.compute_gradients keeps the state 'loss'"
    with pytest.raises(xshard.errors.UserError, match=message):
        step.init(None)


def _rules_mapped(f, shape=(2, 4)):
    """Returns a function of each replica's rows, mapped as for sharded updates."""
    devices = np.array(jax.devices()[: np.prod(shape)]).reshape(shape)
    mesh = jax.sharding.Mesh(devices, ("slice", "replica"))
    rows_of_all = jax.P(("slice", "replica"))
    mapped = xshard.vmap_replicas(
        lambda w, x: jax.tree.map(lambda y: y[None], f(w, x)),
        mesh,
        in_specs=(jax.P(), rows_of_all),
        out_specs=rows_of_all,
    )
    return jax.jit(mapped)


_RULES_WHERE = ("update", "vote", "aggregate", "exchange", "given")


class _RulesOwn(xshard.OptimizerWrapper):
    """Adds its replica's index in a phase."""

    def __init__(self, opt, where):
        super().__init__()
        self.opt = opt
        self._where = where

    def _own(self, where, tree):
        if where != self._where or hk.running_init():
            return tree
        index = jax.lax.axis_index("replica")
        return jax.tree.map(lambda x: x + index.astype(x.dtype), tree)

    def aggregate(self, grads):
        return self._own("aggregate", self.opt.aggregate(grads))

    def vote(self, grads):
        return self._own("vote", jnp.int32(0)) < 9

    def update(self, grads, params):
        return self._own("update", self.opt.update(grads, params))

    def exchange(self, before, after, applied):
        return self._own("exchange", after)


@pytest.mark.parametrize("shard_update", [True, False])
@pytest.mark.parametrize("where", _RULES_WHERE)
def test_25_a_replica_s_index_in_a_rule_is_named_in_a_step_of_one_s_own(
    where, shard_update
):
    def make():
        rule = xshard.OptaxOptimizer(optax.sgd(0.1))
        reduced = xshard.CrossShardOptimizer(rule, shard_update=shard_update)
        return _RulesOwn(reduced, where)

    def step(params, x):
        if where == "given":
            index = jax.lax.axis_index("replica").astype(x.dtype)
            params = jax.tree.map(lambda p: p + index, params)
        return make().minimize(lambda p: jnp.mean(x @ p["m"]["w"]), params)[1]

    params = {"m": {"w": jnp.ones((16, 2))}}
    create = hk.transform_with_state(lambda params: make().init(params))
    _, state = create.init(None, params)
    apply = hk.transform_with_state(step).apply
    mapped = xshard.vmap_replicas(
        lambda params, x: apply({}, state, None, params, x)[0],
        jax.sharding.Mesh(jax.devices(), "replica"),
        in_specs=(jax.P(), jax.P("replica")),
        out_specs=jax.P(),
    )
    message = "from a value of a replica's own"
    if where == "given" and shard_update:
        message = "is given the parameter 'm/w' with other values on each replica"
    with pytest.raises(xshard.errors.UserError, match=message):
        jax.eval_shape(mapped, params, jnp.ones((16, 16)))


def _rules_wave(w, x):
    return jnp.sum(jnp.sin(w * x))


def _rules_wave_of_all(w, x):
    return jax.lax.psum(_rules_wave(w, x), ("slice", "replica"))


_RULES_CALLS = {
    "a gradient": lambda f, w, x: jax.grad(f)(w, x),
    "a gradient of what it closes over": lambda f, w, x: jax.grad(
        lambda w: f(w, x) ** 2
    )(w),
    "a gradient of a scan": lambda f, w, x: jax.grad(
        lambda w: jax.lax.scan(lambda c, _: (c + f(w, x) * c, None), 1.0, None, 3)[0]
    )(w),
    "a map as long as the replicas": lambda f, w, x: jax.vmap(
        lambda scale: f(scale * w, x)
    )(jnp.arange(4.0)),
    "a map of gradients": lambda f, w, x: jax.vmap(
        lambda scale: jax.grad(f)(scale * w, x)
    )(jnp.arange(3.0)),
}


@pytest.mark.parametrize("f", [_rules_wave, _rules_wave_of_all])
@pytest.mark.parametrize("name", _RULES_CALLS)
def test_26_what_each_replica_calls_is_differentiated_and_mapped(name, f):
    use = _RULES_CALLS[name]
    w = jnp.array([2.0, 3.0])
    x = jnp.arange(16.0).reshape(8, 2) + 1
    got = _rules_mapped(lambda w, x: use(xshard.per_replica(f), w, x[0]))(w, x)
    expected = _rules_mapped(lambda w, x: use(f, w, x[0]))(w, x)
    # Sums in float32, in another order.
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


def test_26_python_s_values_stay_what_they_are():
    @xshard.per_replica
    def scaled(x, count, *, flip, name=None):
        assert name is None
        return -x * count if flip else x[:count]

    f = _rules_mapped(lambda w, x: (scaled(w, 1, flip=False), scaled(w, 3, flip=True)))
    first, second = f(jnp.array([2.0, 3.0]), jnp.zeros(8))
    np.testing.assert_array_equal(first[0], [2.0])
    np.testing.assert_array_equal(second[0], [-6.0, -9.0])


def _rules_draw(w):
    return w + jax.random.normal(hk.next_rng_key(), w.shape)


def _rules_count(w):
    hk.set_state("count", hk.get_state("count") + 1)
    return w


@pytest.mark.parametrize(
    "f, message",
    [
        (_rules_draw, "_rules_draw, .* draws a random key of Haiku's: give it"),
        (_rules_count, "_rules_count, .* writes Haiku's state '~/count'"),
    ],
)
def test_26_keys_and_state_of_haiku_are_refused_by_name(f, message):
    transformed = hk.transform_with_state(xshard.per_replica(f))
    state = {"~": {"count": jnp.int32(0)}}

    def step(w, x):
        return transformed.apply({}, state, jax.random.key(0), w)[0]

    with pytest.raises(xshard.errors.UserError, match=message):
        jax.eval_shape(_rules_mapped(step), jnp.ones(2), jnp.zeros(8))


def test_26_haiku_s_parameters_and_state_are_read():
    read = lambda: hk.get_parameter("p", [2]) + hk.get_state("count")
    transformed = hk.transform_with_state(xshard.per_replica(read))
    state = {"~": {"count": jnp.float32(3)}}
    step = lambda w, x: transformed.apply({"~": {"p": w}}, state, None)[0]
    np.testing.assert_array_equal(_rules_mapped(step)(jnp.ones(2), jnp.zeros(8)), 4.0)


def test_26_gradients_that_cannot_be_are_refused_by_name():
    w = jnp.ones(2)
    own = xshard.per_replica(_rules_wave)
    twice = lambda w, x: jax.grad(lambda w: jnp.sum(jax.grad(own)(w, x[0])))(w)
    with pytest.raises(xshard.errors.UserError, match="_rules_wave.*twice"):
        jax.eval_shape(_rules_mapped(twice), w, jnp.ones((8, 2)))
    specs = (jax.P("slice"), jax.P())
    sharded = xshard.per_replica(lambda w, x: jnp.sum(w), in_specs=specs)
    in_shards = lambda w, x: jax.grad(sharded)(w, x)
    with pytest.raises(xshard.errors.UserError, match="with in_specs or out_specs"):
        jax.eval_shape(_rules_mapped(in_shards), w, jnp.ones(8))


class RulesTogether(toy.Wide):
    """Trains by rules that do not go together, with the reason."""

    def optimizer(self):
        sgd = optax.sgd(0.1)
        if self.config.rule == "an average of schedule-free":
            sgd = optax.contrib.schedule_free(sgd, 0.1)
        rule = xshard.CrossShardOptimizer(
            sgd, slice_axis_name="slice", **self.config.reduction
        )
        if "average" in self.config.rule:
            return xshard.MovingAverageOptimizer(rule, 0.5)
        return rule


class RulesClipped(RulesTogether):
    """Clips the gradients of each replica."""

    def clip_gradients(self, grads):
        return grads


@pytest.mark.parametrize(
    "experiment, rule, changes, message",
    [
        (
            "RulesClipped",
            "plain",
            {"reduction": {"shard_update": True, "shard_params": True}},
            "shard_params=True cannot be used with clip_gradients: no replica has its "
            "own gradients",
        ),
        (
            "RulesTogether",
            "plain",
            {
                "reduction": {"shard_update": True, "shard_params": True},
                "noise_scale_steps": 5,
            },
            "noise_scale_steps cannot be used with .* no replica has its own",
        ),
        (
            "RulesTogether",
            "an average",
            {"outer": {"every_steps": 2}, "slices": 2},
            "cannot be used with outer.every_steps=2: each slice would keep another",
        ),
        (
            "RulesTogether",
            "an average of schedule-free",
            {},
            "rules that each have parameters of their own for evaluation",
        ),
    ],
)
def test_29_what_does_not_go_together_is_refused_with_the_reason(
    tmp_path, experiment, rule, changes, message
):
    config = _rules_config(experiment, rule=rule)
    config.update(changes)
    with pytest.raises(xshard.errors.UserError, match=message):
        loop.Run(config, str(tmp_path))


# Data, text, weights of other programs, exports.


def _data_save(folder, arrays):
    path = folder / "model.safetensors"
    safetensors.save_file(arrays, path)
    return str(path)


def test_44_an_array_of_eight_bit_floats_is_named(tmp_path):
    for kind, name in [("float8_e4m3fn", "F8_E4M3"), ("float8_e5m2", "F8_E5M2")]:
        arrays = {
            "params/w": np.ones(2).astype(kind),
            "net_state/s": np.ones(2).astype(kind),
            "params/unused": np.ones(2).astype(kind),
        }
        source = checkpoint.Source(_data_save(tmp_path, arrays))
        state = {"params": {"w": jnp.zeros(2)}, "net_state": {"s": jnp.zeros(2)}}
        with pytest.raises(
            errors.UserError, match=f"'params/w' is {name} in"
        ) as caught:
            checkpoint.init_from(source, state)
        # Network state that does not fit is left as it is, but not because of its type.
        assert f"'net_state/s' is {name} in it, which is not" in str(caught.value)
        assert "missing" not in str(caught.value)


def test_44_arrays_of_size_zero_come_from_a_file(tmp_path):
    shapes = {"params/a": (0,), "params/b": (2, 0, 3), "params/c": (0, 2)}
    arrays = {path: np.zeros(shape, np.float32) for path, shape in shapes.items()}
    arrays["params/w"] = np.ones(2, np.float32)
    params = {path[-1]: jnp.zeros(x.shape) for path, x in arrays.items()}
    source = checkpoint.Source(_data_save(tmp_path, arrays))
    found = checkpoint.init_from(source, {"params": params})
    np.testing.assert_array_equal(found["params"]["w"], [1, 1])
    assert {name: x.shape for name, x in found["params"].items()} == {
        path[-1]: x.shape for path, x in arrays.items()
    }


def test_44_a_type_that_a_file_cannot_hold_is_named(tmp_path):
    with pytest.raises(errors.UserError, match="cannot hold arrays of these types"):
        tensors.write(tmp_path / "a.safetensors", {"w": np.ones(2, complex)}, {})


def _data_tokenizer(texts):
    return text.train_tokenizer(texts, 300)


_DATA_TEXT = "The quick brown fox jumps over the lazy dog, \N{SNOWMAN}  twice. " * 3


@pytest.mark.parametrize("place", ["a file", "an object"])
def test_38_settings_of_a_tokenizer_drop_add_and_draw_no_tokens(tmp_path, place):
    clean = _data_tokenizer([_DATA_TEXT])
    expected = text.encoder(clean)(_DATA_TEXT)
    changed = tokenizers.Tokenizer.from_str(clean.to_str())
    changed.enable_truncation(5)
    changed.enable_padding(length=700)
    changed.model.dropout = 0.5
    end = (text.END, clean.token_to_id(text.END))
    changed.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{text.END} $A {text.END}", special_tokens=[end]
    )
    changed.save(str(tmp_path / "tokenizer.json"))
    if place == "a file":
        changed = text.load_tokenizer(tmp_path / "tokenizer.json")
        # Also what is encoded without `encoder` is whole.
        assert len(changed.encode(_DATA_TEXT).ids) == len(expected) + 1
    encode = text.encoder(changed)
    for _ in range(3):
        np.testing.assert_array_equal(encode(_DATA_TEXT), expected)


def test_38_an_end_that_is_no_special_token_does_not_end_a_text():
    settings = json.loads(_data_tokenizer([_DATA_TEXT]).to_str())
    settings["added_tokens"][0]["special"] = False
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(settings))
    tokens = text.encoder(tokenizer)(f"one{text.END}two")
    end = tokenizer.token_to_id(text.END)
    assert (tokens == end).tolist() == [False] * (len(tokens) - 1) + [True]
    with pytest.raises(errors.UserError, match="no token '<fin>'"):
        text.encoder(tokenizer, "<fin>")


def _data_metaspace():
    """Returns a lossless tokenizer that is not over bytes, as SentencePiece's are."""
    characters = sorted({*_DATA_TEXT, "\N{LOWER ONE EIGHTH BLOCK}", "q", "u", "\n"})
    vocabulary = {text.END: 0, "q": 1, "u": 2, "qu": 3}
    for character in characters:
        vocabulary.setdefault(character, len(vocabulary))
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocabulary, [("q", "u")], fuse_unk=False)
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(
        prepend_scheme="always"
    )
    tokenizer.decoder = tokenizers.decoders.Metaspace(prepend_scheme="always")
    tokenizer.add_special_tokens([text.END])
    return tokenizer


def test_38_the_bytes_of_tokens_are_those_of_the_text():
    byte_level = _data_tokenizer([_DATA_TEXT])
    added = tokenizers.Tokenizer.from_str(byte_level.to_str())
    added.add_tokens(["\N{SNOWMAN}  twice"])
    for tokenizer in (byte_level, added, _data_metaspace()):
        for sample in (_DATA_TEXT, "", "quick", "qu  \N{SNOWMAN}\N{SNOWMAN}  "):
            tokens = text.encoder(tokenizer)(sample)
            counts = text.byte_counter(tokenizer)(sample)
            assert counts.shape == tokens.shape and counts.dtype == np.int32
            assert counts.sum() == len(sample.encode()) + 1 and counts.min() >= 0
    # Each token of ASCII stands for its letters.
    encoding = byte_level.encode("the quick dog")
    sizes = [len(token) for token in encoding.tokens]
    assert text.byte_counter(byte_level)("the quick dog").tolist() == [*sizes, 1]


def test_38_bytes_of_a_text_that_is_not_given_back_are_refused():
    lossy = []
    for normalizer in ("Lowercase", "NFKC", "Strip"):
        changed = _data_tokenizer([_DATA_TEXT])
        changed.normalizer = getattr(tokenizers.normalizers, normalizer)()
        lossy.append(changed)
    without_decoder = _data_metaspace()
    without_decoder.decoder = None
    unknown = tokenizers.Tokenizer(tokenizers.models.BPE({text.END: 0, "T": 1}, []))
    for tokenizer in (*lossy, without_decoder, unknown):
        with pytest.raises(
            errors.UserError, match="The tokenizer gives back '.* for '"
        ):
            text.byte_counter(tokenizer)("The \N{ROMAN NUMERAL TWO} ")


def test_38_a_tokenizer_that_loses_texts_is_loaded_with_a_warning(tmp_path, caplog):
    path = tmp_path / "tokenizer.json"
    lossless = _data_tokenizer([_DATA_TEXT])
    lossless.save(str(path))
    text.load_tokenizer(path)
    assert not caplog.text
    lossless.normalizer = tokenizers.normalizers.Lowercase()
    words_only = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({text.END: 0, "word": 1}, unk_token="?")
    )
    for lossy, given_back in [(lossless, "'a word,"), (words_only, "an error")]:
        caplog.clear()
        lossy.save(str(path))
        text.load_tokenizer(path)
        assert "what differs is lost to a model" in caplog.text
        assert given_back in caplog.text


def _data_words(folder, tokenizer, **changes):
    """Returns an experiment over 20 files of words."""
    for number in range(20):
        (folder / f"{number}.txt").write_text(_DATA_TEXT * (1 + number % 3))
    tokenizer.save(str(folder / "tokenizer.json"))
    config = lm_words.get_config()
    changes = {
        "text.files": (f"{folder}/*.txt",),
        "text.tokenizer": str(folder / "tokenizer.json"),
        "text.vocabulary": 320,
        "text.length": 16,
        "text.eval_windows": 0,
        "sample.length": 4,
        "sample.prompts": ("The quick brown fox jumps", f"dog{text.END}"),
        **changes,
    }
    config.update_from_flattened_dict(changes)
    return words.Words(config.lock())


def test_38_an_evaluation_counts_all_bytes_whatever_a_tokenizer_sets(tmp_path):
    tokenizer = _data_tokenizer([_DATA_TEXT])
    tokenizer.add_tokens(["\N{SNOWMAN}  twice"])
    tokenizer.enable_truncation(7)
    experiment = _data_words(tmp_path, tokenizer)
    rows = experiment.eval_data()
    size = 0
    for _, held_out in experiment._sources:
        size += sum(os.path.getsize(path) + 1 for path in held_out)
    assert rows["bytes"].sum() == size
    lowercase = _data_tokenizer([_DATA_TEXT])
    lowercase.normalizer = tokenizers.normalizers.Lowercase()
    with pytest.raises(errors.UserError, match="gives back 'the quick"):
        _data_words(tmp_path, lowercase).eval_data()
    with pytest.raises(errors.UserError, match="vocabulary=280 must be at least"):
        _data_words(tmp_path, tokenizer, **{"text.vocabulary": 280}).eval_data()


def test_38_a_prompt_is_all_of_its_tokens_and_nothing_else(tmp_path):
    tokenizer = _data_tokenizer([_DATA_TEXT])
    end = (text.END, tokenizer.token_to_id(text.END))
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{text.END} $A {text.END}", special_tokens=[end]
    )
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=12)
    experiment = _data_words(tmp_path, tokenizer)
    full_stop = tokenizer.token_to_id(".")

    def predict(batch):
        logits = np.zeros((*batch["text"].shape, 320), np.float32)
        logits[..., full_stop] = 1e6
        return logits[:, :-1]

    shown = experiment.samples(predict, jax.random.key(0)).splitlines()
    assert shown[1] == "The quick brown fox jumps...."
    # The end that a prompt has as text is text.
    assert shown[3] == f"dog{text.END}...."


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_12_a_byte_order_mark_is_no_text(tmp_path, end):
    path = tmp_path / "a.jsonl"
    mark = codecs.BOM_UTF8
    lines = ['{"a": 1}', "\ufeffsecond", "third\ufeff"]
    path.write_bytes(mark + end.join(lines).encode())
    found = text.Lines([path, path])
    # A mark is one at the head of a file only.
    assert [found[i] for i in range(len(found))] == lines * 2
    assert json.loads(found[0]) == {"a": 1}
    assert text.Files([path])[0] == end.join(lines)
    for content, expected in [
        (mark, []),
        (mark + b"\n\nx", ["x"]),
        (mark * 2, ["\ufeff"]),
    ]:
        path.write_bytes(content)
        found = text.Lines([path])
        assert [found[i] for i in range(len(found))] == expected


def test_12_a_table_with_a_byte_order_mark_keeps_its_first_column(tmp_path):
    """A spreadsheet writes one when a user saves the table of a run."""
    path = tmp_path / "metrics.csv"
    opened = writers.Writers(["jsonl", "csv"], writers.Part(tmp_path, 0, {}))
    opened.write({"step": 1, "loss": 2.0})
    path.write_bytes(codecs.BOM_UTF8 + path.read_bytes())
    # A new column rewrites the file.
    opened.write({"step": 2, "loss": 1.0, "more": 3})
    assert path.read_text().splitlines() == ["step,loss,more", "1,2.0,", "2,1.0,3"]


def test_12_a_byte_order_mark_before_json_is_no_part_of_it(tmp_path):
    path = tmp_path / "a.json"
    path.write_bytes(codecs.BOM_UTF8 + b'{"a": "b"}')
    assert jsonfile.read_if_exists(path) == {"a": "b"}
    path.write_bytes(codecs.BOM_UTF8 + b'{"a": 1}\n{"a": 2}\n')
    rows = [row for _, row in jsonfile.read_lines(path)]
    assert rows == [{"a": 1}, {"a": 2}]


def _data_sources(weights, count=64):
    """Returns which of some datasets the first rows of a mix come from."""
    stream = pipelines.Stream(index=0, count=1, seed=0)
    datasets = [[number] for number in range(len(weights))]
    mix = pipelines.Mix(datasets, [(0, weights)], stream)
    return [mix.source(row) for row in range(count)]


@pytest.mark.parametrize(
    "weights, like",
    [
        ([1.7e308, 1.7e308], [1, 1]),
        ([1.7e308, 1.7e308, 1.7e308], [1, 1, 1]),
        ([5e-324, 5e-324], [1, 1]),
        ([1e-323, 5e-324], [2, 1]),
        ([10**308, 3 * 10**307], [10, 3]),
        ([np.float32(3e38), np.float32(3e38)], [1, 1]),
        ([1.7e308, 5e-324], [1, 0]),
        ([0, 1.7e308], [0, 1]),
    ],
)
def test_12_weights_of_any_size_have_their_shares(weights, like):
    assert _data_sources(weights) == _data_sources(like)
    assert set(_data_sources(like)) == {i for i, x in enumerate(like) if x}


@pytest.mark.parametrize(
    "weights",
    [
        [np.nan, 1],
        [np.inf, 1],
        [-1, 2],
        [0, 0],
        [10**400, 1],
        ["1", 1],
        [None, 1],
        [1j, 1],
    ],
)
def test_12_weights_that_are_no_shares_are_refused(weights):
    with pytest.raises(errors.UserError, match="of a mix must be rows"):
        _data_sources(weights)


def test_12_weights_of_words_are_checked_before_grain_divides(tmp_path):
    tokenizer = _data_tokenizer([_DATA_TEXT])
    changes = {"text.files": ("a", "b")}
    for weights in [(np.nan, 1.0), (np.inf, 1.0), (1e-320, 1e-320), (1e308, 1e-308)]:
        changes["text.weights"] = weights
        with pytest.raises(errors.UserError, match="with finite ratios"):
            _data_words(tmp_path, tokenizer, **changes)


class _DataKeeper:
    """Batches whose state has arrays."""

    rows = 8

    def __init__(self, *arrays):
        self.arrays = list(arrays)

    def __next__(self):
        return {"x": np.zeros((self.rows, 1), np.float32)}

    def get_state(self):
        return {"kept": self.arrays}

    def set_state(self, state):
        self.arrays = state["kept"]


def _data_batches(iterator):
    mesh = mesh_lib.make_mesh([[0]], devices=jax.devices()[:1])
    return batches.TrainBatches(lambda part: iterator, mesh, batch_size=8, seed=0)


def test_18_a_damaged_position_is_named():
    taken = _data_batches(_DataKeeper())
    file = io.BytesIO()
    np.save(file, np.arange(9))
    good = file.getvalue()
    # What is cut off, damaged or no array at all.
    for content in (good[:-9], good[:40], b"none", b"", zlib.compress(good)):
        kept = [{"npy": base64.b64encode(content).decode()}]
        with pytest.raises(errors.UserError, match="data that cannot be read"):
            taken.restore([{"step": 3, "iterator": {"kept": kept}}])
    for kept in ({"npy": 5}, {"tuple": 5}, {"base64": None}, {"npy": "AAA"}):
        with pytest.raises(errors.UserError, match="of step 3 has a position in"):
            taken.restore([{"step": 3, "iterator": {"kept": [kept]}}])


def test_18_arrays_of_any_type_and_shape_are_restored():
    taken = _data_batches(_DataKeeper())
    # Arrays of other versions of NumPy's format, and of no elements.
    odd = np.zeros(3, [("\N{SNOWMAN}", "<f4"), ("y", "<i2")])
    kept = [odd, np.zeros((0, 3)), np.array(2.5), np.asfortranarray(np.eye(3))]
    taken._iterator.arrays = kept
    with warnings.catch_warnings():
        # NumPy warns of the newest version.
        warnings.simplefilter("ignore")
        position = json.loads(json.dumps(taken.position(5)))
    again = _data_batches(_DataKeeper())
    again.restore([position])
    for found, state in zip(again._iterator.arrays, kept, strict=True):
        assert found.dtype == state.dtype and found.shape == state.shape
        np.testing.assert_array_equal(found, state)


class _DataMean(xshard.Experiment):
    """A state without a learner, and predictions with and without a key."""

    def train_data(self):
        return {"x": np.ones((16, 2), np.float32), "y": np.ones(16, np.int32)}

    def eval_data(self):
        return self.train_data()

    def init(self, key, batch):
        return {"center": jnp.zeros(2), "key": jax.random.split(key, 2)}

    def train_step(self, state, batch, key):
        center = state["center"] + 1
        return {**state, "center": center}, {"size": jnp.sum(center)}

    def eval_step(self, state, batch, key):
        return {"distance": jnp.sum((batch["x"] - state["center"]) ** 2, -1)}

    def predict(self, state, batch):
        return batch["x"] - state["center"]


class _DataDraws(_DataMean):
    def predict(self, state, batch, key):
        return batch["x"] - state["center"] + jax.random.normal(key, (2,))


class _DataDrawsRows(_DataMean):
    def predict(self, state, batch, key):
        return jax.random.normal(key, batch["x"].shape)


class _DataMayDraw(_DataMean):
    def predict(self, state, batch, key=None):
        noise = 0.0 if key is None else jax.random.normal(key, (2,))
        return batch["x"] - state["center"] + noise


class _DataNamesKey(_DataMean):
    """Takes a key for nothing."""

    def predict(self, state, batch, key):
        return batch["x"] - state["center"]


class _DataByName(_DataMean):
    def predict(self, state, batch, *, key):
        return batch["x"]


class _DataNoisy(toy.Toy):
    """A network that draws in its predictions."""

    def forward(self, batch, *, is_training):
        outputs = super().forward(batch, is_training=is_training)
        return outputs + jax.random.normal(hk.next_rng_key(), outputs.shape)


def _data_trained(folder, experiment):
    if issubclass(experiment, toy.Toy):
        config = toy.get_config()
    else:
        config = xshard.config.default()
        config.update({"batch_size": 8, "eval_batch_size": 8})
        config.precision = "params=float32,compute=float32,output=float32"
    config.experiment = f"tests.found_faults_test.{experiment.__name__}"
    config.steps = 1
    config.eval_every_steps = 0
    assert loop.run(config.lock(), str(folder / "run"), "") == 0
    return xshard.load(str(folder / "run"))


def _data_program(path):
    return jax_export.deserialize(bytearray(path.read_bytes()))


def test_32_an_experiment_without_a_learner_is_exported(tmp_path):
    trained = _data_trained(tmp_path, _DataMean)
    path = tmp_path / "a.stablehlo"
    assert "step 1, predict of x" in export.write(trained, path)
    x = np.ones((3, 2), np.float32)
    np.testing.assert_array_equal(_data_program(path).call({"x": x}), x - 1)
    for name, arguments in [("a.safetensors", False), ("b.stablehlo", True)]:
        with pytest.raises(errors.UserError, match="no learner, .* center") as caught:
            export.write(trained, tmp_path / name, arguments=arguments)
        assert "--select=" not in str(caught.value)
    export.write(trained, tmp_path / "a.safetensors", select="^center")
    # Nor does the start of another run blame a flag that nobody gave.
    source = checkpoint.Source(str(tmp_path / "a.safetensors"))
    with pytest.raises(errors.UserError, match="no parameters or network state of a"):
        checkpoint.check_init(source, {"center": jnp.zeros(2)})


@pytest.mark.parametrize(
    "experiment, arguments",
    [(_DataDraws, True), (_DataDrawsRows, False), (_DataNoisy, False)],
)
def test_33_a_prediction_with_a_key_is_exported(tmp_path, experiment, arguments):
    trained = _data_trained(tmp_path, experiment)
    path = tmp_path / "a.stablehlo"
    select = "center" if issubclass(experiment, _DataMean) else checkpoint.BY_DEFAULT
    said = export.write(trained, path, arguments=arguments, select=select)
    assert "a random key ->" in said
    before = []
    if arguments:
        export.write(trained, tmp_path / "a.safetensors", select=select)
        before = [safetensors.load_file(tmp_path / "a.safetensors")]
    width = 2 if issubclass(experiment, _DataMean) else 3
    batch = {"x": np.ones((5, width), np.float32)}
    program = _data_program(path)
    for seed in (0, 1):
        key = jax.random.key(seed)
        found = program.call(*before, batch, key)
        expected = trained.predict({**batch, "y": np.ones(5, np.float32)}, key)
        # The sums of a linear layer are in another order.
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    with pytest.raises(errors.UserError, match=r"predict\(batch, "):
        trained.predict({**batch, "y": np.ones(5, np.float32)})


def test_33_a_key_is_taken_where_the_prediction_depends_on_it(tmp_path):
    x = np.ones((2, 2), np.float32)
    for experiment in (_DataMayDraw, _DataNamesKey):
        folder = tmp_path / experiment.__name__
        folder.mkdir()
        trained = _data_trained(folder, experiment)
        # Without a key where that is possible, as before.
        assert "random key" not in export.write(trained, folder / "a.stablehlo")
        found = _data_program(folder / "a.stablehlo").call({"x": x})
        np.testing.assert_array_equal(found, x - 1)
    trained = _data_trained(tmp_path, _DataMean)
    with pytest.raises(errors.UserError, match="takes only a state and a batch"):
        trained.predict({"x": x}, jax.random.key(0))
    trained = trained._replace(experiment=_DataByName(trained.experiment.config))
    with pytest.raises(errors.UserError, match="predict.self, state, batch, key"):
        export.write(trained, tmp_path / "b.stablehlo")


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"rank": True}, "rank=True"),
        ({"rank": 0}, "rank=0"),
        ({"rank": 2.0}, "rank=2.0"),
        ({"rank": "2"}, "rank='2'"),
        ({"alpha": "2"}, "alpha='2'"),
        ({"alpha": True}, "alpha=True"),
        ({"alpha": None}, "alpha=None"),
        ({"alpha": float("nan")}, "alpha=nan"),
        ({"alpha": -1}, "alpha=-1"),
        ({"select": 3}, "select=3"),
    ],
)
def test_22_values_of_lora_are_checked(changes, message):
    with pytest.raises(errors.UserError, match=message):
        xshard.lora(**{"rank": 2, "alpha": 2, "select": "", **changes})
    assert xshard.lora(np.int64(2), np.float32(3), "").scale == 1.5


def test_22_a_bool_is_no_number():
    part = data.Part(8, (np.arange(8),), seed=0)
    for call, message in [
        (lambda: pipelines.Streams(lambda _: [], True, part), "True streams do not"),
        (lambda: pipelines.Streams(lambda _: [], "8", part), "'8' streams do not"),
        (lambda: text.train_tokenizer(["a"], "300"), "vocabulary of '300' must"),
        (lambda: text.pack([], len, True), "length=True"),
        (lambda: text.pack([], len, 2.5), "length=2.5"),
        (lambda: xshard.make_mesh(model=True), "model_parallel=True"),
        (lambda: xshard.make_mesh(slices=True), "slices=True"),
        (lambda: xshard.early_stopping("loss", min_delta=True), "min_delta=True"),
        (lambda: xshard.early_stopping("loss", patience=True), "patience=True"),
    ]:
        with pytest.raises(errors.UserError, match=message):
            call()


def _data_toy(**changes):
    config = toy.get_config()
    config.update_from_flattened_dict(changes)
    return toy.Toy(config.lock())


def _data_rows(count):
    return {"x": np.ones((count, 3), np.float32), "y": np.ones(count, np.float32)}


@pytest.mark.parametrize("shards", [False, True])
def test_22_rows_that_do_not_divide_are_named(shards):
    experiment = _data_toy(**{"reduction.shard_update": shards})
    mesh = xshard.make_mesh(devices=jax.devices()[:4])
    state = xshard.init(experiment, mesh, 0, _data_rows(8))
    step = xshard.make_train_step(experiment, mesh)
    message = r"'x' of the batch, of shape \(6, 3\), .* multiple of replicas = 4"
    with pytest.raises(errors.UserError, match=message):
        jax.eval_shape(step, state, _data_rows(6))
    masked = {**_data_rows(6), "_mask": np.ones(6, bool)}
    with pytest.raises(errors.UserError, match="multiple of replicas = 4"):
        jax.eval_shape(xshard.make_eval_step(experiment, mesh), state, masked)
    scalar = {**_data_rows(8), "y": np.float32(1)}
    with pytest.raises(errors.UserError, match=r"'y' of the batch, of shape \(\)"):
        jax.eval_shape(step, state, scalar)


def test_22_rows_that_micro_batches_do_not_divide_are_named():
    experiment = _data_toy(micro_batches=2)
    for replicas, num_rows in [(1, 3), (4, 12)]:
        mesh = xshard.make_mesh(devices=jax.devices()[:replicas])
        state = xshard.init(experiment, mesh, 0, _data_rows(8))
        step = xshard.make_train_step(experiment, mesh)
        with pytest.raises(errors.UserError, match="multiple of micro_batches = 2 on"):
            jax.eval_shape(step, state, _data_rows(num_rows))
        jax.eval_shape(step, state, _data_rows(8))


def test_36_a_batch_of_another_number_of_rows_says_what_to_do():
    keeper = _DataKeeper()
    taken = _data_batches(keeper)
    next(taken)
    keeper.rows = 4
    with pytest.raises(errors.UserError, match="has 4 rows.* equally many"):
        next(taken)


@pytest.mark.parametrize(
    "address",
    [
        "::1:8476",
        "fd00::1:8476",
        "fe80::1%eth0:8476",
        "::1",
        "[::1]",
        "[::1:8476",
        "::1]:8476",
        "[h0]:8476",
        "[]:8476",
        "http://h0:8476",
        "h 0:8476",
        "h0:\N{ARABIC-INDIC DIGIT THREE}",
        "h0:0",
        "h0:+1",
        ":8476",
    ],
)
def test_44_an_address_that_grpc_would_abort_on_is_refused(address):
    with pytest.raises(rendezvous.StartError, match="must be HOST:PORT") as caught:
        startup.resolve_process(address, 2, 0)
    is_ipv6 = address.startswith(("::1:", "fd00", "fe80")) or address == "::1"
    assert ("stands in brackets" in str(caught.value)) == is_ipv6


@pytest.mark.parametrize(
    "address",
    ["[::1]:8476", "[fe80::1%eth0]:8476", "127.0.0.1:1", "h-0.a_b.svc:65535", "h0:80"],
)
def test_44_an_address_that_is_one_is_taken(address):
    assert startup.resolve_process(address, 2, 0).address == address


def test_18_a_file_of_no_room_is_not_read_into_memory(tmp_path):
    path = tmp_path / "sparse"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(OSError, match="too large"):
        disk.read(path)


class _DataBuckets(xshard.Supervised):
    """Linear regression over rows of which some only fill a batch up."""

    def train_data(self):
        return {"x": np.ones((8, 3), np.float32), "is_row": np.ones(8, np.float32)}

    def eval_data(self):
        return self.train_data()

    def forward(self, batch, *, is_training):
        return hk.Linear(1, with_bias=False, name="linear")(batch["x"])[:, 0]

    def loss(self, outputs, batch):
        errors_of_rows = batch["is_row"] * (outputs - 1) ** 2
        return jnp.sum(errors_of_rows) / jnp.maximum(self.weight(batch), 1), {}

    def weight(self, batch):
        return jnp.sum(batch["is_row"])

    def evaluate(self, outputs, batch):
        return {"error": (outputs - 1) ** 2}

    def optimizer(self):
        return xshard.CrossShardOptimizer(optax.sgd(0.1), slice_axis_name="slice")


@pytest.mark.parametrize("replicas, micro_batches", [(1, 1), (4, 1), (2, 2), (4, 2)])
def test_36_rows_that_fill_up_a_batch_count_for_nothing(replicas, micro_batches):
    config = toy.get_config()
    config.micro_batches = micro_batches
    experiment = _DataBuckets(config.lock())
    mesh = xshard.make_mesh(devices=jax.devices()[:replicas])
    rng = np.random.default_rng(0)
    # Three of eight rows, so that some replicas have none.
    x = np.zeros((8, 3), np.float32)
    x[:3] = rng.normal(size=(3, 3))
    batch = {"x": x, "is_row": (np.arange(8) < 3).astype(np.float32)}
    state = xshard.init(experiment, mesh, 0, batch)
    before = np.asarray(state.experiment.params["linear"]["w"])
    step = jax.jit(xshard.make_train_step(experiment, mesh))
    after, _ = step(state, batch)
    gradient = 2 * x[:3].T @ (x[:3] @ before - 1) / 3
    found = np.asarray(after.experiment.params["linear"]["w"])
    # Sums of three float32 products, in another order.
    np.testing.assert_allclose(found, before - 0.1 * gradient, rtol=1e-5, atol=1e-6)


class _DataShuffled(_DataKeeper):
    """Batches of a data set that is shuffled anew whenever it is iterated, or not."""

    def __init__(self, is_anew):
        super().__init__()
        self._is_anew = is_anew
        self._order = np.random.default_rng(0)

    def __next__(self):
        self.arrays = [*self.arrays, np.zeros(1)]
        order = self._order
        if not self._is_anew:
            order = np.random.default_rng(len(self.arrays))
        x = order.normal(size=(8, 2)).astype(np.float32)
        # NaN equals itself.
        x[:, 1] = np.nan
        return {"x": x}


@pytest.mark.parametrize("is_anew", [False, True])
def test_36_data_that_cannot_be_put_back_is_warned_of(caplog, is_anew):
    taken = _data_batches(_DataShuffled(is_anew))
    for _ in range(3):
        next(taken)
    assert caplog.text.count("_DataShuffled gave another batch") == is_anew
    # A run that resumes has other batches than the first.
    caplog.clear()
    taken = _data_batches(_DataShuffled(True))
    taken.restore([taken.position(0)])
    next(taken)
    assert not caplog.text


# Rows, names, writers, reports.

# A name that a run logs by itself, and the other name that the refusal gives.
ROWS_TAKEN = {
    "eval": "my_eval",
    "eval/loss": "eval_loss",
    "roll_back/number": "roll_back_number",
    "perf/time": "perf_time",
    "fingerprint/params": "fingerprint_params",
    "norms/update/w": "norms_update/w",
    "updates_per_step": "my_updates_per_step",
    "noise_scale": "my_noise_scale",
    "kind": "my_kind",
    "step": "my_step",
    "global_step": "my_global_step",
    "a/skipped": "a/my_skipped",
    "a/updates_per_step": "a/my_updates_per_step",
}


class RowsNamed(toy.Averaged):
    """Logs scalars and evaluates under the names of its config."""

    def loss(self, outputs, batch):
        value, _ = super().loss(outputs, batch)
        return value, {name: 2 * value for name in self.config.scalars}

    def evaluate(self, outputs, batch):
        (values,) = super().evaluate(outputs, batch).values()
        return dict.fromkeys(["error", *self.config.metrics], values)


class RowsLearner(xshard.Experiment):
    """Trains one learner, and logs it and a scalar under the names of its config."""

    def __init__(self, config):
        super().__init__(config)
        inner = toy.Toy(config)
        self.data = inner.train_data
        self.learner = inner.learner
        self.loss = inner.training_loss

    def train_data(self):
        return self.data()

    def eval_data(self):
        return self.data()

    def init(self, key, batch):
        example = {name: x[:1] for name, x in batch.items()}
        state = self.learner.init(key, example, is_training=True)
        return {self.config.learner: state}

    def train_step(self, state, batch, key):
        name = self.config.learner
        new, outcome = self.learner.update(state[name], self.loss, batch, key)
        scalars = dict.fromkeys(self.config.scalars, jnp.float32(2))
        return {name: new}, {name: outcome, **scalars}

    def eval_step(self, state, batch, key):
        return {"error": batch["y"]}


class RowsBare(xshard.Experiment):
    """Counts its steps, and logs nothing."""

    def train_data(self):
        return {"x": np.arange(32, dtype=np.float32)}

    def eval_data(self):
        return self.train_data()

    def init(self, key, batch):
        return {"count": jnp.int32(0)}

    def train_step(self, state, batch, key):
        return {"count": state["count"] + 1}, {}

    def eval_step(self, state, batch, key):
        return dict.fromkeys(self.config.metrics, batch["x"])


class RowsEnding(toy.Poisoned):
    """Has callbacks that end it in the way of its config."""

    def callbacks(self):
        def end(history):
            if self.config.ends == "fails":
                raise OSError("the first line\nthe last line")
            if self.config.ends == "is interrupted":
                raise KeyboardInterrupt
            return "enough" if self.config.ends == "stops itself" else None

        return [end]


class RowsNoting(writer.Writer):
    """A writer that notes what it is told."""

    def __init__(self, part):
        self._file = (part.directory / "told.jsonl").open("a")

    def _note(self, what, value):
        print(json.dumps([what, value]), file=self._file, flush=True)

    def write(self, row):
        self._note("row", row)

    def write_outcome(self, outcome):
        self._note("outcome", [outcome.kind, outcome.why, outcome.code])

    def close(self):
        self._note("closed", None)
        self._file.close()


def _rows_config(name, **changes):
    config = toy.get_config()
    config.experiment = f"{__name__}.{name}"
    config.scalars = ()
    config.metrics = ()
    config.learner = "a"
    config.ends = ""
    config.checkpoint.best_metric = "error"
    config.update({"steps": 4, "log_every_steps": 1, "eval_every_steps": 2, **changes})
    return config.lock()


def _rows_run(directory, config, watch=None):
    return winged.run(config, str(directory), "again", watch=watch)


def _rows_told(directory):
    lines = (directory / "told.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def _rows_refusal(name):
    return f"called '{name}'.*such as '?{ROWS_TAKEN[name]}"


@pytest.mark.parametrize("name", ROWS_TAKEN)
def test_10_a_scalar_under_a_name_of_the_run_is_refused(name):
    with pytest.raises(errors.UserError, match=_rows_refusal(name)):
        validation.scalar("Mine.loss", name, 1.0)


@pytest.mark.parametrize("name", ["eval/loss", "updates_per_step", "noise_scale"])
@pytest.mark.parametrize("experiment", ["RowsNamed", "RowsLearner"])
def test_10_it_is_refused_before_the_run_writes(tmp_path, experiment, name):
    config = _rows_config(experiment, scalars=(name,))
    with pytest.raises(errors.UserError, match=_rows_refusal(name)):
        loop.Run(config, str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["roll_back", "perf", "fingerprint", "norms", "step"])
def test_42_a_learner_under_a_name_of_the_run_is_refused(name):
    with pytest.raises(errors.UserError, match=f"a learner called '{name}'.*my_{name}"):
        methods.learner_name("Mine.train_step", name)


def test_42_a_learner_is_refused_before_the_run_writes(tmp_path):
    config = _rows_config("RowsLearner", learner="eval")
    with pytest.raises(errors.UserError, match="a learner called 'eval'.*my_eval"):
        loop.Run(config, str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["step", "raw/error", "ensemble", "count"])
def test_42_a_metric_under_a_name_of_the_evaluation_is_refused(tmp_path, name):
    config = _rows_config("RowsNamed", metrics=(name,))
    with pytest.raises(errors.UserError, match=f"called '{name}'.*another name"):
        loop.Run(config, str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_42_names_near_those_of_the_run_are_free(tmp_path):
    scalars = ("evaluation/x", "rolls", "raw/x", "epoch", "steps", "learning_rate")
    config = _rows_config("RowsNamed", scalars=scalars, metrics=("loss", "perf/x"))
    assert _rows_run(tmp_path, config) == 0
    logged = [row for row in rows.read(tmp_path) if row["kind"] == "train"]
    assert len(logged) == 4
    for row in logged:
        assert all(row[name] == pytest.approx(2 * row["loss"]) for name in scalars)


@pytest.mark.wing("roll_backs")
def test_42_each_row_says_its_kind(tmp_path):
    config = _rows_config(
        "RowsEnding",
        on_nonfinite="roll_back",
        poisoned=((0, 3),),
        log_norms_every_steps=1,
        writers=("jsonl", "csv", f"{__name__}.RowsNoting"),
    )
    assert _rows_run(tmp_path, config) == 0
    logged = rows.read(tmp_path)
    for row in logged:
        assert row["kind"] == rows_lib.kind({**row, "kind": None})
    kinds = [row["kind"] for row in logged]
    assert kinds.count("train") == 4 and kinds.count("evaluation") == 2
    assert kinds.count("roll_back") == 1
    (norms, *_) = (tmp_path / "norms.jsonl").read_text().splitlines()
    assert json.loads(norms)["kind"] == "norms"
    told = _rows_told(tmp_path)
    assert {row["kind"] for what, row in told if what == "row"} == {*kinds, "norms"}
    # What compares rows does so with those of earlier versions, too.
    assert all("kind" not in rows_lib.reproducible(row) for row in logged)


def test_42_rows_of_earlier_versions_are_read(tmp_path):
    old = [
        {"step": 1, "loss": 1.0, "kind": 3.0},
        {"step": 1, "eval/error": 2.0},
        {"step": 2, "roll_back/number": 1},
        {"step": 2, "kind": "train", "loss": 0.5},
        {"step": 2, "kind": "of a later version", "loss": 7.0},
    ]
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in old))
    training, evaluations = rows_lib.by_step(path)
    assert {step: row["loss"] for step, row in training.items()} == {1: 1.0, 2: 0.5}
    assert evaluations == {1: {"step": 1, "eval/error": 2.0}}
    training, evaluation = report_runs.read_rows(path, [])
    assert training["loss"].index.tolist() == [1, 2]
    assert evaluation["error"].values.tolist() == [[2.0]]


ROWS_ENDS = {
    "done": ({}, None, 0, ["done", "", 0]),
    "a callback": ({"ends": "stops itself"}, None, 0, ["done", "enough", 0]),
    "a stop": ({}, exit_codes.PREEMPTED, 42, ["stopped", "it is time", 42]),
    "Ctrl-C": ({}, exit_codes.INTERRUPTED, 130, ["interrupted", "it is time", 130]),
    "NaN": ({"poisoned": ((0, 3),)}, None, 3, ["not_finite", "step 3", 3]),
    "an exception": (
        {"ends": "fails"},
        None,
        OSError,
        ["failed", "the last line", 1],
    ),
    "a second Ctrl-C": (
        {"ends": "is interrupted"},
        None,
        KeyboardInterrupt,
        ["interrupted", "KeyboardInterrupt", 130],
    ),
}


class RowsWatch(rows.ScriptedWatch):
    """A watch that stops the run at its third poll, with an exit code."""

    def __init__(self, code):
        super().__init__(3, request.STOP)
        self._code = code

    def poll(self):
        polled = super().poll()
        return polled and polled._replace(why="it is time", code=self._code)


@pytest.mark.parametrize("end", ROWS_ENDS)
def test_39_each_writer_is_told_the_outcome_before_it_closes(tmp_path, end):
    changes, stop, code, outcome = ROWS_ENDS[end]
    named = f"{__name__}.RowsNoting"
    config = _rows_config("RowsEnding", writers=("jsonl", named), **changes)
    watch = None if stop is None else RowsWatch(stop)
    if isinstance(code, int):
        assert _rows_run(tmp_path, config, watch) == code
    else:
        with pytest.raises(code):
            _rows_run(tmp_path, config, watch)
    told = _rows_told(tmp_path)
    (_, [kind, why, told_code]), closed = told[-2:]
    assert closed == ["closed", None]
    assert [kind, told_code] == [outcome[0], outcome[2]] and outcome[1] in why
    assert [what for what, _ in told].count("outcome") == 1


@pytest.mark.wing("roll_backs")
def test_39_a_roll_back_is_told_as_one(tmp_path):
    config = _rows_config(
        "RowsEnding",
        writers=("jsonl", f"{__name__}.RowsNoting"),
        on_nonfinite="roll_back",
        poisoned=((0, 3),),
    )
    assert _rows_run(tmp_path, config) == 0
    told = _rows_told(tmp_path)
    kinds = [value[0] for what, value in told if what == "outcome"]
    assert kinds == ["rolled_back", "done"]


class _RowsMlflow:
    """A stand-in for MLflow: its values by step, its tags, and the run's status."""

    def __init__(self, monkeypatch):
        self.values = []
        self.tags = {}
        self.status = "RUNNING"
        run = types.SimpleNamespace(info=types.SimpleNamespace(run_id="an ID"))

        def start_run(run_id, tags, **_):
            self.status = "RUNNING"
            self.tags |= tags
            return run

        stand_in = types.SimpleNamespace(
            is_tracking_uri_set=lambda: True,
            start_run=start_run,
            end_run=lambda status: None,
            MlflowClient=lambda: self,
            exceptions=types.SimpleNamespace(MlflowException=RuntimeError),
            entities=types.SimpleNamespace(
                Param=lambda *values: values,
                Metric=lambda *values: values,
                RunTag=lambda *values: values,
            ),
        )
        monkeypatch.setitem(sys.modules, "mlflow", stand_in)

    def log_batch(self, run_id, metrics=(), params=(), tags=(), synchronous=None):
        self.tags |= dict(tags)
        self.values += [
            (step, value) for name, value, _, step in metrics if name == "x"
        ]

    def set_tag(self, run_id, name, value):
        self.tags[name] = value

    def update_run(self, run_id, status):
        self.status = status

    def set_terminated(self, run_id, status):
        self.status = status


@pytest.mark.parametrize(
    "outcome, wanted",
    [
        (writer.Outcome(writer.DONE, code=0), "FINISHED"),
        (writer.Outcome(writer.STOPPED, "SIGTERM", 42), "SCHEDULED"),
        (writer.Outcome(writer.INTERRUPTED, "SIGINT", 130), "KILLED"),
        (writer.Outcome(writer.NOT_FINITE, "step 3", 3), "FAILED"),
        (writer.outcome_of(OSError("no space")), "FAILED"),
        (writer.Outcome(writer.ROLLED_BACK), "RUNNING"),
    ],
)
@pytest.mark.wing("mlflow")
def test_39_mlflow_shows_how_the_run_ended(tmp_path, monkeypatch, outcome, wanted):
    service = _RowsMlflow(monkeypatch)
    part = writers.Part(tmp_path, 0, {})
    writers.Writers(["mlflow"], part, winged.WINGS).close(outcome)
    assert service.status == wanted
    assert service.tags["xshard.outcome"] == outcome.in_words()
    # A part that is killed tells nothing, so the next one says that it goes on.
    writers.Writers(["mlflow"], part._replace(step=7), winged.WINGS)
    assert service.tags["xshard.outcome"] == "runs, resumed from step 7"


@pytest.mark.wing("mlflow")
def test_39_mlflow_gets_the_steps_that_a_roll_back_repeats(tmp_path, monkeypatch):
    service = _RowsMlflow(monkeypatch)
    file = writers.JsonLines(tmp_path / "metrics.jsonl", 0)

    def part(step, rows):
        the_part = writers.Part(tmp_path, step, {})
        opened = writers.Writers(["jsonl", "mlflow"], the_part, winged.WINGS)
        for row in rows:
            opened.write(row)
        opened.close(writer.Outcome(writer.ROLLED_BACK))

    def train(step, x):
        return {"step": step, "kind": "train", "x": x}

    back = {"step": 3, "kind": "roll_back", "roll_back/number": 1}
    part(0, [train(step, 1.0) for step in (1, 2, 3, 4)])
    part(2, [back, train(3, 2.0)])
    assert service.values == [(1, 1.0), (2, 1.0), (3, 1.0), (4, 1.0), (3, 2.0)]
    assert "before step 3" in service.tags["xshard.roll_back"]
    # A resume repeats the roll-back's row and the step after it, with the same bits.
    part(2, [back, train(3, 2.0), train(4, 2.0)])
    assert service.values[5:] == [(4, 2.0)]
    assert file.count == 0


@pytest.mark.wing("wandb")
def test_39_wandb_is_told_the_exit_code(tmp_path, monkeypatch):
    told = []

    summary = {}

    class Run:
        def __init__(self):
            self.summary = summary

        def log(self, values, step):
            told.append(values)

        def mark_preempting(self):
            told.append("preempting")

        def finish(self, exit_code):
            told.append(exit_code)

    stand_in = types.SimpleNamespace(
        init=lambda **_: Run(),
        Error=RuntimeError,
        Settings=lambda **_: None,
        Html=lambda content: content,
    )
    monkeypatch.setitem(sys.modules, "wandb", stand_in)
    part = writers.Part(tmp_path, 0, {})
    for outcome, wanted in (
        (writer.Outcome(writer.STOPPED, "SIGTERM", 42), ["preempting", 42]),
        (writer.outcome_of(ValueError("bad")), [1]),
        (writer.Outcome(writer.NOT_FINITE, "NaN", 3), [3]),
        (writer.Outcome(writer.ROLLED_BACK), [0]),
        (writer.Outcome(writer.DONE, code=0), [0]),
    ):
        writers.Writers(["wandb"], part, winged.WINGS).close(outcome)
        assert told == wanted and summary["perf/outcome"] == outcome.in_words()
        told.clear()
    # A sample does not replace the number of its name.
    opened = writers.Writers(["wandb"], part, winged.WINGS)
    opened.write({"step": 1, "kind": "train", "digits": 1.0})
    shown = {"digits": {"kind": "text", "text": "7"}, "other": told}
    opened.write({"step": 1, "kind": "samples", "samples": shown})
    assert told == [{"step": 1, "digits": 1.0}, {"samples/digits": "<pre>7</pre>"}]


def RowsLacking(part):  # noqa: N802
    """Opens an object that is no writer."""
    return types.SimpleNamespace(write=print, flush=lambda: None)


def test_39_a_writer_of_another_class_is_refused_by_name(tmp_path):
    part = writers.Part(tmp_path, 0, {})
    message = "RowsLacking', which opened a SimpleNamespace: derive its class from"
    with pytest.raises(errors.UserError, match=message):
        writers.Writers([f"{__name__}.RowsLacking"], part)


@pytest.mark.parametrize("fingerprints", [0, 1])
def test_16_an_experiment_may_log_nothing(tmp_path, fingerprints):
    config = _rows_config(
        "RowsBare",
        fingerprint_every_steps=fingerprints,
        writers=("jsonl", "csv", "tensorboard"),
    )
    assert _rows_run(tmp_path, config) == 0
    kinds = [row["kind"] for row in rows.read(tmp_path)]
    assert kinds == ["train", "train", "evaluation"] * 2
    assert rows.results(tmp_path)["eval"] == {}
    with config.unlocked():
        config.steps = 6
    assert _rows_run(tmp_path, config) == 0
    assert int(rows.final_state(tmp_path, config).experiment["count"]) == 6


class _RowsBoard:
    """A board with the status of a thousand processes, which counts its reads."""

    def __init__(self, texts):
        self.texts = texts
        self.reads = 0

    def write(self, topic, text):
        self.texts[0] = text

    def read(self, topic):
        if topic != "alive":
            return {}
        self.reads += 1
        return self.texts


def test_19_process_0_parses_no_status_of_a_thousand_processes(tmp_path, monkeypatch):
    row = status.Status("a host").row()
    board = _RowsBoard({index: json.dumps(row) for index in range(1024)})
    watching = watchdog.Watchdog(tmp_path)
    monkeypatch.setattr(watching, "_count", 1024)
    monkeypatch.setattr(watching, "_board", board)
    monkeypatch.setattr(
        watching, "_heartbeat", heartbeat.Heartbeat(1024, rendezvous.Timeouts(), 0.5)
    )
    clock = [100.0]
    monkeypatch.setattr(watchdog.time, "monotonic", lambda: clock[0])
    parsed = []
    monkeypatch.setattr(heartbeat.json, "loads", parsed.append)
    written = []
    monkeypatch.setattr(
        watchdog.status, "write_texts", lambda _, texts: written.append(texts)
    )
    watching.publish()
    for _ in range(20):
        watching._exchange_status()
        clock[0] += 0.5
    # Ten seconds have passed.
    assert board.reads == 20 and not parsed
    assert [len(texts) for texts in written] == [1024] * 3
    # The end is written at once.
    watching._write_status()
    assert len(written) == 4


def test_19_who_is_silent_is_known_within_the_promised_time():
    timeouts = rendezvous.Timeouts()
    beat = heartbeat.Heartbeat(1024, timeouts, 0.5)
    row = status.Status("a host").row() | {"doing": status.TRAINING}
    texts = {index: json.dumps(row | {"pid": 0}) for index in range(1024)}
    ticks = 0
    while not beat.update(texts):
        ticks += 1
        # All but process 7 go on.
        changed = json.dumps(row | {"pid": ticks})
        texts = dict.fromkeys(range(1024), changed) | {7: texts[7]}
    assert beat.lost == {7}
    assert ticks * 0.5 == pytest.approx(timeouts.heartbeat, abs=2)
    # A row in the file is never as old as that of a silent process.
    assert status.seconds_between_writes(4096) + 0.5 < status._SILENT_SECONDS / 2


class RowsShared(RowsBare):
    """Draws one number for all replicas, by a key in its state, and logs it."""

    def init(self, key, batch):
        return {"key": key, "count": jnp.int32(0)}

    def train_step(self, state, batch, key):
        shared, next_key = jax.random.split(state["key"])
        drawn = jax.random.bits(shared, dtype=jnp.uint32) >> 8
        new = {"key": next_key, "count": state["count"] + 1}
        # An integer must be equal on all replicas.
        return new, {"drawn": drawn.astype(jnp.int32)}


def test_36_a_key_in_the_state_is_equal_on_all_replicas(tmp_path):
    config = _rows_config("RowsShared", metrics=("x",))
    assert _rows_run(tmp_path, config) == 0
    drawn = [row["drawn"] for row in rows.read(tmp_path) if row["kind"] == "train"]
    assert len(set(drawn)) == 4


def test_36_an_evaluation_batch_is_a_multiple_of_the_replicas(tmp_path):
    config = _rows_config("RowsNamed", eval_batch_size=12)
    with pytest.raises(errors.UserError, match="eval_batch_size=12.*replicas = 8"):
        loop.Run(config, str(tmp_path / "run"))


# Disks, locks, and who owns a run.

_DISKS_SAVES = """
import sys
from tests.checkpoint import harness, suspended
from tests.faults import lacking_disk
manager = harness.make_manager(sys.argv[1])
for step in (1, 2):
    harness.save(manager, step, harness.make_tree())
print(manager.all_steps())
manager.close()
"""


def _disks_run(program, *arguments, **environment):
    """Runs a program in a process and a process group of its own; returns its end."""
    return subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)],
        env=checkpoint_harness.environment(**environment),
        capture_output=True,
        text=True,
        start_new_session=True,
        check=False,
    )


def test_13_a_run_saves_below_an_automounted_folder(tmp_path):
    with disks.automounted(tmp_path / "home") as user:
        # The kind of disk that is meant: its root cannot be synced.
        with pytest.raises(OSError, match="Invalid argument"):
            descriptor = os.open(user.parent, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        done = _disks_run(_DISKS_SAVES, user / "runs" / "digits")
        assert (done.stdout, done.stderr) == ("[1, 2]\n", "")


_DISKS_SYNCED = """
import os, sys
from xshard.files import disk
synced = []
fsync = os.fsync
def note(descriptor):
    synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    fsync(descriptor)
os.fsync = note
"""


def test_13_only_folders_that_the_run_created_are_synced(tmp_path):
    theirs = tmp_path / "theirs" / "user"
    theirs.mkdir(parents=True)
    (theirs / "file").touch()
    program = f"{_DISKS_SYNCED}\n{_DISKS_SAVES}\nprint(*synced, sep='\\n')"
    done = _disks_run(program, theirs / "runs" / "digits")
    assert done.returncode == 0, done.stderr
    steps, *synced = done.stdout.splitlines()
    assert steps == "[1, 2]"
    # The parent of the first new folder has a new entry; what is above it has not.
    assert {str(theirs), str(theirs / "runs"), str(theirs / "runs/digits")} < set(
        synced
    )
    assert all(path.startswith(str(theirs)) for path in synced)


@pytest.mark.parametrize(
    ("place", "instant"),
    [("disk", "commit"), ("gcs", "retention"), ("s3", "before it looks")],
)
def test_14_a_process_suspended_past_its_lock_stops_and_harms_nothing(
    request, tmp_path, place, instant
):
    suspended.check_store(request, tmp_path, place, instant)


def test_14_a_run_that_was_suspended_changes_no_file_of_the_next(tmp_path):
    suspended.check_run(tmp_path, "a row")


_DISKS_TRAINS = """
import sys
from tests import toy
from xshard import loop
config = toy.get_config()
for steps in (7, 12):
    config.steps = steps
    print("code", loop.run(config, sys.argv[1], ""))
"""


def test_15_a_run_trains_and_resumes_on_a_disk_without_locks(tmp_path):
    if lacking_disk.missing():
        pytest.skip(lacking_disk.missing())
    with lacking_disk.mounted(tmp_path / "disk") as mounted:
        with (mounted / "file").open("w") as file, pytest.raises(OSError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        done = _disks_run(_DISKS_TRAINS, mounted / "run")
        assert done.stdout.count("code 0") == 2, done.stderr
        for lacks in ("has no fsync", "has no locks (flock: Function not implemented)"):
            assert done.stderr.count(lacks) == 1
        lines = (mounted / "run" / "metrics.jsonl").read_text().splitlines()
        steps = [json.loads(line)["step"] for line in lines]
        assert steps == [4, 6, 7, 7, 8, 12, 12]
        left = {path.name for path in (mounted / "run").rglob(".*")}
        assert left == {".lock"}


_DISKS_WITHOUT = """
import errno, fcntl, os, sys
def lacks(*_):
    raise OSError(getattr(errno, sys.argv[2]), os.strerror(getattr(errno, sys.argv[2])))
fcntl.flock = lacks
"""


def test_15_a_lease_takes_the_place_of_flock(tmp_path):
    # As a network disk answers whose lock server is not there.
    done = _disks_run(f"{_DISKS_WITHOUT}\n{_DISKS_SAVES}", tmp_path / "run", "ENOLCK")
    assert done.stdout == "[1, 2]\n", done.stderr
    assert done.stderr.count("has no locks (flock: ") == 1
    assert "A lease takes their place" in done.stderr
    # What its end leaves is in nobody's way.
    assert sorted(path.name[:13] for path in (tmp_path / "run").iterdir()) == [
        ".lock",
        "step_00000001",
        "step_00000002",
    ]


@pytest.fixture
def disks_without_flock(monkeypatch):
    monkeypatch.setattr(fcntl, "flock", suspended.lacks_flock)
    monkeypatch.setattr(claim, "RENEW_SECONDS", 0.05)
    monkeypatch.setattr(claim, "WATCH_SECONDS", 0.5)


def test_15_a_lease_is_refused_to_a_second_run_and_passes_on_after_a_kill(
    tmp_path, monkeypatch, disks_without_flock
):
    said = []
    first = claim.Claim(tmp_path)
    with (
        monkeypatch.context() as patch,
        pytest.raises(errors.UserError, match=r"in use by another process \(process "),
    ):
        # Far longer than the first one needs to show that it lives.
        patch.setattr(claim, "WATCH_SECONDS", checkpoint_harness.FOREVER)
        claim.Claim(tmp_path)
    first.check()
    # As if it had been killed, or suspended.
    first._ended.set()
    first._thread.join()
    second = claim.Claim(tmp_path, said.append)
    assert len(said) == 1 and "watching for 0.5 s whether that process" in said[0]
    # Nor does a sign of life that comes late take it back.
    for act in (first.check, first._write):
        with pytest.raises(claim.LostError, match="no longer holds .* holds it"):
            act()
    # The end of the first one takes nothing from the second.
    first.release()
    second.check()
    second.release()
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


def test_15_what_a_lock_makes_late_is_refused(
    tmp_path, monkeypatch, disks_without_flock
):
    store = store_lib.Store(tmp_path)
    first = lock.Lock(store, print)
    first._lease._ended.set()
    first._lease._thread.join()
    second = lock.Lock(store, print)
    with pytest.raises(lock.LostError):
        first.create("late", b"late")
    second.create("late", b"in time")
    second.create("late", b"in time")
    with pytest.raises(store_lib.CheckpointError, match="already exists with other"):
        second.create("late", b"another")
    for act in (lambda: first.delete("late"), lambda: first.announce(["late"])):
        with pytest.raises(lock.LostError):
            act()
    assert (tmp_path / "late").read_bytes() == b"in time"
    first.release()
    second.delete("late")
    second.release()
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


def test_15_of_several_that_take_a_claim_over_one_succeeds(
    tmp_path, monkeypatch, disks_without_flock
):
    # Longer than eight threads need to write.
    monkeypatch.setattr(claim, "RENEW_SECONDS", 1.0)
    last = claim.Claim(tmp_path)
    last._ended.set()
    outcomes = []

    def take():
        try:
            outcomes.append(claim.Claim(tmp_path))
        except errors.UserError as e:
            outcomes.append(e)

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (holder,) = [outcome for outcome in outcomes if isinstance(outcome, claim.Claim)]
    assert len(outcomes) == 8
    holder.check()
    holder.release()


def _disks_make(kind, path):
    if kind == "folder":
        path.mkdir()
    elif kind == "link":
        (path.parent.parent / "somebody's").write_text("content")
        path.symlink_to(path.parent.parent / "somebody's")
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.write_bytes(kind)


@pytest.mark.parametrize("kind", ["folder", "link", "pipe"])
def test_17_what_is_no_lock_on_a_disk_is_named(tmp_path, kind):
    folder = tmp_path / "run"
    folder.mkdir()
    _disks_make(kind, folder / ".lock")
    message = r"run/\.lock is .*, not the lock of a run: .* move it away"
    with pytest.raises(store_lib.CheckpointError, match=message):
        checkpoint_harness.make_manager(folder).acquire()
    with (
        pytest.raises(errors.UserError, match=f"--workdir={folder}.*{message}"),
        workdir.Workdir(folder).opened(toy.get_config()),
    ):
        pass
    if kind == "link":
        assert (tmp_path / "somebody's").read_text() == "content"


_DISKS_CONTENTS = (
    b"",
    b"{}",
    b"[]",
    b"7",
    b"null",
    b'{"owner": 7}',
    b'{"owner": "a"}',
    b'{"owner": "a", "beats": "many"}',
    b'{"owner": "a", "beats": 1, "deleting": "all"}',
    b"\xff\x00\xfe",
    b'{"owner": "a", "beats": ' + b"1" * 5000 + b"}",
    b"[" * 100_000,
    b" " * (2 << 20),
)


def test_17_what_is_no_lease_on_a_bucket_is_named(gcs, tmp_path):
    for number, content in enumerate(_DISKS_CONTENTS):
        folder = f"{gcs}{tmp_path.name}/{number}"
        store_lib.Store(folder).create(".lock", content)
        message = r"/\.lock is not the lease of a run: .*Make sure .* then delete it"
        with pytest.raises(store_lib.CheckpointError, match=message):
            checkpoint_harness.make_manager(folder).acquire()
        # On a disk the kernel holds the lock, whatever is in the file.
        disk_folder = tmp_path / str(number)
        disk_folder.mkdir()
        (disk_folder / ".lock").write_bytes(content)
        manager = checkpoint_harness.make_manager(disk_folder)
        manager.acquire()
        manager.close()


def test_17_the_lease_of_an_earlier_version_is_read(gcs, tmp_path, monkeypatch):
    monkeypatch.setattr(claim, "RENEW_SECONDS", 0.05)
    monkeypatch.setattr(claim, "WATCH_SECONDS", 0.5)
    folder = f"{gcs}{tmp_path.name}"
    store_lib.Store(folder).create(".lock", b'{"owner": "host/0123", "beats": 3}')
    manager = checkpoint_harness.make_manager(folder)
    manager.acquire()
    manager.close()


def test_17_a_folder_in_the_place_of_a_note_is_named(tmp_path):
    (tmp_path / claim.HOLDER / "mine").mkdir(parents=True)
    with pytest.raises(
        store_lib.CheckpointError, match=r"Is a directory \(.*\.holder\.json\)"
    ):
        checkpoint_harness.make_manager(tmp_path).acquire()
    assert (tmp_path / claim.HOLDER / "mine").is_dir()


def test_23_files_that_several_write_at_a_time_are_whole(tmp_path):
    path = tmp_path / "report.html"
    contents = [str(number).encode() * 100_000 for number in range(8)]
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(disk.replacing(path)) for _ in contents]
        for part in (slice(None, 50_000), slice(50_000, None)):
            for file, content in zip(files, contents, strict=True):
                file.write(content[part])
    # The contexts end in reverse, so the first one replaced the others' result.
    assert path.read_bytes() == contents[0]
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


def test_23_a_killed_writer_leaves_nothing_in_the_way(tmp_path):
    path = tmp_path / "report.html"
    program = """
import os, pathlib, signal, sys
from xshard.files import disk
with disk.replacing(pathlib.Path(sys.argv[1])) as file:
    file.write(b"half")
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)
"""
    assert _disks_run(program, path).returncode == -signal.SIGKILL
    assert [path.name for path in tmp_path.iterdir()] == [".report.html.new"]
    disk.replace(path, b"whole")
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


@pytest.mark.parametrize("name", [".report.html.new", "report.html"])
def test_23_a_link_that_somebody_put_there_is_not_followed(tmp_path, name):
    theirs = tmp_path / "theirs"
    theirs.write_text("content")
    folder = tmp_path / "shared"
    folder.mkdir()
    (folder / name).symlink_to(theirs)
    disk.replace(folder / "report.html", b"mine")
    assert theirs.read_text() == "content"
    assert (folder / "report.html").read_bytes() == b"mine"


def test_23_a_token_is_written_to_a_file_of_its_own(tmp_path, monkeypatch):
    theirs = tmp_path / "theirs"
    theirs.write_text("content")
    path = tmp_path / "job.token"
    path.symlink_to(theirs)
    show = f"import os, stat; s = os.lstat({str(path)!r}); print(oct(s.st_mode))"
    plan = engine.Plan(
        [[sys.executable, "-c", f"{show}; open({str(tmp_path / 'ran')!r}, 'w')"]],
        private={path: engine.TOKEN},
    )
    assert plan.run() == 0
    assert (tmp_path / "ran").exists() and not os.path.lexists(path)
    assert theirs.read_text() == "content"

    # Somebody is faster than the launcher.
    unlink = pathlib.Path.unlink

    def unlinked(self, **options):
        unlink(self, **options)
        if self == path:
            path.symlink_to(theirs)

    monkeypatch.setattr(pathlib.Path, "unlink", unlinked)
    with pytest.raises(engine.LaunchError, match=r"job\.token cannot be written"):
        plan.run()
    assert theirs.read_text() == "content"


def test_44_goodput_does_not_depend_on_the_wall_clock(tmp_path, monkeypatch):
    day = 86400.0
    now = [time.time()]
    up = [1000.0]
    age = [0.0]
    monkeypatch.setattr(status.time, "time", lambda: now[0])
    monkeypatch.setattr(clock, "boot", lambda: ("one boot", up[0]))
    monkeypatch.setattr(clock, "age", lambda: age[0])

    def run(begin, jump):
        age[0] = 0.0
        of_process = status.Status("host")
        for step in (begin + 1, begin + 10):
            of_process.set_phase(
                status.TRAINING, step=step, seconds=lambda: {"training": age[0]}
            )
        for clocks in (now, up, age):
            clocks[0] += 100.0
        now[0] += jump
        row = of_process.row() | {"first": begin, "trained": 10, "step": begin + 10}
        status.write(tmp_path, [row])

    run(0, day)
    attempts.preserve_previous(tmp_path)
    # The clock is set right, and then a day ahead again, between two starts.
    for seconds in (-day, day):
        now[0] += 10.0 + seconds
        up[0] += 10.0
        run(10, 0.0)
        attempts.preserve_previous(tmp_path)
    first, second, third = attempts.read(tmp_path)
    assert [attempt.down for attempt in (first, second, third)] == [10.0, 10.0, 0.0]
    goodput = attempts.goodput([first, second, third])
    assert goodput.seconds == pytest.approx(320.0)
    # The second start's steps were made again by the third.
    assert goodput.share == pytest.approx(200.0 / 320.0)


# The values of a config, sweeps, adaptations.

CONFIG_BIG = 2**80


class ConfigColour(enum.Enum):
    RED = 1


class ConfigLevel(enum.IntEnum):
    LOW = 1


class ConfigWord(enum.StrEnum):
    A = "a"


class ConfigPair(collections.namedtuple("ConfigPair", "a b")):
    """A tuple with names."""


class ConfigText(str):
    """A text of a type of its own."""


def config_triple(x):
    """A function that a config holds."""
    return 3 * x


def _config_accepted():
    """Returns a value of each kind that a config can hold."""
    return {
        "no": False,
        "count": 3,
        "big": CONFIG_BIG,
        "rate": 0.1,
        "tiny": 5e-324,
        "negative_zero": -0.0,
        "infinite": -math.inf,
        "undefined": math.nan,
        "text": "größe\u2028",
        "surrogate": "\udc80",
        "nothing": None,
        "list": [1, [2, (3,)]],
        "tuple": ((1, 2.0), (None, True, "a"), ()),
        "empty": {},
        "inner": {"deep": {"sizes": (4, 5)}},
        "placeholder": config_dict.placeholder(int),
        "function": jax.nn.relu,
        "own_function": config_triple,
        "ufunc": np.tanh,
        "builtin": math.sqrt,
        "class": optax.MultiSteps,
        "dtype": jnp.bfloat16,
        "functions": (jax.nn.gelu, len),
    }


def _config_frozen(values):
    """Returns values as an experiment gets them."""
    return config_lib.ReadConfig(ml_collections.ConfigDict(values))


def _config_is_same(one, other):
    """Returns whether two values of a config are the same, down to their types."""
    if isinstance(one, ml_collections.FrozenConfigDict):
        keys = list(one) == list(other)
        return keys and all(_config_is_same(one[key], other[key]) for key in one)
    if type(one) is not type(other):
        return False
    if isinstance(one, tuple | list):
        pairs = zip(one, other, strict=False)
        return len(one) == len(other) and all(_config_is_same(*pair) for pair in pairs)
    if isinstance(one, float):
        return repr(one) == repr(other)
    return one is other or (not callable(one) and one == other)


class ConfigNetwork(toy.Wide):
    """Builds its network from each value, and another one if a value is not right."""

    def forward(self, batch, *, is_training):
        own = self.config.own
        right = _config_frozen(_config_accepted())
        scale = 1.0
        for key in right:
            scale *= 1.0 if _config_is_same(own[key], right[key]) else 100.0
        x = own.function(batch["x"]) + own.own_function(batch["x"])
        outputs = super().forward({"x": x}, is_training=is_training)
        return outputs.astype(own.dtype).astype(jnp.float32) * scale


def _config_of(experiment="", **changes):
    config = toy.get_config()
    config.experiment = experiment or f"{__name__}.ConfigNetwork"
    config.steps = 4
    config.own = _config_accepted()
    config.log_every_steps = 2
    config.checkpoint.every_steps = 2
    config.update_from_flattened_dict(changes)
    return config


def _config_file(tmp_path):
    """Writes a config file, as a run of the command line takes it."""
    path = tmp_path / "config.py"
    path.write_text(
        f"import importlib\n"
        f"def get_config():\n"
        f"    return importlib.import_module({__name__!r})._config_of()\n"
    )
    return path


def _config_check_loaded(directory):
    """Checks that a run's model is the same when it is loaded."""
    loaded = xshard.load(directory)
    own = loaded.experiment.config.own
    assert _config_is_same(own, _config_frozen(_config_accepted()))
    data = loaded.experiment.eval_data()
    error = np.mean((np.asarray(loaded.predict(data)) - data["y"]) ** 2)
    # The mean is taken in another order.
    expected = rows.results(directory)["eval"]["error"]
    np.testing.assert_allclose(error, expected, rtol=1e-4)
    return loaded


def test_37_a_run_a_load_an_export_a_replay_and_a_resume_build_the_same(tmp_path):
    config = _config_of().lock()
    assert loop.run(config, str(tmp_path / "run"), "") == 0
    loaded = _config_check_loaded(tmp_path / "run")
    # The program has the network within, as the export built it.
    file = tmp_path / "model.stablehlo"
    data = loaded.experiment.eval_data()
    export.write(loaded, file, batch_size=10)
    exported = jax.export.deserialize(bytearray(file.read_bytes()))
    # It is compiled by itself, and rounds otherwise.
    np.testing.assert_allclose(
        exported.call({"x": data["x"]}), loaded.predict(data), rtol=2e-2
    )
    again = replayer.Replayer(str(tmp_path / "run"))
    assert _config_is_same(again.experiment.config.own, loaded.experiment.config.own)
    assert again.rows

    whole = _config_of(steps=6).lock()
    assert loop.run(whole, str(tmp_path / "run"), "") == 0
    assert loop.run(whole, str(tmp_path / "whole"), "") == 0
    states = [rows.final_state(tmp_path / name, whole) for name in ("run", "whole")]
    leaves = [jax.device_get(jax.tree.leaves(x.experiment)) for x in states]
    for one, other in zip(*leaves, strict=True):
        np.testing.assert_array_equal(one, other)


def test_37_a_pod_in_a_sweep_builds_the_same(tmp_path):
    points = tmp_path / "sweep.py"
    points.write_text("def get_sweep():\n    return [{'own.rate': 0.1, 'seed': 1}]\n")
    command = [*harness.TOY, f"--workdir={tmp_path / 'runs'}"]
    command[3] = f"--config={_config_file(tmp_path)}"
    flags = [f"--sweep={points}", "--num_processes=2", "--cpu_devices=1"]
    process = harness.launch(*flags, "--max_failures=1", command=command)
    code, output = harness.finish(process)
    assert code == 0, output
    _config_check_loaded(tmp_path / "runs" / "000")


@pytest.mark.parametrize("sign", [1, -1])
def test_37_what_a_config_holds_comes_back(sign):
    values = {**_config_accepted(), "n": sign * CONFIG_BIG, "f": sign * math.inf}
    config = ml_collections.ConfigDict(values)
    content = json.loads(json.dumps(config_values.to_json(config)))
    back = config_values.from_json(content)
    assert _config_is_same(_config_frozen(back), _config_frozen(values))
    # Not even the config that was frozen tells them apart.
    views = [config_lib.ReadConfig(x).as_configdict() for x in (back, config)]
    assert views[0].list == views[1].list == (1, (2, (3,)))
    assert config.list == [1, [2, (3,)]]
    # The function is found where its library promises it, not where it happens to be.
    assert content["function"] == "$import jax.nn:relu"
    assert "function = jax.nn:relu\n" in config_lib.describe(config)


CONFIG_REFUSED = {
    "enum": ConfigColour.RED,
    "int_enum": ConfigLevel.LOW,
    "str_enum": ConfigWord.A,
    "str_subclass": ConfigText("a"),
    "numpy_bool": np.bool_(False),
    "numpy_float": np.float64(0.5),
    "numpy_int": np.int64(3),
    "numpy_array": np.arange(2000),
    "numpy_0d": np.array(3),
    "dtype": np.dtype("int8"),
    "set": {1, 2},
    "frozenset": frozenset("ab"),
    "bytes": b"ab",
    "path": pathlib.PurePosixPath("/a"),
    "slice": slice(0, 3),
    "range": range(3),
    "complex": 1j,
    "decimal": decimal.Decimal("0.1"),
    "date": datetime.date(2020, 1, 2),
    "module": math,
    "partial": functools.partial(config_triple, 1),
    "renamed": lambda x: x,
    "made": optax.constant_schedule(0.5),
    "method": collections.OrderedDict().keys,
    "instance": object(),
    "named_tuple": ConfigPair(1, 2),
    "halves": "\ud83d\ude00",
    "reserved_text": "$import a:b",
    "long": 10**5000,
    "in_list": [1, {2}],
    "dict_in_list": [{"a": 1}],
    "int_key": {1: "a"},
    "mixed_keys": {1: "a", "b": 2},
    "enum_key": {ConfigWord.A: 1},
    "required": config_dict.required_placeholder(int),
}
CONFIG_MESSAGES = {
    "numpy_float": r"^own\.v=(np.float64\(0.5\)|0.5), of type float64: .*\.tolist\(\)",
    "made": "^own.v=<function constant_sched.*, of type function: .* make it in the",
    "long": "^own.v=an integer of 16610 bits, of type int: ",
    "in_list": r"^own\.v\.1=\{2\}, of type set: ",
    "dict_in_list": r"^own\.v\.0=\{'a': 1\}, of type dict: .*without dictionaries",
    "int_key": "the key 1 of type int in own.v: a key is a text .* such as '1'",
    "mixed_keys": "such as '1'",
    "enum_key": "of type ConfigWord in own.v: a key is a text .* such as 'a'",
    "required": "^own.v is required",
}


@pytest.mark.parametrize("kind", CONFIG_REFUSED)
def test_37_what_it_cannot_hold_is_refused_before_anything_is_written(tmp_path, kind):
    config = _config_of("tests.toy.Toy")
    config.own.v = CONFIG_REFUSED[kind]
    message = CONFIG_MESSAGES.get(kind, r"^own\.v=.*config.json does not give it back")
    with pytest.raises(errors.UserError, match=message):
        loop.run(config, str(tmp_path / "run"), "")
    assert not (tmp_path / "run").exists()


def test_37_a_jax_array_a_cycle_and_the_key_of_the_identity_are_refused():
    config = ml_collections.ConfigDict({"a": jnp.ones(2)})
    with pytest.raises(errors.UserError, match=r"^a=.*\.tolist\(\)"):
        config_values.to_json(config)
    cycle = [1]
    cycle.append(cycle)
    with pytest.raises(errors.UserError, match=r"^a\.1\.1.*, at most 100 deep"):
        config_values.to_json(ml_collections.ConfigDict({"a": cycle}))
    with pytest.raises(errors.UserError, match="'_run', under which config.json"):
        config_values.to_json(ml_collections.ConfigDict({"_run": 1}))
    keys = ml_collections.ConfigDict()
    keys["__doc__"] = 1
    with pytest.raises(errors.UserError, match="key '__doc__' .* an attribute"):
        config_values.to_json(keys)
    dotted = ml_collections.ConfigDict({"a.b": 1}, allow_dotted_keys=True)
    with pytest.raises(errors.UserError, match="'a.b' .* without a dot.* as 'a_b'"):
        config_values.to_json(dotted)


def test_37_a_function_that_no_other_program_can_import_is_refused(
    tmp_path, monkeypatch
):
    module = types.ModuleType("found_by_path_only")
    module.__file__ = str(tmp_path / "config.py")
    exec("def act(x): return x", module.__dict__)
    # As ml_collections loads a config file.
    monkeypatch.setitem(sys.modules, module.__name__, module)
    config = ml_collections.ConfigDict({"act": module.act})
    with pytest.raises(errors.UserError, match="^act=.*does not give it back"):
        config_values.to_json(config)
    # Another object has the name of this one.
    other = copy.copy(types.FunctionType(config_triple.__code__, globals()))
    other.__module__ = __name__
    with pytest.raises(errors.UserError, match="^act=.*does not give it back"):
        config_values.to_json(ml_collections.ConfigDict({"act": other}))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (jax.nn.relu, jax.nn.gelu),
        (tuple(range(2000)), (*range(1999), -1)),
        (1, True),
        (1, 1.0),
        (0.0, -0.0),
        ("$", "$ "),
        (None, 0),
        (None, {}),
        ((1, 2), (1, (2,))),
    ],
)
def test_37_a_changed_value_is_another_run(tmp_path, before, after):
    def config(value):
        made = _config_of("tests.toy.Toy")
        with made.own.ignore_type():
            made.own.v = value
        return made.lock()

    run = workdir.Workdir(tmp_path / "run")
    with run.opened(config(before)):
        pass
    assert run.check(config(before)) == []
    with pytest.raises(errors.UserError, match=r"another config \(own\.v: ") as raised:
        run.check(config(after))
    assert len(str(raised.value)) < 600
    lacks = _config_of("tests.toy.Toy")
    with pytest.raises(errors.UserError, match=r"another config \(own\.v: "):
        run.check(lacks.lock())


def test_37_the_fingerprint_of_a_plain_config_stays():
    values = {
        "a": (1, [2.0, True]),
        "b": None,
        "c": math.nan,
        "d": -math.inf,
        "e": {},
        "f": "größe\u2028",
        "g": CONFIG_BIG,
        "h": -0.0,
    }
    config = ml_collections.ConfigDict({"own": values})
    # As the first runs with these values had it.
    assert identity.fingerprint(config) == "419a884f9f3e660f"
    config.own.a = [1, (2.0, True)]
    assert identity.fingerprint(config) == "419a884f9f3e660f"


def _config_job(tmp_path):
    path = tmp_path / "config.py"
    path.write_text(
        "import ml_collections\n"
        "from ml_collections import config_dict\n"
        "from tests import toy\n"
        "def get_config():\n"
        "    config = toy.get_config()\n"
        "    config.t = (1, 2)\n"
        "    config.s = 'x'\n"
        "    config.b = True\n"
        "    config.n = None\n"
        "    config.l = [1]\n"
        "    config.h = config_dict.placeholder(float)\n"
        "    config.d = {'width': 8, 'rate': 0.5}\n"
        "    return config\n"
    )
    command = (sys.executable, "-m", "xshard.main", f"--config={path}")
    return engine.Job("job", (*command, f"--workdir={tmp_path / 'runs'}"))


def _config_points(tmp_path, monkeypatch, *points):
    """Returns points as the file of a sweep gives them."""
    (tmp_path / "sweep.py").touch()
    run_path = lambda path: {"get_sweep": lambda: list(points)}
    monkeypatch.setattr(sweep.runpy, "run_path", run_path)
    return sweep.read(tmp_path / "sweep.py")


@pytest.mark.filterwarnings("ignore:the load_module:DeprecationWarning")
@pytest.mark.parametrize(
    ("key", "value", "arrives"),
    [
        ("optimizer.learning_rate", np.float32(0.5), 0.5),
        ("optimizer.learning_rate", 1, 1.0),
        ("optimizer.learning_rate", math.inf, math.inf),
        ("seed", np.int64(3), 3),
        ("b", np.bool_(False), False),
        ("s", "null", "null"),
        ("s", "a,b 'c'\n", "a,b 'c'\n"),
        ("t", (1, None, True, "a", -math.inf, (2,)), None),
        ("t", [np.int32(4)], (4,)),
        ("t", np.arange(3), (0, 1, 2)),
        ("t", (), ()),
        ("t", (math.nan,), (math.nan,)),
        ("l", [2], (2,)),
        ("n", None, None),
        ("n", 3, 3),
        ("s", None, None),
        ("t", None, None),
        ("s", "\0", "\0"),
        ("h", None, None),
        ("h", 2, 2.0),
        ("d", {"width": 4, "rate": None}, None),
        ("d.width", 4, 4),
    ],
)
def test_43_what_arrives_in_a_run_is_what_the_table_shows(
    tmp_path, monkeypatch, key, value, arrives
):
    points = _config_points(tmp_path, monkeypatch, {key: value})
    (job,) = sweep.jobs(_config_job(tmp_path), points)
    requested = config_lib.flatten({"value": sweep.requested_config(job)})
    flat = {name.removeprefix("value."): x for name, x in requested.items()}
    expected = arrives
    if arrives is None:
        expected = points[0][key]
    wanted = ml_collections.ConfigDict({key.replace(".", "_"): expected})
    for name, item in config_lib.flatten(config_values.to_json(wanted)).items():
        name = name.replace("d_width", "d.width").replace("optimizer_l", "optimizer.l")
        assert identity.is_equal(flat[name], item)


@pytest.mark.filterwarnings("ignore:the load_module:DeprecationWarning")
@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("s", 1, "point 0: s=1 is of type int, and the config has str there"),
        ("b", 0, "of type int, and the config has bool"),
        ("b", "False", "of type str, and the config has bool"),
        ("seed", True, "of type bool, and the config has int"),
        ("optimizer.learning_rate", True, "of type bool, and the config has float"),
        ("h", "-inf", "of type str, and the config has float"),
        ("t", 7, "of type int, and the config has tuple"),
        ("t", "abc", "of type str, and the config has tuple"),
        ("d", 7, "of type int, and the config has dict"),
        ("t", ({"a": 1},), "point 0: t.0={.*lists without dictionaries"),
        ("seed", 0.5, "of type float, and the config has int"),
        ("absent", 3, "absent: the config has no such key; did you mean"),
        ("optimizer.learning_rat", 3, "no such key; did you mean optimizer.learning"),
        ("d", {"widht": 3}, "d.widht: the config has no such key"),
        ("t.0", 3, "has no such key"),
        ("seed.a", 3, "has no such key"),
        ("seed=1", 3, "has no such key"),
        ("", 3, "has no such key"),
        ("s", ConfigColour.RED, "of type ConfigColour"),
        ("s", len, "of type builtin_function_or_method"),
    ],
)
def test_43_what_would_not_arrive_is_refused(
    tmp_path, monkeypatch, key, value, message
):
    with pytest.raises(engine.LaunchError, match=message):
        points = _config_points(tmp_path, monkeypatch, {key: value})
        sweep.jobs(_config_job(tmp_path), points)


def test_43_the_table_shows_the_points_in_full(tmp_path):
    points = [{"rate": 0.123456, "loss": 1}, {"rate": 0.123457, "loss": None}]
    (tmp_path / "sweep.json").write_text(json.dumps(points))
    for index in range(2):
        folder = tmp_path / f"{index:03}"
        folder.mkdir()
        results = {"eval": {"loss": 0.25}, "step": 3, "run": ""}
        (folder / "results.json").write_text(json.dumps(results))
    shown = [line.split() for line in sweep.table(sweep.rows(tmp_path)).splitlines()]
    assert shown[0][:3] == ["run", "rate", "loss"] and shown[0][-1] == "eval/loss"
    assert shown[1][:3] == ["000", "0.123456", "1"] and shown[1][-1] == "0.25"
    assert shown[2][:3] == ["001", "0.123457", "None"]


class ConfigLora(toy.Wide):
    """Adapts a network by an alpha that is not in its config."""

    factors = types.SimpleNamespace(rank=2, alpha=4)

    def lora(self):
        factors = self.factors
        return xshard.lora(factors.rank, factors.alpha, "linear_0/")


def _config_lora(tmp_path, name, init="", **changes):
    config = _config_of(f"{__name__}.ConfigLora", **changes).lock()
    source = checkpoint.Source(str(init)) if init else None
    return loop.run(config, str(tmp_path / name), "", init=source)


def test_40_another_alpha_is_refused(tmp_path, monkeypatch):
    set_factors = lambda **x: monkeypatch.setattr(
        ConfigLora, "factors", types.SimpleNamespace(**x)
    )
    assert _config_lora(tmp_path, "run") == 0
    run = tmp_path / "run"
    separate = tmp_path / "separate.safetensors"
    export.write(xshard.load(run), separate, merge_lora=False)
    # The same alpha, of another type.
    set_factors(rank=2, alpha=np.float32(4))
    assert _config_lora(tmp_path, "run", steps=6) == 0
    for index, source in enumerate((run, separate)):
        assert _config_lora(tmp_path, f"same_{index}", source, steps=1) == 0

    set_factors(rank=2, alpha=40)
    named = r"lora\(rank=2, alpha=4\.0\).*lora\(rank=2, alpha=40\.0\)"
    with pytest.raises(errors.UserError, match=named):
        _config_lora(tmp_path, "run", steps=8)
    with pytest.raises(errors.UserError, match=named):
        xshard.load(run)
    for source in (run, separate):
        with pytest.raises(errors.UserError, match=named):
            _config_lora(tmp_path, "other", source, steps=1)
        assert not (tmp_path / "other").exists()
    set_factors(rank=3, alpha=6)
    for source in (run, separate):
        with pytest.raises(errors.UserError, match="_lora_a"):
            _config_lora(tmp_path, "other", source, steps=1)


def test_40_a_checkpoint_of_an_earlier_version_is_taken_with_a_note(
    tmp_path, monkeypatch, capfd
):
    original = checkpoints.Checkpoints.__init__

    def without(self, *args, **kwargs):
        original(self, *args, **kwargs)
        del self._metadata["lora"]

    with monkeypatch.context() as patched:
        patched.setattr(checkpoints.Checkpoints, "__init__", without)
        assert _config_lora(tmp_path, "run") == 0
    capfd.readouterr()
    assert _config_lora(tmp_path, "run", steps=6) == 0
    resumed = "".join(capfd.readouterr())
    assert "did not save the alpha" in resumed
    assert "lora(rank=2, alpha=4.0)" in resumed
    # Step 4 is of the earlier version, and step 6 is not.
    assert _config_lora(tmp_path, "old", f"{tmp_path / 'run'}@4", steps=1) == 0
    assert "does not say by which alpha" in "".join(capfd.readouterr())
    assert _config_lora(tmp_path, "new", tmp_path / "run", steps=1) == 0
    assert "alpha" not in "".join(capfd.readouterr())
