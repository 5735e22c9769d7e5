"""The outer rule: slices train apart, and exchange their parameters now and then.

Each slice trains by an inner rule of its own for some steps. Then the slices reduce the
difference between their parameters and those of the last exchange, and an outer rule
moves all of them by its mean. So a slow network between slices is used once in many
steps.

Sources: Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language
Models", 2023, https://arxiv.org/abs/2311.08105; for fragments and delays, Douillard et
al., "Streaming DiLoCo with overlapping communication", 2025,
https://arxiv.org/abs/2501.18512; for int8, where each device keeps its rounding error
and adds it to its next summand, so that errors do not add up, Seide et al., "1-Bit
Stochastic Gradient Descent", Interspeech 2014 (error feedback), and Dettmers, "8-Bit
Approximations for Parallelism in Deep Learning", 2016, https://arxiv.org/abs/1511.04561.
"""

import math
from collections.abc import Mapping
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import optax
from jax import lax

from xshard import errors
from xshard.base import arguments, mesh_axes
from xshard.optimizers import (
    axes,
    base,
    cross_shard,
    replica_calls,
    shards,
    skips,
    slots,
    trees,
)
from xshard.optimizers import optax as optax_optimizer

# The slots of a parameter: its value at the last exchange, and the error of rounding
# what its slice sent.
EXCHANGED = "exchanged"
RESIDUAL = "residual"

# The number of elements that share a scale. Each scale adds 4 bytes to a block.
BLOCK = 256

_STEPS = "steps"
_INT8 = "int8"
_DTYPES = ("float32", "bfloat16", _INT8)
# With a delay: the fraction of its own parameters that a slice keeps, as in Streaming
# DiLoCo.
_KEPT = 0.5


