"""Arguments of optax transformations beside gradients, state and parameters.

By optax's convention, the update of a `GradientTransformationExtraArgs` takes any
keyword argument, uses those that it knows, and passes all on to what it is made of. So
it is offered all that there is, whatever is nested in it.
"""

import inspect
from typing import Any

import optax


def accepted(transformation: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """Selects the arguments that the update of a transformation takes.

    Args:
      transformation: an optax transformation, or another object with its two functions.
      arguments: keyword arguments by name.
    """
    try:
        parameters = inspect.signature(transformation.update).parameters
    except ValueError:
        # A function that is not written in Python may have no signature.
        return {}
    kinds = {parameter.kind for parameter in parameters.values()}
    # What takes just any arguments is a wrapper of a function that may take none,
    # unless it is declared.
    is_wrapper = inspect.Parameter.VAR_POSITIONAL in kinds
    is_declared = isinstance(transformation, optax.GradientTransformationExtraArgs)
    if inspect.Parameter.VAR_KEYWORD in kinds and (is_declared or not is_wrapper):
        return arguments
    # optax.contrib.sam is declared to take any, and takes one that is its own.
    return {name: x for name, x in arguments.items() if name in parameters}


def with_support(transformation: Any) -> optax.GradientTransformation:
    """Returns a transformation that `optax.chain` passes the same arguments to.

    Args:
      transformation: an optax transformation, or another object with its two functions.
    """
    init = transformation.init
    if not accepted(transformation, {"value": None}):
        return optax.GradientTransformation(init, transformation.update)

    def update(
        updates: Any, state: Any, params: Any = None, **arguments: Any
    ) -> tuple[Any, Any]:
        taken = accepted(transformation, arguments)
        return transformation.update(updates, state, params, **taken)

    return optax.GradientTransformationExtraArgs(init, update)
