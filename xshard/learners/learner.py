"""A network with its update rule, which an experiment trains.

A learner applies a run's config to each call: precision, micro-batches, the reduction
of gradients over the replicas, the vote on a step, the loss scale, the sharded update,
averages of the parameters, and norms.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import jmp
import ml_collections
from jax import lax

from xshard import config as config_lib
from xshard import errors, validation
from xshard import mesh as mesh_lib
from xshard.learners import run_context
from xshard.learners import state as state_lib
from xshard.optimizers import (
    base,
    gathering,
    gradients,
    inspection,
    layouts,
    moving_average,
    phases,
    replica_map,
    trees,
    varying,
)
from xshard.optimizers.replica_map import equal_on_replicas

# A function of a learner's state, a batch and a key: see `Learner.update`.
Loss = Callable[[Any, Any, jax.Array], tuple[Any, ...]]


class _Update(NamedTuple):
    """The result of an update on a replica.

    Attributes:
      params: the new parameters.
      net_state: the replica's own new network state.
      global_step: the number of updates applied.
      metrics: the replica's own metrics.
      aux: the loss's further output for all micro-batches: empty, or one tree.
      shares: with shards of gradients, the replica's own part of each norm's square.
        The square is the mean of `shares` over the replicas plus the entry of
        `squares`. Otherwise empty.
      squares: the squares of norms, or the part of them that `shares` lacks. Equal on
        all replicas of a group.
      agreed: further metrics, equal on all replicas of a group.
      nonfinite: the number of non-finite gradient elements for each parameter; with
        shards of gradients, the replica's own number.
      lowered: whether the update lowered a loss scale.
    """

    params: Any
    net_state: Any
    global_step: Any
    metrics: dict[str, Any]
    aux: tuple[Any, ...]
    shares: dict[str, Any]
    squares: dict[str, Any]
    agreed: dict[str, Any]
    nonfinite: Any
    lowered: Any


class Learner:
    """A network with its update rule, as functions of a `LearnerState`. Call them in an
    `Experiment`'s methods.
    """

    def __init__(
        self,
        network: Callable[..., Any],
        optimizer: Callable[[], base.Optimizer],
        config: ml_collections.ConfigDict,
        *,
        clip_gradients: Callable[[Any], Any] | None = None,
        frozen: str = "",
        uncast: str = "",
    ):
        """Stores the network, the rule and the options of training.

        Args:
          network: a Haiku function of any arguments.
          optimizer: returns the update rule, which must contain a `CrossShardOptimizer`
            over 'replica' (and 'slice', with several slices).
          config: the run's config. The learner reads its keys precision, micro_batches,
            gather_once, aggregation_method and on_nonfinite.
          clip_gradients: transforms a replica's gradients before they are reduced. A
            gradient that it replaces with None leaves its parameter unchanged.
          frozen: a regular expression, such as '^encoder/'. The parameters with a match
            in their paths stay unchanged, without gradients, slots or averages. Empty
            by default, which freezes none.
          uncast: a regular expression, such as '/time$'. The network's inputs with a
            match in their paths keep their floating-point type; the others are cast to
            the compute type. A path begins with the argument's number or name, as in
            '0/time' for the field 'time' of a batch. Empty by default, which casts all.
        """
        self._function = network
        self._make_rule = optimizer
        self._clips = clip_gradients is not None
        self._clip = clip_gradients or (lambda grads: grads)
        self._frozen = frozen
        self._uncast = uncast
        self._policy = jmp.get_policy(config.precision)
        self._micro_batches = config.micro_batches
        self._gathers_once = config.gather_once
        self._method = gradients.method(config.aggregation_method)
        self._skips_nonfinite = config.on_nonfinite == config_lib.SKIP
        self._network = hk.transform_with_state(network)
        self._rules = hk.transform_with_state(self._update)

    def init(self, key: jax.Array, *args: Any, **kwargs: Any) -> state_lib.LearnerState:
        """Creates the initial state, with whole arrays.

        Args:
          key: the random key for parameters and state.
          *args: the network's arguments; only their types and shapes matter.
          **kwargs: the network's keyword arguments, likewise.
        """
        with validation.network_errors(self._function):
            args, kwargs = self._cast(self._policy.cast_to_param, args, kwargs)
            params, net_state, requested = gathering.init_network(
                self._function, key, *args, **kwargs
            )
        validation.parameters(self._function, params)
        params = self._policy.cast_to_param(params)
        rules = hk.transform(self._describe).apply({}, None, params, requested)
        _, opt_state = hk.transform_with_state(self._init_rules).init(
            key, params, rules
        )
        return state_lib.LearnerState(params, net_state, opt_state, jnp.int32(0), rules)

    def apply(
        self,
        state: state_lib.LearnerState,
        key: jax.Array | None,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Any, Any]:
        """Returns the network's outputs in the output type, and its new state.

        Args:
          state: the learner's state; only the parameters and the network's state are
            used.
          key: the random key for the network.
          *args: the network's arguments, which are cast to the compute type but for
            those of `uncast`.
          **kwargs: the network's keyword arguments, likewise.
        """
        args, kwargs = self._cast(self._policy.cast_to_compute, args, kwargs)
        call = self._network.apply
        shards = run_context.shards_of(trees.leaves_by_path(state.params))
        held = {path: shard.array for path, shard in shards.items()}
        params = trees.replace(self._policy.cast_to_compute(state.params), held)
        if held:
            ready = {
                path: x.gathered for path, x in shards.items() if x.gathered is not None
            }
            gatherer = self._gatherer(state)
            call = gatherer.apply(
                self._function, self._policy.compute_dtype, gathered=ready
            )
        with validation.network_errors(self._function):
            outputs, new_state = call(params, state.net_state, key, *args, **kwargs)
        outputs = validation.outputs(self._function, outputs)
        validation.network_state(self._function, state.net_state, new_state)
        same_type = lambda new, old: new.astype(old.dtype)
        new_state = jax.tree.map(same_type, new_state, state.net_state)
        return self._policy.cast_to_output(outputs), new_state

    def _cast(
        self, cast: Callable[[Any], Any], args: Any, kwargs: Mapping[str, Any]
    ) -> tuple[Any, Any]:
        """Returns a network's arguments after a cast, but those of `uncast` as they
        are.
        """
        if not self._uncast:
            return cast((args, kwargs))

        def choose(path: Any, given: Any) -> Any:
            # Without the number of the two, of which `args` is the first.
            if re.search(self._uncast, trees.path_name(path[1:])):
                return given
            return cast(given)

        return jax.tree_util.tree_map_with_path(choose, (args, dict(kwargs)))

    def _gatherer(self, state: state_lib.LearnerState) -> gathering.Gatherer:
        return gathering.Gatherer(
            run_context.current().mesh, state.rules.sharding, state.rules.reduce_dtype
        )

    def update(
        self, state: state_lib.LearnerState, loss: Loss, batch: Any, key: jax.Array
    ) -> tuple[state_lib.LearnerState, state_lib.Outcome]:
        """Applies one update of the rule, for all replicas of a group together.

        Floating-point state of the network is averaged over the replicas.

        Args:
          state: the state before the update.
          loss: a function of the state, a part of `batch`, and a key; it is
            differentiated with respect to the state's parameters. It returns the mean
            loss, a scalar; the new network state, as `apply` returns it; a dictionary
            of scalars to log; and, if the step needs more of the forward pass, such as
            a recurrent network's state, arrays with a row for each example, which
            become `aux` of the outcome.
          batch: the replica's part of a batch, a tree of arrays. Micro-batches split
            their first dimension.
          key: the replica's own key.

        Returns:
          The state after the update, and an `Outcome` to return among the metrics of
          `Experiment.train_step`. It contains 'loss', 'skipped', 'global_step',
          'loss_scale' if the rule scales losses, 'gradient_norm', 'parameter_norm' and
          the values of the rule's schedules (see `OptaxOptimizer`).
        """
        rules_key = run_context.next_equal_key()
        if rules_key is not None:
            # A step may update a learner several times, in a loop too.
            rules_key = jax.random.fold_in(rules_key, state.global_step)
        with validation.loss_errors(loss), phases.update_key(rules_key):
            update, opt_state = self._rules.apply(
                {}, state.opt_state, key, state, loss, batch
            )
        equal = {
            "params": update.params,
            "opt_state": opt_state,
            "global_step": update.global_step,
        }
        if not replica_map.is_current():
            # The rule reduced the gradients, so these are equal on all replicas if they
            # were before. With one replica no collective shows that in the program, so
            # they are declared equal here.
            before = state.params, state.global_step
            equal = equal_on_replicas(
                varying.marked(varying.UPDATED, equal), given=before
            )
        applied = equal["global_step"] != state.global_step
        # Averaged together, in one collective.
        bad = update.nonfinite
        net_state, metrics, shares, all_bad = mean_over_replicas(
            (
                update.net_state,
                update.metrics,
                update.shares,
                bad if update.shares else None,
            )
        )
        bad = all_bad if update.shares else bad
        observed = state_lib.observe(applied, update.lowered, metrics["loss"], bad > 0)
        select = lambda new, old: jnp.where(applied, new, old)
        net_state = jax.tree.map(select, net_state, state.net_state)
        metrics |= {
            name: _norm(x, shares.get(name)) for name, x in update.squares.items()
        }
        metrics |= update.agreed
        metrics |= {"skipped": jnp.int32(~applied), "global_step": equal["global_step"]}
        state = state.replace(**equal, net_state=net_state)
        return state, state_lib.Outcome(metrics, observed, *update.aux)

    def averages(self, state: state_lib.LearnerState) -> Any:
        """Returns the parameters' averages from a `MovingAverageOptimizer`, as a tree
        with the parameters' structure.

        Args:
          state: the learner's state.
        """
        name = state.rules.averages_module
        if name is None:
            raise errors.UserError(
                f"{validation.describe_method(self._make_rule)} returned a rule that keeps no averages: wrap it in a "
                "MovingAverageOptimizer."
            )
        return moving_average.averages(state.opt_state[name], state.params)

    def value(
        self, state: state_lib.LearnerState, loss: Loss, batch: Any, key: jax.Array
    ) -> jax.Array:
        """Returns only the loss, with the arguments of `update`."""
        return self._call(state, loss, batch, key)[0]

    def _call(
        self, state: state_lib.LearnerState, loss: Loss, batch: Any, key: jax.Array
    ) -> Any:
        # The loss may use Haiku's random keys and read the rules' state.
        called = hk.transform_with_state(lambda: loss(state, batch, key))
        return called.apply({}, state.opt_state, key)[0]

    def _describe(
        self, params: Any, requested: Mapping[str, tuple[int, ...]]
    ) -> state_lib.Rules:
        """Describes the rules, given the parameters and the shapes in which the network
        asks for them.
        """
        opt, run = self._optimizer({}), run_context.current()
        averaging = base.rules_of_type(opt, moving_average.MovingAverageOptimizer)
        module = averaging[0].module_name if averaging else None
        rules = state_lib.Rules(averages_module=module)
        for rule in inspection.reducing(opt):
            if rule.shard_update:
                rules = dataclasses.replace(rules, shards_update=True)
            if rule.shard_params:
                inspection.check_shards_params(opt, run.mesh, clips=self._clips)
                held = gathering.layouts_of(
                    params, requested, run.mesh, run.sharding_rules
                )
                rules = dataclasses.replace(
                    rules, sharding=held, reduce_dtype=rule.reduce_dtype
                )
        return rules

    def _optimizer(self, held: layouts.Layouts) -> base.Optimizer:
        run = run_context.current()
        opt = validation.optimizer(self._make_rule)
        inspection.check_reduces(
            validation.describe_method(self._make_rule), opt, run.mesh
        )
        for rule in inspection.reducing(opt):
            rule.bind_mesh(run.mesh, run.sharding_rules, held)
        if self._skips_nonfinite:
            inspection.check_skips(opt)
            opt = inspection.SkipNonfinite(opt)
        return opt

    def _init_rules(self, params: Any, rules: state_lib.Rules) -> None:
        opt = self._optimizer(rules.sharding)
        if run_context.current().all_slots:
            opt.init(params)
        else:
            trained = trees.select(params, trees.unfrozen(params, self._frozen))
            zeros = trees.rebuild(params, jax.tree.map(jnp.zeros_like, trained))
            opt.apply_gradients(self._clip(zeros), params)

    def _update(self, state: state_lib.LearnerState, loss: Loss, batch: Any) -> _Update:
        opt = self._optimizer(state.rules.sharding)
        value, net_state, metrics, aux, grads = self._differentiate(
            opt, state, loss, batch
        )
        scales = inspection.loss_scales(opt)
        scheduled = inspection.schedules(opt, state.global_step)
        done = inspection.apply(opt, self._clip(grads), state.params, state.global_step)
        shares, squares = inspection.norms(done)
        scheduled |= inspection.hyperparameters(opt, state.params)
        new_scales = inspection.loss_scales(opt)
        where = f"The rule of {validation.describe_method(self._make_rule)}"
        # If the loss logs a metric under the name of a schedule, the loss's value is
        # kept.
        names = sorted(scheduled.keys() - metrics.keys())
        agreed = {
            name: validation.scalar(where, name, scheduled[name]) for name in names
        }
        if new_scales:
            agreed["loss_scale"] = new_scales[0]
        lowered = jnp.asarray(False)
        for old, new in zip(scales, new_scales, strict=True):
            lowered |= new < old
        return _Update(
            done.params,
            net_state,
            done.global_step,
            {**metrics, "loss": value},
            aux,
            shares,
            squares,
            agreed,
            inspection.count_nonfinite(done),
            lowered,
        )

    def _differentiate(
        self, opt: base.Optimizer, state: state_lib.LearnerState, loss: Loss, batch: Any
    ) -> tuple[jax.Array, Any, dict[str, Any], tuple[Any, ...], Any]:
        """Returns the loss, the network's state, the scalars, the loss's further
        output, and the gradients.
        """
        parts = self._micro_batches
        keys = jnp.stack([hk.next_rng_key() for _ in range(parts)])

        ready = {}
        if self._gathers_once and parts > 1:
            ready = self._gatherer(state).gather_global(
                state.params, self._policy.compute_dtype
            )

        def value_of(params: Any, inputs: Any) -> tuple[jax.Array, Any]:
            # The loss gets whole arrays. Where it applies the network to them, their
            # shards are gathered as it asks.
            gatherer = self._gatherer(state)
            held = gatherer.select_shards(params)
            whole = gatherer.gather(held)
            with run_context.with_shards(whole, held, ready):
                returned = loss(
                    state.replace(params=trees.replace(params, whole)), *inputs
                )
            value, *rest = validation.learner_loss(loss, returned, state.net_state)
            # The losses of micro-batches are added up, so each counts as its part of
            # the mean.
            return value / parts, rest

        if parts == 1:
            of_params: Any = lambda params: value_of(params, (batch, keys[0]))
        else:
            split = jax.tree.map(lambda x: x.reshape(parts, -1, *x.shape[1:]), batch)
            of_params = gradients.MicroBatches(value_of, (split, keys))
        (value, (net_state, metrics, aux)), grads = opt.compute_gradients(
            of_params,
            state.params,
            var_list=trees.unfrozen(state.params, self._frozen),
            gate_gradients=base.Optimizer.GATE_NONE,
            aggregation_method=self._method,
            has_aux=True,
        )
        if parts > 1:
            net_state, metrics = jax.tree.map(_mean_over_parts, (net_state, metrics))
            aux = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), aux)
        return value, net_state, metrics, aux, grads


def mean_over_replicas(tree: Any) -> Any:
    """Averages a tree's floating-point arrays over the replicas of a group; other
    arrays stay as they are.
    """

    def mean(x: jax.Array) -> jax.Array:
        return (
            lax.pmean(x, mesh_lib.REPLICAS)
            if jnp.issubdtype(x.dtype, jnp.inexact)
            else x
        )

    return jax.tree.map(mean, tree)


def _norm(square: jax.Array, share: jax.Array | None) -> jax.Array:
    return jnp.sqrt(square if share is None else square + share).astype(jnp.float32)


def _mean_over_parts(x: jax.Array) -> jax.Array:
    """The mean over micro-batches of a floating-point array; the last value of any
    other, such as a count.
    """
    return jnp.mean(x, axis=0) if jnp.issubdtype(x.dtype, jnp.inexact) else x[-1]