class OuterOptimizer(base.OptimizerWrapper):
    """Lets slices train by `opt` on their own, and moves all of them every few steps.

    After each `every_steps` steps, each slice subtracts its parameters from those of
    the last exchange. The mean of these differences over `axis_name` is the gradient of
    the rule `outer`, which moves the parameters of the last exchange. All slices go on
    from there. Slots, loss scales and the state of networks stay a slice's own.

    A skipped step counts as a step, so the exchange is after the same step on all
    slices, whichever of them skip. It nests with `CrossShardOptimizer`, which reduces
    in each step over the replicas of a slice, and with
    `MixedPrecisionLossScaleOptimizer`, in any order.

    Parameters and state differ along `axis_name`, so do not return them from
    `jax.shard_map` as equal on it: give them a leading dimension, as for groups. A run
    does that if `config.outer.every_steps` is set; it needs no rule of the
    experiment's.

    State: `exchanged/<path>` for each trained parameter, its value at the last
    exchange, in float32 or wider, equal on all slices; `steps`, an int32 scalar; the
    state of `outer`; with 'int8', `residual/<path>` in float32, the slice's own errors
    of rounding.

    >>> def step(params, x):
    ...     inner = xshard.OptaxOptimizer(optax.sgd(0.5), name='inner')
    ...     opt = OuterOptimizer(inner, optax.sgd(1.0), every_steps=2)
    ...     loss = lambda p: jnp.sum((p['linear']['w'] - x) ** 2) / 2
    ...     return opt.minimize(loss, params)[1]
    >>> step = hk.transform_with_state(step)
    >>> params = {'linear': {'w': jnp.zeros(())}}
    >>> _, state = step.init(None, params, 0.0)
    >>> stack = lambda tree: jax.tree.map(lambda x: jnp.stack([x] * 2), tree)
    >>> apply = lambda params, state, x: step.apply({}, state, None, params, x)
    >>> apply = jax.vmap(apply, axis_name='slice')
    >>> params, state = stack((params, state))
    >>> for _ in range(2):
    ...     params, state = apply(params, state, jnp.array([1.0, 3.0]))
    ...     print(params['linear']['w'])
    [0.5 1.5]
    [1.5 1.5]
    """

    def __init__(
        self,
        opt: Any,
        outer: Any = None,
        *,
        every_steps: int,
        axis_name: str = "slice",
        dtype: str = "float32",
        fragments: int = 1,
        delay_steps: int = 0,
        name: str = "OuterOptimizer",
    ):
        """Wraps an optimizer.

        Args:
          opt: the inner rule: an `Optimizer` or an optax transformation.
          outer: the outer rule, an optax transformation; by default stochastic gradient
            descent with Nesterov's momentum of 0.9 at a learning rate of 0.7, as in
            DiLoCo.
          every_steps: the number of steps between exchanges, at least 1.
          axis_name: the mapped axis of the slices.
          dtype: the type in which differences are sent: 'float32' (or wider, if a
            parameter is), 'bfloat16', or 'int8', of which each slice adds the error of
            rounding to what it sends next.
          fragments: the number of parts of the parameters, which are exchanged in turn,
            each every `every_steps` steps, to send less at a time. An array is never
            divided.
          delay_steps: for how many steps slices train on before they take over the
            result of an exchange, less than `every_steps`. The parameters after a step
            are then sent during the next one, and a slice takes the mean of the result
            and its own.
          name: the module's name.

        Raises:
          ValueError: for an invalid argument, or an `opt` that already reduces over
            this axis.
        """
        super().__init__(name=name)
        self.opt = optax_optimizer.as_optimizer(opt)
        self.every_steps = arguments.count("every_steps", every_steps)
        is_axis = isinstance(axis_name, str)
        arguments.check("axis_name", axis_name, is_axis, "the name of one axis")
        self._own_axis_name: str = axis_name
        self.dtype = arguments.one_of("dtype", dtype, _DTYPES)
        self.fragments = arguments.count("fragments", fragments)
        arguments.check(
            "delay_steps",
            delay_steps,
            arguments.is_integer(delay_steps) and 0 <= delay_steps < self.every_steps,
            f"an integer of at least 0 and below every_steps={self.every_steps}",
        )
        self.delay_steps = int(delay_steps)
        if self.fragments > self.every_steps:
            raise errors.UserError(
                f"fragments={fragments} must be at most every_steps={every_steps}: at "
                "most one fragment is exchanged after a step."
            )
        if outer is None:
            outer = optax.sgd(0.7, momentum=0.9, nesterov=True)
        if isinstance(outer, base.Optimizer):
            raise errors.UserError(
                "outer must be an optax transformation, such as optax.sgd(0.7); "
                f"received the rule {outer.name}."
            )
        # Each fragment is a tree of its own, with counts of its own.
        self.outers = []
        for index in range(self.fragments):
            suffix = f"_{index}" if self.fragments > 1 else ""
            self.outers.append(
                optax_optimizer.OptaxOptimizer(outer, name=f"outer{suffix}")
            )
        self._check_inner()

    @property
    def axis_name(self) -> str:
        """The mapped axis of the slices; those of a run are its groups."""
        return self._own_axis_name if self._placement is None else mesh_axes.GROUP

    def _is_logical(self) -> bool:
        """Returns whether the replicas of a slice are logical ones.

        They share devices, each of which sends all parameters.
        """
        return self._placement is not None and self._placement.is_logical

    def _check_inner(self) -> None:
        inner = base.rules_of_type(self.opt, OuterOptimizer)
        if inner:
            raise ValueError(
                f"opt already has an outer rule ({inner[0].name}): their steps would "
                "be counted twice. Use one OuterOptimizer."
            )
        for rule in base.rules_of_type(self.opt, cross_shard.CrossShardOptimizer):
            if self.axis_name in (rule.axis_name, rule.slice_axis_name):
                raise ValueError(
                    f"opt already reduces over the axis {self.axis_name!r} in each "
                    f"step ({rule.name}), and with group_assignment within groups of "
                    "it: there is nothing left for an outer rule to do. Give "
                    "OuterOptimizer the axis of slices, and CrossShardOptimizer only "
                    "that of the replicas of a slice."
                )

    def update(self, grads: trees.Gradients, params: trees.Params) -> trees.Params:
        """Implements `Optimizer.update`; creates the state of exchanges."""
        if hk.running_init():
            self._create_state(grads, params)
        return self.opt.update(grads, params)

    def _create_state(self, grads: trees.Gradients, params: trees.Params) -> None:
        hk.get_state(_STEPS, [], jnp.int32, jnp.zeros)
        leaves = trees.leaves_by_path(params)
        trained = {path: leaves[path] for path in trees.present(grads)}
        for path, x in trained.items():
            if self.dtype != "float32" and jnp.iscomplexobj(x):
                raise errors.UserError(
                    f"The parameter '{path}' is complex, which dtype={self.dtype!r} "
                    "cannot represent: leave dtype 'float32', with which it is sent "
                    "in its own type."
                )
            slots.create(f"{EXCHANGED}/{path}", trees.widen(x))
            if self.dtype == _INT8:
                zeros = jnp.zeros(x.shape, jnp.float32)
                slots.create(f"{RESIDUAL}/{path}", zeros)
        for outer, paths in zip(self.outers, self._divide(trained), strict=True):
            part = {path: trained[path] for path in paths}
            outer.update(trees.rebuild(params, part), params)

    def exchange(
        self, before: trees.Params, after: trees.Params, applied: Any
    ) -> trees.Params:
        """Implements `Optimizer.exchange`."""
        after = self.opt.exchange(before, after, applied)
        if hk.running_init():
            return after
        axes.check_own(slots.state_of(self), self.axis_name, type(self).__name__)
        step = hk.get_state(_STEPS) + 1
        hk.set_state(_STEPS, step)
        params = trees.leaves_by_path(after)
        sent = params
        sent_after = step
        if self.delay_steps:
            # The parameters from before this step are sent, so that this does not wait
            # for the step's gradients.
            sent = trees.leaves_by_path(before)
            sent_after = step - 1
        for index, paths in enumerate(self._divide(self._slots_named(EXCHANGED))):
            offset = _offset(index, self.every_steps, self.fragments)
            is_sent = self._is_due(sent_after, offset)
            self._send(index, is_sent, {path: sent[path] for path in paths}, after)
            is_taken = self._is_due(step - self.delay_steps, offset)
            own = {path: params[path] for path in paths}
            params |= hk.cond(is_taken, self._take, lambda own: own, own)
        return trees.rebuild(after, params)

    def _is_due(self, step: jax.Array, offset: int) -> jax.Array:
        """Returns whether a fragment is exchanged after a step: each in turn."""
        return (step > 0) & ((step - offset) % self.every_steps == 0)

    def _divide(self, arrays: Mapping[str, Any]) -> list[list[str]]:
        """Returns the paths of each fragment, about equally large.

        Args:
          arrays: the arrays of all trained parameters, by path.
        """
        if len(arrays) < self.fragments:
            raise errors.UserError(
                f"fragments={self.fragments} must be at most the number of trained "
                f"arrays, which are never divided: {len(arrays)}."
            )
        fragments: list[list[str]] = [[] for _ in range(self.fragments)]
        sizes = [0] * self.fragments
        by_size = sorted(arrays, key=lambda path: (-arrays[path].size, path))
        for path in by_size:
            smallest = sizes.index(min(sizes))
            if not arrays[path].size and [] in fragments:
                # An array without elements does not enlarge the one that it is in, and
                # the next would be there, too.
                smallest = fragments.index([])
            fragments[smallest].append(path)
            sizes[smallest] += arrays[path].size
        return fragments

    def _take(self, own: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """Returns a slice's parameters after it takes the result of an exchange."""
        taken = {}
        for path, param in own.items():
            exchanged = hk.get_state(f"{EXCHANGED}/{path}")
            if self.delay_steps:
                # Two halves of equal numbers add up to these.
                own_param = param.astype(exchanged.dtype)
                exchanged = _KEPT * own_param + (1 - _KEPT) * exchanged
            taken[path] = exchanged.astype(param.dtype)
        return taken

    def _send(
        self,
        index: int,
        is_due: jax.Array,
        params: dict[str, jax.Array],
        all_params: trees.Params,
    ) -> None:
        """Exchanges a fragment, if it is due, and moves it by the outer rule.

        Args:
          index: the number of the fragment.
          is_due: whether it is due, a boolean scalar that is equal on all slices.
          params: the slice's parameters in the fragment, by path.
          all_params: all parameters, in dicts.
        """

        def exchange(params: dict[str, jax.Array]) -> None:
            self._move(index, self._mean(params), all_params)

        if replica_calls.is_current() and self.axis_name != mesh_axes.GROUP:
            raise errors.UserError(
                f"{self.name} exchanges over the axis {self.axis_name!r}, which "
                "xshard.vmap_replicas maps: there, replicas may differ only along an "
                f"axis called {mesh_axes.GROUP!r}. Give the axis of slices this name."
            )
        if not replica_calls.is_current():
            # All slices take the same branch, since they count the same steps.
            hk.cond(is_due, exchange, lambda params: None, params)
            return
        # Here `jax.vmap` maps the slices, which makes of a branch a selection. So only
        # what each replica calls by itself is in a branch, which has the collectives.
        mean = self._mean(params, is_due)
        state_before = skips.current_state()
        self._move(index, mean, all_params)
        writes = skips.writes_since(state_before)
        skips.restore_unless_applied(is_due, writes)

    def _move(
        self, index: int, mean: dict[str, jax.Array], all_params: trees.Params
    ) -> None:
        """Moves the parameters of a fragment's last exchange by the outer rule.

        Args:
          index: the number of the fragment.
          mean: the mean difference of each of its parameters, by path.
          all_params: all parameters, in dicts.
        """
        old = {path: hk.get_state(f"{EXCHANGED}/{path}") for path in mean}
        new = self.outers[index].update(
            trees.rebuild(all_params, mean), trees.replace(all_params, old)
        )
        leaves = trees.leaves_by_path(new)
        for path in mean:
            hk.set_state(f"{EXCHANGED}/{path}", leaves[path])

    def _mean(
        self, params: dict[str, jax.Array], is_due: jax.Array | None = None
    ) -> dict[str, jax.Array]:
        """Returns the slices' mean difference to the last exchange, by path.

        Args:
          params: the slice's parameters.
          is_due: whether to exchange anything; None stands for True.
        """
        differences = {}
        errors_of_rounding = {}
        for path, param in params.items():
            exchanged = hk.get_state(f"{EXCHANGED}/{path}")
            differences[path] = exchanged - param.astype(exchanged.dtype)
            if self.dtype == _INT8:
                errors_of_rounding[path] = hk.get_state(f"{RESIDUAL}/{path}")
        if axes.size(self.axis_name, type(self).__name__) == 1:
            return differences

        partition = shards.current()
        specs = {path: jax.P() for path in params}
        if partition is not None:
            for path in params:
                specs[path] = partition.spec(partition.layouts[path], manual=True)
        specs_of_errors = {path: specs[path] for path in errors_of_rounding}
        # In shards, each replica sends its shard as it is.
        parts_axis = None
        if partition is None:
            parts_axis = self._axis_of_parts(differences)

        def exchange(operands: Any) -> Any:
            results = self._mean_on_replica(*operands, parts_axis=parts_axis)
            if partition is None:
                return results
            # All arrays are sent in one message, so the program does not show that
            # those without shards are equal on all replicas.
            declare = lambda layout, x: (
                replica_calls.equal_on_replicas(x) if layout.dim is None else x
            )
            return tuple(partition.map(declare, arrays) for arrays in results)

        def on_replica(is_due: Any, *operands: Any) -> Any:
            if is_due is None:
                return exchange(operands)
            differences, errors_of_rounding = operands
            zeros = jax.tree.map(jnp.zeros_like, differences)
            keep = lambda operands: (zeros, errors_of_rounding)
            return lax.cond(is_due, exchange, keep, operands)

        mean, errors_of_rounding = replica_calls.on_each_replica(
            on_replica,
            in_specs=(jax.P(), specs, specs_of_errors),
            out_specs=(specs, specs_of_errors),
        )(is_due, differences, errors_of_rounding)
        for path, x in errors_of_rounding.items():
            hk.set_state(f"{RESIDUAL}/{path}", x)
        return mean

    def _axis_of_parts(self, arrays: Mapping[str, jax.Array]) -> str | None:
        """Returns the axis of a slice's replicas, each of which sends a part of arrays.

        None if each of them sends all.
        """
        if self._is_logical() or any(x.dtype != jnp.float32 for x in arrays.values()):
            return None
        for rule in base.rules_of_type(self.opt, cross_shard.CrossShardOptimizer):
            # Only replicas of one group have equal parameters. JAX's check of varying
            # values cannot infer that what they gather is equal.
            if rule.group_assignment is None and axes.size(rule.axis_name) > 1:
                return None if axes.is_tracked(rule.axis_name) else rule.axis_name
        return None

    def _mean_on_replica(
        self,
        differences: dict[str, jax.Array],
        errors_of_rounding: dict[str, jax.Array],
        *,
        parts_axis: str | None,
    ) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
        """Reduces differences over the slices, on one replica.

        Args:
          differences: the differences, by path.
          errors_of_rounding: the errors of what the slice sent last, by path.
          parts_axis: the axis of the replicas that each send a part; None if this
            replica sends all.

        Returns:
          The means, and the new errors of rounding.
        """
        count = axes.size(self.axis_name)
        is_narrow = all(x.dtype == jnp.float32 for x in differences.values())
        if self.dtype == "float32" and not is_narrow:
            totals = {path: self._sum(x) for path, x in differences.items()}
        else:
            # One vector, since many small messages would cost more.
            vector = _join(differences)
            if errors_of_rounding:
                vector += _join(errors_of_rounding)
            total, sent = self._sum_vector(vector, parts_axis)
            totals = _split(total, differences)
            if errors_of_rounding:
                errors_of_rounding = _split(_finite(vector - sent), errors_of_rounding)
        means = {path: x / jnp.asarray(count, x.dtype) for path, x in totals.items()}
        # JAX may track that sums do not vary along the axis, as state does.
        return axes.mark_varying((means, errors_of_rounding), self.axis_name)

    def _sum_vector(
        self, vector: jax.Array, parts_axis: str | None
    ) -> tuple[jax.Array, jax.Array]:
        """Sums a float32 vector over the slices.

        Args:
          vector: the slice's summand.
          parts_axis: as for `_mean_on_replica`.

        Returns:
          The sum, and the summand as it was sent.
        """
        size = vector.size
        if not size:
            return vector, vector
        count = 1
        if parts_axis is not None:
            count = axes.size(parts_axis)
        blocks = count * BLOCK
        vector = jnp.pad(vector, (0, -size % blocks))
        message: tuple[jax.Array, ...] = (vector,)
        sent = vector
        if self.dtype == _INT8:
            message = quantize(vector)
            sent = dequantize(*message, vector.shape)
        elif self.dtype == "bfloat16":
            rounded = vector.astype(jnp.bfloat16)
            # As integers, since XLA for CPUs would send float32.
            message = (lax.bitcast_convert_type(rounded, jnp.uint16),)
            sent = rounded.astype(jnp.float32)

        if parts_axis is not None:
            number = lax.axis_index(parts_axis)
            part = lambda x: x.reshape(count, -1, *x.shape[1:])[number]
            message = jax.tree.map(part, message)
        if self.dtype == "float32":
            (total,) = map(self._sum, message)
        else:
            # Every slice adds the same numbers in the same order.
            received = lax.all_gather(message, self.axis_name)
            if self.dtype == _INT8:
                codes, scales = received
                summands = _values(codes, scales)
            else:
                (codes,) = received
                summands = lax.bitcast_convert_type(codes, jnp.bfloat16)
            summands = summands.astype(jnp.float32)
            total = jnp.ravel(jnp.sum(summands, axis=0))
        if parts_axis is not None:
            total = lax.all_gather(total, parts_axis, tiled=True)
        return total[:size], sent[:size]

    def _sum(self, x: jax.Array) -> jax.Array:
        """Returns the sum over the slices."""
        if not x.size:
            return x
        if self._is_logical():
            # In one order, on any devices.
            return jnp.sum(lax.all_gather(x, self.axis_name), axis=0)
        return lax.psum(x, self.axis_name)

    def _slots_named(self, name: str) -> dict[str, jax.Array]:
        """Returns the state arrays of a slot, by the paths of their parameters."""
        prefix = f"{name}/"
        arrays = {}
        for key, x in slots.state_of(self).items():
            if key.startswith(prefix):
                arrays[key.removeprefix(prefix)] = x
        return arrays

    def evaluation_params(self, params: trees.Params) -> trees.Params:
        """Implements `Optimizer.evaluation_params`: those of the last exchange."""
        return exchanged(slots.state_of(self), params)

    def slots_from_params(self, params: trees.Params) -> list[str]:
        """Implements `Optimizer.slots_from_params`."""
        del params
        return [EXCHANGED]

    def get_slot(self, var: str, name: str) -> Any:
        """Implements `Optimizer.get_slot`, with the slots of exchanges.

        These are 'exchanged' and, with the `dtype` 'int8', 'residual'.
        """
        if name in (EXCHANGED, RESIDUAL):
            return self._slots_named(name).get(var)
        return self.opt.get_slot(var, name)

    def get_slot_names(self) -> list[str]:
        """Implements `Optimizer.get_slot_names`."""
        names = set(self.opt.get_slot_names())
        names |= {name for name in (EXCHANGED, RESIDUAL) if self._slots_named(name)}
        return sorted(names)

    def state_by_name(self) -> dict[str, Any]:
        """Implements `Optimizer.state_by_name`, and includes the outer rule's state."""
        arrays = super().state_by_name()
        for outer in self.outers:
            arrays |= outer.state_by_name()
        return arrays


def exchanged(state: Mapping[str, Any], params: trees.Params) -> trees.Params:
    """Returns the parameters of the last exchange, in the types of the parameters.

    Args:
      state: the state of an `OuterOptimizer`: the entry of the Haiku state under its
        `module_name`.
      params: the parameters. One that is not trained is returned itself.
    """

    def of_leaf(path: tuple[Any, ...], param: Any) -> Any:
        name = f"{EXCHANGED}/{trees.path_name(path)}"
        if name in state:
            return state[name].astype(param.dtype)
        return param

    return jax.tree_util.tree_map_with_path(of_leaf, params)


def last_sent(
    step: int, *, every_steps: int, fragments: int = 1, delay_steps: int = 0
) -> list[int]:
    """Returns the steps whose parameters slices last sent of each fragment.

    Args:
      step: the number of steps that they have made.
      every_steps: as of `OuterOptimizer`.
      fragments: as of `OuterOptimizer`.
      delay_steps: as of `OuterOptimizer`.

    Returns:
      For each fragment a step; 0 if it was never sent.

    >>> last_sent(25, every_steps=10)
    [20]
    >>> last_sent(20, every_steps=10, fragments=2, delay_steps=1)
    [10, 15]
    """
    # With a delay, the parameters after a step are sent during the next one.
    newest = step - 1 if delay_steps else step
    steps = []
    for index in range(fragments):
        offset = _offset(index, every_steps, fragments)
        steps.append(max(newest - (newest - offset) % every_steps, 0))
    return steps


def _offset(index: int, every_steps: int, fragments: int) -> int:
    """Returns the first step after which a fragment is sent: each has its turn."""
    return index * every_steps // fragments


def _join(arrays: Mapping[str, jax.Array]) -> jax.Array:
    """Returns one float32 vector of arrays, each of them padded to whole blocks.

    Arrays that share a block would share its scale. A replica may hold one of them
    whole, as others do, and its shard of another.
    """
    parts = []
    for x in arrays.values():
        padding = -x.size % BLOCK
        parts.append(jnp.pad(jnp.ravel(x).astype(jnp.float32), (0, padding)))
    return jnp.concatenate(parts)


def _split(vector: jax.Array, like: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Inverts `_join`, given arrays of the same shapes and types."""
    arrays = {}
    begin = 0
    for path, x in like.items():
        part = vector[begin : begin + x.size]
        arrays[path] = part.reshape(x.shape).astype(x.dtype)
        begin += x.size + -x.size % BLOCK
    return arrays


def _finite(x: jax.Array) -> jax.Array:
    """Returns the array, with 0 for what is not finite and would spoil later sums."""
    return jnp.where(jnp.isfinite(x), x, jnp.zeros_like(x))


def quantize(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Rounds a float32 array to integers, in blocks that have a scale each.

    Args:
      x: the array, of any shape.

    Returns:
      The codes, int8 of shape (blocks, BLOCK), the last of them padded; and the scales,
      float32 of shape (blocks, 1).
    """
    padding = -x.size % BLOCK
    blocks = jnp.pad(jnp.ravel(x), (0, padding)).reshape(-1, BLOCK)
    # NaN counts as infinity, since XLA's maximum of a large array may lose NaN on the
    # CPU.
    magnitudes = jnp.where(jnp.isnan(blocks), jnp.inf, jnp.abs(blocks))
    scales = jnp.max(magnitudes, axis=1, keepdims=True) / 127
    # A block of zeros has the scale 0. Any other divisor gives its codes of 0.
    divisors = jnp.where(scales == 0, jnp.ones_like(scales), scales)
    codes = jnp.round(blocks / divisors)
    # A block with a non-finite element has a non-finite scale, which makes the whole
    # block non-finite for any codes.
    codes = jnp.where(jnp.isfinite(codes), codes, jnp.ones_like(codes))
    return codes.astype(jnp.int8), scales


def _values(codes: jax.Array, scales: jax.Array) -> jax.Array:
    """Returns what codes stand for, float32 of shape (..., blocks, BLOCK).

    Args:
      codes: the codes of `quantize`, with any leading dimensions.
      scales: its scales.
    """
    return codes.astype(jnp.float32) * scales


def dequantize(
    codes: jax.Array, scales: jax.Array, shape: tuple[int, ...]
) -> jax.Array:
    """Restores a quantized array, up to rounding.

    Args:
      codes: the codes of `quantize`.
      scales: its scales.
      shape: the array's shape.
    """
    elements = jnp.ravel(_values(codes, scales))
    # Without the padding of the last block.
    elements = elements[: math.prod(shape)]
    return elements.reshape(shape)
