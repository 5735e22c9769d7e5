"""Activations that are recomputed, or kept in the host's memory, by the name of a
policy.

The policies are those of `jax.checkpoint_policies`, which decide for each value of a
forward pass whether the backward pass finds it or computes it again.
"""

import re
from collections.abc import Callable, Collection
from typing import Any

import jax

from xshard import config as config_lib
from xshard import errors
from xshard import mesh as mesh_lib
from xshard.base import primitives
from xshard.base.jax_internals import jaxprs
from xshard.learners import run_context

Policy = Callable[..., Any]

# The policies that need no names of values.
_PLAIN = (
    "everything_saveable",
    "nothing_saveable",
    "dots_saveable",
    "checkpoint_dots",
    "dots_with_no_batch_dims_saveable",
    "checkpoint_dots_with_no_batch_dims",
)
_OFFLOADS_DOTS = "offload_dot_with_no_batch_dims"
# The policies of values that the network names by `jax.ad_checkpoint.checkpoint_name`.
_OF_NAMES = (
    "save_only_these_names",
    "save_any_names_but_these",
    "save_anything_except_these_names",
)
_OFFLOADS_NAMES = "save_and_offload_only_these_names"
_CUSTOM_VJP = "custom_vjp_call"
_DOT = "dot_general"
_NAMED = re.compile(r"(\w+)\((.*)\)")


def remat_policy(value: bool | str, *, names: Collection[str] = ()) -> Policy | None:
    """Returns the policy for `hk.remat` or `jax.checkpoint` by its name.

    A policy changes no result, and gradients only by rounding: XLA fuses what it
    computes again in other ways.

    Source: `jax.checkpoint_policies`. Offloaded values lie in the memory 'pinned_host'
    from the forward to the backward pass.

    Args:
      value: True keeps nothing but the arguments, and False everything. Or the name of
        a policy: one without arguments, such as 'dots_saveable';
        'offload_dot_with_no_batch_dims'; or one with the names of values, as in
        'save_only_these_names(attention, gate_up)'. In
        'save_and_offload_only_these_names(a; b)', values before the semicolon stay on
        the device and those after it go to the host. Policies of dots apply to products
        within a function of `jax.custom_vjp`, too: its results are kept if they would
        keep one of them. JAX's keep nothing of such a function.
      names: the names that the network gives to values by
        `jax.ad_checkpoint.checkpoint_name`.

    Returns:
      The policy; None for True, as `hk.remat` has it.

    Raises:
      UserError: if there is no such policy, if it names a value that the network does
        not, or if it offloads and the run's devices have no such memory.

    >>> policy = xshard.remat_policy('dots_saveable')
    >>> layer = hk.without_apply_rng(hk.transform(
    ...     lambda x: hk.remat(hk.nets.MLP([8, 8]), policy=policy)(x)))
    >>> params = layer.init(jax.random.key(0), jnp.ones((2, 4)))
    >>> gradients = jax.grad(lambda p: layer.apply(p, jnp.ones((2, 4))).sum())(params)
    """
    if value is False:
        return jax.checkpoint_policies.everything_saveable
    if value is True:
        return None
    return _policy(value, names)


def _policy(text: Any, names: Collection[str]) -> Policy:
    """Returns the policy of `jax.checkpoint_policies` that a text describes."""
    policies = jax.checkpoint_policies
    if text in _PLAIN:
        policy = getattr(policies, text)
        return _with_custom_products(policy, keeps=policy)
    if text == _OFFLOADS_DOTS:
        _check_host_memory(text)
        offload = getattr(policies, text)(config_lib.DEVICE, config_lib.PINNED_HOST)
        return _with_custom_products(
            offload, keeps=policies.dots_with_no_batch_dims_saveable
        )
    found = _NAMED.fullmatch(text) if isinstance(text, str) else None
    if found and found[1] in _OF_NAMES:
        return getattr(policies, found[1])(*_parse_names(text, found[2], names))
    if found and found[1] == _OFFLOADS_NAMES and found[2].count(";") == 1:
        _check_host_memory(text)
        saved, _, offloaded = found[2].partition(";")
        return policies.save_and_offload_only_these_names(
            names_which_can_be_saved=_parse_names(text, saved, names),
            names_which_can_be_offloaded=_parse_names(text, offloaded, names),
            offload_src=config_lib.DEVICE,
            offload_dst=config_lib.PINNED_HOST,
        )
    raise errors.UserError(
        f"remat={text!r} must be True, False, {', '.join(_PLAIN)}, {_OFFLOADS_DOTS}, "
        f"{', '.join(f'{name}(a, b)' for name in _OF_NAMES)} or "
        f"{_OFFLOADS_NAMES}(a; b). These are the policies of jax.checkpoint_policies."
    )


def _with_custom_products(policy: Policy, keeps: Policy) -> Policy:
    """Returns a policy that also applies to products with gradients of their own.

    Args:
      policy: a policy of `jax.checkpoint_policies`.
      keeps: a policy of the same products that returns a boolean.
    """

    def decide(primitive: Any, *args: Any, **params: Any) -> Any:
        if primitive.name == _CUSTOM_VJP:
            program = jaxprs.opened(params[primitives.CALLS[_CUSTOM_VJP]])
            for eqn in primitives.all_equations(program):
                operands = [x.aval for x in eqn.invars]
                if eqn.primitive.name == _DOT and keeps(
                    eqn.primitive, *operands, **eqn.params
                ):
                    return policy(eqn.primitive, *operands, **eqn.params)
        return policy(primitive, *args, **params)

    return decide


def _parse_names(text: str, listed: str, names: Collection[str]) -> list[str]:
    """Returns the names in a list, each of which must be one of `names`."""
    parsed = [name.strip() for name in listed.split(",") if name.strip()]
    unknown = sorted(set(parsed) - set(names))
    if unknown:
        # JAX would take it as a name of nothing.
        raise errors.UserError(
            f"remat={text!r} names {', '.join(unknown)}; the values that the network "
            f"names: {', '.join(names) or 'none'}."
        )
    return parsed


def _check_host_memory(text: str) -> None:
    mesh = run_context.current_mesh()
    if mesh is not None:
        mesh_lib.check_memory(mesh, config_lib.PINNED_HOST, f"remat={text!r}")
