"""A network with its update rule, which an experiment trains.

A learner applies a run's config to each call: precision, micro-batches, the reduction
of gradients over the replicas, the vote on a step, the loss scale, the sharded update,
averages of the parameters, and norms.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import haiku as hk
import jax
import jax.numpy as jnp
import jmp
import ml_collections
import optax

from xshard import errors
from xshard.base import torus
from xshard.learners import (
    fp8,
    means,
    measures,
    networks,
    noise_scale,
    norms,
    norms_by_array,
    run_context,
    statistics,
    validation,
)
from xshard.learners import state as state_lib
from xshard.optimizers import (
    base,
    gathering,
    gradients,
    inspection,
    layouts,
    moving_average,
    outer,
    phases,
    replica_calls,
    trees,
    varying,
)
from xshard.optimizers import optax as optax_optimizer

# A function of a learner's state, a batch and a key: see `Learner.update`.
Loss = Callable[[Any, Any, jax.Array], tuple[Any, ...]]

Transformation: TypeAlias = optax.GradientTransformation | optax.MultiSteps
# A rule composed by hand, or the transformation that a run composes one of.
Rule: TypeAlias = base.Optimizer | Transformation

# What is measured of each update beside its loss, in this order. A line is all that a
# measure has outside its own file.
MEASURES: tuple[type[measures.Measure], ...] = (
    norms.Norms,
    norms_by_array.NormsByArray,
    noise_scale.NoiseScale,
    statistics.Statistics,
)


class _Update(NamedTuple):
    """The result of an update on a replica.

    Attributes:
      returned: what the loss returned.
      applied: what the rule made of the gradients.
      nonfinite: the number of non-finite gradient elements for each parameter, equal
        on all replicas of a group.
      equal_metrics: the rule's metrics, equal on all replicas of a group.
      lowered: whether the update lowered a loss scale.
      measured: what each measure has of it.
    """

    returned: validation.Returned
    applied: phases.Applied
    nonfinite: Any
    equal_metrics: dict[str, Any]
    lowered: Any
    measured: list[measures.Measured]


class Learner:
    """A network with its update rule, as functions of a `LearnerState`.

    Call them in an `Experiment`'s methods.
    """

    def __init__(
        self,
        network: Callable[..., Any] | tuple[Callable[..., Any], Callable[..., Any]],
        optimizer: Transformation | Callable[[], Rule],
        config: ml_collections.ConfigDict,
        *,
        clip_gradients: Callable[[Any], Any] | None = None,
        frozen: str = "",
        uncast: str = "",
        lora: state_lib.Adaptation | None = None,
    ):
        """Stores the network, the rule and the options of training.

        Args:
          network: a Haiku function of any arguments; or a pair of pure functions,
            `init(key, *args) -> (params, state)` and `apply(params, state, key, *args)
            -> (outputs, new_state)`, where the key of `apply` may be None. Both may
            take keyword arguments. The two trees may consist of any containers; their
            leaves are arrays, those of `params` of floating-point type. A learner's
            state holds them as Haiku trees {module: {name: array}}, in which the keys
            of a leaf's path but the last, joined by slashes, are the module.
          optimizer: an optax transformation, or a function that returns one. It is
            reduced and scaled as the config's `reduction` and `loss_scale` say. Or a
            function that returns an update rule composed by hand, which must contain a
            `CrossShardOptimizer` over 'replica' (and 'slice', with several slices).
          config: the run's config. The learner reads its keys precision, fp8,
            micro_batches, gather_once, aggregation_method, estimate_statistics,
            on_nonfinite, log_norms_every_steps, noise_scale_steps, outer, reduction and
            loss_scale.
          clip_gradients: transforms a replica's gradients before they are reduced. A
            gradient that it replaces with None leaves its parameter unchanged. `init`
            calls it with zeros.
          frozen: a regular expression, such as '^encoder/'. The parameters with a match
            in their paths stay unchanged, without gradients, slots or averages. Empty
            by default, which freezes none.
          uncast: a regular expression, such as '/time$'. The network's inputs with a
            match in their paths keep their floating-point type; the others are cast to
            the compute type, and in `init` to that of the parameters. A path begins
            with the argument's number or name, as in '0/time' for the field 'time' of a
            batch. Empty by default, which casts all.
          lora: a low-rank adaptation of the network, as `xshard.lora` returns it.

        Raises:
          UserError: for a network, an adaptation or an `aggregation_method` that is
            none, and for `gather_once` where nothing is gathered.
        """
        self._lora = lora
        self._network = networks.of(network, lora)
        self._config = config
        make: Any = optimizer
        if optax_optimizer.is_transformation(optimizer):
            make = lambda: optimizer
        self._make_optimizer = make
        self._clips = clip_gradients is not None
        self._clip = clip_gradients or (lambda grads: grads)
        self._frozen = frozen
        self._uncast = uncast
        self._policy = jmp.get_policy(config.precision)
        self._micro_batches = config.micro_batches
        self._gathers_once = config.gather_once
        if config.gather_once and not config.reduction.shard_params:
            raise errors.UserError(
                "gather_once=True has no effect without reduction.shard_params=True: "
                "set both, or neither."
            )
        self._aggregation_method = gradients.method(config.aggregation_method)
        self._estimates = statistics.estimates(config)
        # Configs made before these keys existed lack them.
        self._fp8 = config.get("fp8", {})
        known = [kind(config) for kind in MEASURES]
        self._measures = [each for each in known if each.is_on()]
        self._skips_nonfinite = config.on_nonfinite == "skip"
        self._outer = config.get("outer")
        if self._outer is not None and not self._outer.get("every_steps", 0):
            # Slices do not train apart.
            self._outer = None
        self._transformed_update = hk.transform_with_state(self._update)

    def init(self, key: jax.Array, *args: Any, **kwargs: Any) -> state_lib.LearnerState:
        """Creates the initial state, with whole arrays.

        Args:
          key: the random key for parameters and state.
          *args: the network's arguments; only their types and shapes matter.
          **kwargs: the network's keyword arguments, likewise.
        """
        with validation.network_errors(self._network.function):
            args, kwargs = self._cast(self._policy.cast_to_param, args, kwargs)
            params, net_state, requested = self._network.init(key, *args, **kwargs)
        if self._lora is not None:
            params, requested = self._lora.extend(key, params, requested)
        params = self._policy.cast_to_param(params)
        # The rule is made twice: here to learn which parameters it holds in shards, and
        # then, knowing how they lie, to create its state.
        meta = hk.transform(self._describe).apply({}, None, params, requested)
        init_optimizer = hk.transform_with_state(self._init_optimizer).init
        _, opt_state = init_optimizer(key, params, meta)
        state = state_lib.LearnerState(
            params=params,
            net_state=net_state,
            opt_state=opt_state,
            global_step=jnp.int32(0),
            meta=meta,
        )
        if self._fp8.get("dots", False):
            apply = lambda: self.apply(state, key, *args, **kwargs)
            in_float8 = fp8.products(self._fp8, params, apply)
            state = state.with_meta(in_float8=in_float8)
        for each in self._measures:
            state = each.begin(state)
        # Raises an error of the rule's before the run has begun, and computes nothing.
        jax.eval_shape(self.for_evaluation, state)
        return state

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

        Raises:
          UserError: if the network returns no array, or state of other names or shapes
            than before; and for its mistakes in the use of Haiku and JAX.
        """
        args, kwargs = self._cast(self._policy.cast_to_compute, args, kwargs)
        params = self._policy.cast_to_compute(state.params)
        apply: Callable[..., Any] = self._network.apply
        shards = run_context.shards_of(trees.leaves_by_path(state.params))
        if shards:
            # The network gets the shards in place of the whole arrays, and gathers each
            # in the compute type as it asks for it. So shards are not cast.
            arrays = {}
            gathered = {}
            for path, shard in shards.items():
                arrays[path] = shard.array
                if shard.gathered is not None:
                    gathered[path] = shard.gathered
            params = trees.replace(params, arrays)
            apply = self._network.gathering_apply(
                self._gatherer(state.meta), self._policy.compute_dtype, gathered
            )
        if state.meta.in_float8:
            apply = fp8.around(
                apply, params, state.meta.in_float8, self._fp8.gradient_format
            )
        function = self._network.function
        with validation.network_errors(function):
            outputs, new_state = apply(params, state.net_state, key, *args, **kwargs)
        outputs = validation.outputs(function, outputs)
        validation.network_state(function, state.net_state, new_state)
        new_state = jax.tree.map(
            lambda new, old: new.astype(old.dtype), new_state, state.net_state
        )
        return self._policy.cast_to_output(outputs), new_state

    def _cast(
        self, cast: Callable[[Any], Any], args: Any, kwargs: Mapping[str, Any]
    ) -> tuple[Any, Any]:
        """Returns a network's arguments after a cast, but for those of `uncast`."""
        if not self._uncast:
            return cast((args, kwargs))

        def choose(path: Any, given: Any) -> Any:
            # The path begins with the number of the two, of which `args` is the first.
            if re.search(self._uncast, trees.path_name(path[1:])):
                return given
            return cast(given)

        return jax.tree_util.tree_map_with_path(choose, (args, dict(kwargs)))

    def trained_paths(self, params: Any) -> list[str] | None:
        """Returns the paths of the parameters to train, for `var_list`.

        Args:
          params: the parameters, or their shapes.

        Returns:
          The paths; None stands for all parameters.

        Raises:
          UserError: if `frozen` or the adaptation leaves nothing to train, or a pattern
            of either is invalid or matches nothing.
        """
        trained = _unfrozen(params, self._frozen)
        if self._lora is None:
            return trained
        adapted = self._lora.trained(params)
        if trained is None:
            return adapted
        both = [path for path in adapted if path in trained]
        if not both:
            raise errors.UserError(
                f"frozen={self._frozen!r} matches the paths of all that lora trains, "
                f"such as {adapted[:3]}: leave at least one to be trained."
            )
        return both

    def _gatherer(self, meta: state_lib.LearnerMeta) -> gathering.Gatherer:
        mesh = run_context.current().mesh
        return gathering.Gatherer(mesh, meta.param_layouts, meta.reduce_dtype)

    def update(
        self, state: state_lib.LearnerState, loss: Loss, batch: Any, key: jax.Array
    ) -> tuple[state_lib.LearnerState, state_lib.Outcome]:
        """Applies one update of the rule, for all replicas of a group together.

        Floating-point state of the network is averaged over the replicas, but for
        arrays that are equal on all of them.

        Args:
          state: the state before the update.
          loss: a function of the state, a part of `batch`, and a key; it is
            differentiated with respect to the state's parameters. It returns the mean
            loss, a scalar; the new network state, as `apply` returns it; a dictionary
            of scalars to log, which are averaged but for integers that depend on no
            replica's part of the batch and on no key; and, if the step needs more of
            the forward pass, such as a recurrent network's state, arrays with a row for
            each example, which become `aux` of the outcome.
          batch: the replica's part of a batch, a tree of arrays. Micro-batches split
            their first dimension.
          key: the replica's own key. The loss gets keys that derive from it: Haiku's
            next one, as `hk.next_rng_key()` returns it in a function transformed with
            `key`, and one more for each further micro-batch.

        Returns:
          The state after the update, and an `Outcome` to return among the metrics of
          `Experiment.train_step`. It contains 'loss', 'skipped', 'global_step',
          'loss_scale' if the rule scales losses, 'gradient_norm', 'parameter_norm' and
          the values of the rule's schedules (see `OptaxOptimizer`). With
          `config.log_norms_every_steps`, the outcome also has the norms of each array;
          with `config.noise_scale_steps`, the metrics have 'noise_scale'.

        Raises:
          UserError: if the loss returns anything else or creates parameters, or the
            batch's rows do not divide into `micro_batches`.
          ValueError: if the rule does not accept the gradients or the loss.
        """
        update_key = run_context.next_equal_key()
        if update_key is not None:
            # A step may update a learner several times, in a loop too.
            update_key = jax.random.fold_in(update_key, state.global_step)
        with validation.loss_errors(loss):
            update, opt_state = self._transformed_update.apply(
                {}, state.opt_state, key, state, loss, batch, key, update_key
            )
        new = {
            "params": update.applied.params,
            "opt_state": opt_state,
            "global_step": update.applied.global_step,
        }
        if not replica_calls.is_current():
            # The rule reduced the gradients, so these are equal on all replicas if they
            # were before. With one replica no collective shows that in the program, so
            # they are declared equal here.
            new = replica_calls.equal_on_replicas(
                replica_calls.marked(replica_calls.UPDATED, new),
                given=(state.params, state.global_step),
            )
        applied = new["global_step"] != state.global_step
        value, net_state, scalars, aux = update.returned
        scalars = self._with_averaged_integers(scalars, state, loss, batch, key)
        if self._micro_batches > 1:
            net_state, scalars = means.over_parts((net_state, scalars))
        # XLA combines their sums with those of the gradients.
        metrics, local = means.over_replicas(
            ({**scalars, "loss": value}, [of.local for of in update.measured])
        )
        measured_states = [of.net_state for of in update.measured]
        net_state, measured_states = means.of_state(
            (net_state, measured_states),
            like=(update.returned.net_state, measured_states),
        )
        observed = state_lib.observe(
            applied, update.lowered, metrics["loss"], update.nonfinite > 0
        )
        # A skipped update leaves the network's state as it was, too.
        net_state = jax.tree.map(
            lambda new, old: jnp.where(applied, new, old), net_state, state.net_state
        )
        metrics |= update.equal_metrics
        metrics["skipped"] = jnp.int32(~applied)
        metrics["global_step"] = new["global_step"]
        outcome = state_lib.Outcome(metrics, observed, aux[0] if aux else None)
        state = state.replace(**new, net_state=net_state)
        averaged = zip(
            self._measures, update.measured, local, measured_states, strict=True
        )
        for each, of, means_of, state_of in averaged:
            of = of._replace(local=means_of, net_state=state_of)
            state, outcome = each.finish(of, state, outcome)
        return state, outcome

    def for_evaluation(self, state: state_lib.LearnerState) -> state_lib.LearnerState:
        """Returns the state with the parameters to evaluate, and to use once trained.

        If a rule has other parameters than those that train, such as averages, it has
        those: see `Optimizer.evaluation_params`. With averages, the floating-point
        arrays of the network's state are averages, too; with the config's
        `estimate_statistics`, they are those of a network that trains with these
        parameters. Without such a rule it is the same state.

        Args:
          state: the learner's state.

        Raises:
          UserError: if a rule around the one with these parameters does not forward
            `evaluation_params`, or if they differ from those that train in paths,
            shapes or types.
        """
        if state.meta.evaluation_rule is None:
            return state

        transformed = hk.transform_with_state(self._evaluation_params)
        params, _ = transformed.apply({}, state.opt_state, None, state)
        net_state = state.net_state
        if state.meta.statistics_module is not None:
            rule_state = state.opt_state.get(state.meta.statistics_module, {})
            net_state = moving_average.statistics(rule_state, net_state)
        evaluated = state.replace(params=params, net_state=net_state)
        # To take them for those that train would compute others from them.
        return evaluated.as_it_is()

    def _evaluation_params(self, state: state_lib.LearnerState) -> Any:
        """Returns the rule's parameters for evaluation, checked: a Haiku function."""
        opt = self._bound_optimizer(state.meta.param_layouts)
        (rule,) = _rules_with_evaluation_params(opt, state.params)
        called: set[int] = set()

        def note(method: Any, args: Any, kwargs: Any, context: hk.MethodContext) -> Any:
            if context.method_name == "evaluation_params":
                called.add(id(context.module))
            return method(*args, **kwargs)

        with hk.intercept_methods(note):
            params = opt.evaluation_params(state.params)
        where = validation.describe_method(self._make_optimizer)
        if id(rule) not in called:
            raise errors.UserError(
                f"{where} returned a rule whose evaluation_params does not call that "
                f"of {rule.get_name()}, so the parameters that train would be "
                "evaluated in place of those. Derive the rules around "
                f"{rule.get_name()} from OptimizerWrapper, which forwards it to `opt`, "
                "or call it in their evaluation_params(params)."
            )
        where = f"{rule.get_name()}.evaluation_params, of the rule of {where},"
        validation.evaluation_params(where, params, state.params)
        return params

    def _evaluated_net_state(
        self, state: state_lib.LearnerState, loss: Loss, batch: Any, key: jax.Array
    ) -> Any:
        """Returns the network's state after a pass with the evaluated parameters.

        It is the replica's own. Nothing else of the loss is used, so XLA removes it.

        Args:
          state: the state before the update.
          loss: as for `update`.
          batch: the replica's part of the batch.
          key: the replica's own key of the update.
        """
        key = jax.random.fold_in(key, 1)
        parts = self._micro_batches
        if parts > 1:
            # The whole batch may not fit into the memory.
            batch = jax.tree.map(lambda x: x[0], _divided(batch, parts))
        evaluated = self.for_evaluation(state)
        gatherer = self._gatherer(state.meta)
        shards = gatherer.select_shards(evaluated.params)
        whole = gatherer.gather(shards)
        with run_context.with_shards(whole, shards):
            params = trees.replace(evaluated.params, whole)
            returned = _returned(loss, evaluated.replace(params=params), batch, key)
        return validation.learner_loss(loss, returned, state.net_state).net_state

    def _with_averaged_integers(
        self,
        scalars: Mapping[str, jax.Array],
        state: state_lib.LearnerState,
        loss: Loss,
        batch: Any,
        key: jax.Array,
    ) -> dict[str, jax.Array]:
        """Returns the scalars of a loss, with integers to average as float32.

        These are all that may differ between replicas.

        Args:
          scalars: the scalars.
          state: the state before the update.
          loss: as for `update`.
          batch: the replica's part of the batch.
          key: the replica's own key.
        """
        scalars = dict(scalars)
        integers = _integers(scalars)
        # Only a loss with integers is traced again.
        equal = set()
        if integers:
            equal = self.equal_integers(state, loss, batch, key)
        for name in integers:
            if name not in equal:
                scalars[name] = scalars[name].astype(jnp.float32)
            else:
                scalars[name] = replica_calls.equal_on_replicas(scalars[name])
        return scalars

    def equal_integers(
        self, state: state_lib.LearnerState, loss: Loss, batch: Any, key: jax.Array
    ) -> set[str]:
        """Returns the names of the integers beside a loss that depend on no replica's
        part of the batch and on no key, such as a count in the network's state.

        The loss is traced and not computed. The arguments are those of `update`.
        """

        def integers(state: state_lib.LearnerState, own: Any) -> dict[str, jax.Array]:
            returned = _returned(loss, state, *own)
            checked = validation.learner_loss(loss, returned, state.net_state)
            return _integers(checked.scalars)

        differing = varying.may_differ(integers, state, (batch, key))
        return {name for name, differs in differing.items() if not differs}

    def value(
        self, state: state_lib.LearnerState, loss: Loss, batch: Any, key: jax.Array
    ) -> jax.Array:
        """Returns only the loss, with the arguments of `update`."""
        value: jax.Array = _returned(loss, state, batch, key)[0]
        return value

    def _describe(
        self, params: Any, requested: Mapping[str, tuple[int, ...]]
    ) -> state_lib.LearnerMeta:
        """Returns the properties of the rules.

        Args:
          params: the parameters.
          requested: the shapes in which the network asks for them.
        """
        opt = self._bound_optimizer({})
        run = run_context.current()
        evaluated = _rules_with_evaluation_params(opt, params)
        names = [rule.get_name() for rule in evaluated]
        if len(names) > 1:
            where = validation.describe_method(self._make_optimizer)
            raise errors.UserError(
                f"{where} returned rules that each have parameters of their own for "
                f"evaluation: {' and '.join(names)}. Use one of them."
            )
        # The module that keeps the network's state for evaluation.
        statistics_module = None
        for rule in evaluated:
            averages = isinstance(rule, moving_average.MovingAverageOptimizer)
            if averages or self._estimates:
                statistics_module = rule.module_name
        slots = []
        for rule in base.all_rules(opt):
            for name in rule.slots_from_params(params):
                slots.append((rule.module_name, name))
        outer_rules = base.rules_of_type(opt, outer.OuterOptimizer)
        # Gradients pass through these types, of which float16 has a small range.
        policy = self._policy
        dtypes = (policy.param_dtype, policy.compute_dtype, policy.output_dtype)
        uses_half = jnp.float16 in map(jnp.dtype, dtypes)
        meta = state_lib.LearnerMeta(
            shards_update=any(rule.shard_update for rule in inspection.reducing(opt)),
            statistics_module=statistics_module,
            evaluation_rule=names[0] if names else None,
            outer_module=outer_rules[0].module_name if outer_rules else None,
            lora=self._lora,
            slots_from_params=tuple(slots),
            has_unscaled_half=uses_half and not inspection.scales_loss(opt),
        )
        for rule in inspection.reducing(opt):
            if rule.shard_params:
                inspection.check_shards_params(opt, clips=self._clips)
                param_layouts = gathering.layouts_of(
                    params, requested, run.mesh, run.sharding_rules
                )
                meta = dataclasses.replace(
                    meta, param_layouts=param_layouts, reduce_dtype=rule.reduce_dtype
                )
        return meta

    def _bound_optimizer(
        self, param_layouts: layouts.Layouts, update_key: jax.Array | None = None
    ) -> base.Optimizer:
        """Makes the rule, checks it, and tells it how arrays lie on the mesh."""
        run = run_context.current()
        opt = validation.optimizer(self._make_optimizer)
        if not isinstance(opt, base.Optimizer):
            opt = inspection.compose(opt, self._config)
        where = validation.describe_method(self._make_optimizer)
        inspection.check_reduces(where, opt, run.mesh)
        inspection.check_composed(where, opt, self._config)
        if self._skips_nonfinite:
            inspection.check_skips(opt)
            opt = inspection.SkipNonfinite(opt)
        if self._outer is not None:
            opt = inspection.with_outer_rule(where, opt, self._outer)
        for outer_rule in base.rules_of_type(opt, outer.OuterOptimizer):
            if self._outer is None:
                raise errors.UserError(
                    f"{where} returned an outer rule ({outer_rule.name}), but the run "
                    "does not let slices train apart: set config.outer.every_steps="
                    f"{outer_rule.every_steps}."
                )
        scatter_steps, gather_steps = torus.steps(run.mesh)
        placement = layouts.Placement(
            sharding_rules=run.sharding_rules,
            scatter_steps=scatter_steps,
            gather_steps=gather_steps,
            layouts=param_layouts,
            is_logical=not isinstance(run.mesh, jax.sharding.Mesh),
            update_key=update_key,
        )
        for rule in base.all_rules(opt):
            rule.place(placement)
        return opt

    def _init_optimizer(self, params: Any, meta: state_lib.LearnerMeta) -> None:
        """Creates the rule's state, by an update with gradients of zero.

        Frozen parameters have no gradients, and so no slots.
        """
        opt = self._bound_optimizer(meta.param_layouts)
        trained = trees.select(params, self.trained_paths(params))
        zeros = trees.rebuild(params, jax.tree.map(jnp.zeros_like, trained))
        opt.apply_gradients(self._clip(zeros), params)

    def _update(
        self,
        state: state_lib.LearnerState,
        loss: Loss,
        batch: Any,
        key: jax.Array,
        update_key: jax.Array | None,
    ) -> _Update:
        """Differentiates the loss, and applies the gradients: a Haiku function."""
        opt = self._bound_optimizer(state.meta.param_layouts, update_key)
        for each in self._measures:
            each.check(opt)
        returned, grads, part_sq_norms = self._differentiate(opt, state, loss, batch)
        # Schedules are read before the update, which counts it, and hyperparameters
        # after it, which sets them.
        old_scales = inspection.loss_scales(opt)
        scheduled = inspection.schedules(opt, state.global_step)
        clipped = self._clip(grads)
        applied = inspection.apply(opt, clipped, state.params, state.global_step)
        shown = measures.Update(
            state=state,
            opt=opt,
            batch=batch,
            grads=grads,
            clipped=clipped,
            part_sq_norms=part_sq_norms,
            applied=applied,
            evaluated_net_state=lambda: self._evaluated_net_state(
                state, loss, batch, key
            ),
        )
        measured = [each.measure(shown) for each in self._measures]
        scheduled |= inspection.hyperparameters(opt, state.params)
        new_scales = inspection.loss_scales(opt)

        equal_metrics = {}
        where = f"The rule of {validation.describe_method(self._make_optimizer)}"
        # If the loss logs a metric under the name of a schedule, the loss's value is
        # kept.
        for name in sorted(scheduled.keys() - returned.scalars.keys()):
            equal_metrics[name] = validation.scalar(where, name, scheduled[name])
        if new_scales:
            equal_metrics["loss_scale"] = new_scales[0]
        lowered = jnp.asarray(False)
        for old, new in zip(old_scales, new_scales, strict=True):
            lowered |= new < old
        return _Update(
            returned=returned,
            applied=applied,
            nonfinite=inspection.count_nonfinite(applied),
            equal_metrics=equal_metrics,
            lowered=lowered,
            measured=measured,
        )

    def _differentiate(
        self, opt: base.Optimizer, state: state_lib.LearnerState, loss: Loss, batch: Any
    ) -> tuple[validation.Returned, Any, Any]:
        """Returns what the loss returned, the gradients, and the squared norms of the
        gradients of micro-batches, None if no measure reads them.
        """
        parts = self._micro_batches
        reads_parts = None
        for each in self._measures:
            reads = each.reads_parts(state)
            if reads is not None:
                reads_parts = reads if reads_parts is None else reads_parts | reads
        keys = jnp.stack([hk.next_rng_key() for _ in range(parts)])
        gatherer = self._gatherer(state.meta)
        gathered: dict[str, jax.Array] = {}
        if self._gathers_once and parts > 1:
            gathered = gatherer.gather_global(state.params, self._policy.compute_dtype)

        def value_of(params: Any, inputs: Any) -> tuple[jax.Array, validation.Returned]:
            # The loss gets whole arrays. Where it applies the network to them, their
            # shards are gathered as it asks.
            shards = gatherer.select_shards(params)
            whole = gatherer.gather(shards, like=trees.leaves_by_path(state.params))
            with run_context.with_shards(whole, shards, gathered):
                whole_state = state.replace(params=trees.replace(params, whole))
                returned = loss(whole_state, *inputs)
            checked = validation.learner_loss(loss, returned, state.net_state)
            # The losses of micro-batches are added up, so each counts as its part of
            # the mean.
            return trees.widen(checked.loss) / parts, checked._replace(loss=None)

        of_params: Any
        if parts > 1:
            split = _divided(batch, parts)
            of_params = gradients.MicroBatches(value_of, (split, keys), reads_parts)
        else:
            inputs = (batch, keys[0])
            of_params = lambda params: value_of(params, inputs)
        (value, returned), grads = opt.compute_gradients(
            of_params,
            _with_wide_shards(state),
            var_list=self.trained_paths(state.params),
            gate_gradients=base.Optimizer.GATE_NONE,
            aggregation_method=self._aggregation_method,
            has_aux=True,
        )
        part_sq_norms = None
        if parts > 1 and reads_parts is not None:
            returned, part_sq_norms = returned
        aux = returned.aux
        if parts > 1:
            aux = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), aux)
        returned = returned._replace(loss=value, aux=aux)
        return returned, grads, part_sq_norms


def _unfrozen(params: Any, pattern: str) -> list[str] | None:
    """Returns the paths that do not match a regular expression, for `var_list`.

    Args:
      params: a Haiku tree.
      pattern: the expression, searched for anywhere in a path; an empty one stands for
        none.

    Returns:
      The paths; None (all parameters) without an expression.

    Raises:
      UserError: if the expression is invalid, or is found in no path or in all of them.
    """
    if not pattern:
        return None
    leaves = trees.leaves_by_path(params)
    try:
        others = [path for path in leaves if not re.search(pattern, path)]
    except re.error as e:
        raise errors.UserError(
            f"frozen={pattern!r} is not a regular expression: {e}."
        ) from e
    if len(others) == len(leaves):
        raise errors.UserError(
            f"frozen={pattern!r} matches no parameter's path; near it: "
            f"{trees.near(pattern.strip('^$/'), leaves)}."
        )
    if not others:
        raise errors.UserError(
            f"frozen={pattern!r} matches the paths of all parameters, such as "
            f"{sorted(leaves)[:3]}: leave at least one to be trained, or leave out "
            "frozen if the step never updates this learner."
        )
    return others


def _returned(
    loss: Loss, state: state_lib.LearnerState, batch: Any, key: jax.Array
) -> tuple[Any, ...]:
    """Returns what a loss returns outside an update.

    It may use Haiku's random keys and read the rules' state.
    """
    transformed = hk.transform_with_state(lambda: loss(state, batch, key))
    returned, _ = transformed.apply({}, state.opt_state, key)
    return returned


def _integers(scalars: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Returns those of the scalars beside a loss that are integers."""
    is_integer = lambda x: jnp.issubdtype(x.dtype, jnp.integer)
    return {name: x for name, x in scalars.items() if is_integer(x)}


def _divided(batch: Any, parts: int) -> Any:
    """Returns a batch with a leading dimension of its micro-batches."""
    validation.batch_rows(batch, parts, f"micro_batches = {parts} on each replica")
    return jax.tree.map(
        lambda x: x.reshape(parts, x.shape[0] // parts, *x.shape[1:]), batch
    )


def _rules_with_evaluation_params(
    opt: base.Optimizer, params: Any
) -> list[base.Optimizer]:
    """Returns the rules that themselves define parameters for evaluation."""
    return [rule for rule in base.all_rules(opt) if rule.has_evaluation_params(params)]


def _with_wide_shards(state: state_lib.LearnerState) -> Any:
    """Returns a learner's parameters, with those in shards in float32 or wider.

    The gradient of a shard is a sum over the replicas, of the shard's type. A narrower
    one could not represent the sum, of which a rule then takes the mean.
    """
    wide = {}
    for path, x in trees.leaves_by_path(state.params).items():
        layout = state.meta.param_layouts.get(path)
        if layout is not None and layout.shards_param:
            wide[path] = trees.widen(x)
    return trees.replace(state.params, wide)
