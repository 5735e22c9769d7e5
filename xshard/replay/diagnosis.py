"""The analysis of a step: its first value that is not finite, the examples that cause
it, and what would cure it.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jmp
import ml_collections
import numpy as np

from xshard import mesh as mesh_lib
from xshard import state as state_lib
from xshard.metrics import formatting
from xshard.optimizers import trees
from xshard.replay import cause as cause_lib
from xshard.replay import dataflow, observations, replayer
from xshard.run import preflight

_SCALE = "current_loss_scale"
# The number of examples that are tried before the cause is reported as independent of
# the examples.
_MAX_TRIED = 16


class Operation(NamedTuple):
    """A value of a step, and its origin.

    Attributes:
      primitive: the JAX primitive that computes it; empty for an input.
      input: the path of the input; empty for other values.
      line: the line of the user's code; empty if unknown.
      innermost: the innermost line outside of JAX.
      module: the path of the Haiku module; empty outside of modules.
      backward: whether it belongs to the backward pass, or is a derivative that only
        the backward pass reads.
      kind: its dtype and shape on one replica.
      gives: inf or nan.
    """

    primitive: str
    input: str
    line: str
    innermost: str
    module: str
    backward: bool
    kind: str
    gives: str


class Finding(NamedTuple):
    """The first value of a step that is not finite.

    Attributes:
      first: the first value.
      nan: the value where it first becomes nan, if that is another one.
      replicas: the replicas on which it is not finite, numbered over all groups.
      rows: the rows of the batch of all groups that cause it, a list for each cause;
        None if it does not depend on the examples.
      results: the results that become not finite.
      cure: the change that would make the step finite, or a note that no loss scale
        would; empty if not examined.
    """

    first: Operation
    nan: Operation | None
    replicas: list[int]
    rows: list[list[int]] | None
    results: list[str]
    cure: str


class Diagnosis:
    """A repeated step of a run, with observations of all its values."""

    def __init__(self, run: replayer.Replayer, step: replayer.Step):
        """Traces the step once more, and observes its values."""
        self._run, self._step = run, step
        traced = run.single_program().trace(step.state, step.batch)
        self.program = dataflow.Program(traced, (step.state, step.batch))
        self._evaluate = observations.make_observer(self.program, run.mesh)
        self.observed = self._evaluate(step.state, step.batch)

    def find(self) -> Finding | None:
        """Finds the first value that is not finite; None if every value that reaches a
        result is finite.
        """
        cause = cause_lib.find(self.program, self.observed, self._run.mesh)
        if cause is None:
            return None
        first = self._operation(cause.value, cause.replicas)
        nan = None
        if cause.nan is not None and cause.nan != cause.value:
            nan = self._operation(cause.nan, range(len(self.observed.largest)))
        rows = self._find_rows(cause)
        cure = "" if first.input else self._find_cure(cause)
        return Finding(first, nan, cause.replicas, rows, cause.results, cure)

    def _operation(self, number: int, replicas: Sequence[int]) -> Operation:
        value = self.program.values[number]
        equation = value.equation
        is_input = equation is None and number < len(self.program.inputs)
        line, innermost = dataflow.lines(value)
        largest = self.observed.largest[list(replicas), number]
        return Operation(
            "" if equation is None else equation.primitive.name,
            self.program.inputs[number] if is_input else "",
            line,
            innermost,
            dataflow.module_path(value),
            self.program.is_backward(number),
            f"{value.dtype}{list(value.shape)}",
            "nan" if np.isnan(largest).any() else "inf",
        )

    def _find_rows(self, cause: cause_lib.Cause) -> list[list[int]] | None:
        """Finds the rows of the batch that cause it, by replacing others; None if it
        does not depend on the rows.
        """
        host = {name: np.asarray(x) for name, x in self._step.batch.items()}
        replicas = len(self.observed.largest)
        size = len(next(iter(host.values()))) // replicas
        parts = self._run.config.micro_batches
        rows = np.concatenate(
            [np.arange(size) + size * replica for replica in cause.replicas]
        )

        def is_bad(source: np.ndarray) -> bool:
            changed = {}
            for name, x in host.items():
                x = x.copy()
                x[rows] = host[name][source]
                changed[name] = jax.device_put(x, self._step.batch[name].sharding)
            observed = self._evaluate(self._step.state, changed)
            return any(observed.bad(replica, cause.value) for replica in cause.replicas)

        # An example is harmless if the value is finite when every row is a copy of it.
        tried = rows[np.unique(np.linspace(0, len(rows) - 1, _MAX_TRIED).astype(int))]
        harmless = next(
            (row for row in tried if not is_bad(np.full_like(rows, row))), None
        )
        if harmless is None:
            return None
        only = lambda kept: is_bad(np.where(np.isin(rows, kept), rows, harmless))
        return cause_lib.blame_examples(
            only, np.split(rows, parts * len(cause.replicas))
        )

    def _find_cure(self, cause: cause_lib.Cause) -> str:
        """Returns the cure: a lower loss scale, a wider dtype, or that neither helps."""
        scale, texts = 1.0, []
        for path, x in jax.tree_util.tree_leaves_with_path(self._step.state):
            if _is_scale(path):
                scale = max(scale, float(jnp.max(x)))
        if scale > 1:
            text, is_cured = self._cure_by_scale(cause, scale)
            if is_cured:
                return text
            texts.append(text)
        policy = jmp.get_policy(self._run.config.precision)
        # A computation in float32 or wider cannot be cured by a wider type.
        if jnp.dtype(policy.compute_dtype).itemsize <= 2:
            texts.append(self._in_float32(cause, policy))
        return "; ".join(texts)

    def _cure_by_scale(self, cause: cause_lib.Cause, scale: float) -> tuple[str, bool]:
        """Describes whether a lower loss scale would make the step finite, and returns
        whether it would.
        """

        def observe_at(exponent: int) -> observations.Observations | None:
            state = _scaled(self._step.state, 2.0**-exponent)
            observed = self._evaluate(state, self._step.batch)
            bad = cause_lib.find(self.program, observed, self._run.mesh)
            return observed if bad is None else None

        most = int(np.ceil(np.log2(scale)))
        if observe_at(most) is None:
            return (
                "not finite at a loss scale of 1 either: no loss scale would cure it",
                False,
            )
        # Bisection for the smallest exponent: the step is finite at `high` and not at
        # `low`.
        low, high = 0, most
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if observe_at(middle) else (middle, high)
        observed = observe_at(high)
        finite = formatting.number(scale / 2**high)
        text = f"the loss scale {formatting.number(scale)} is 2^{high} too high: at {finite} the step is finite"
        dtype = self.program.values[cause.value].dtype
        if observed is not None and jnp.issubdtype(dtype, jnp.floating):
            magnitude = (
                float(observed.largest[cause.replicas, cause.value].max()) * 2**high
            )
            text += f"; the value that overflows is {magnitude:.3g}, and the largest {dtype} is {float(jnp.finfo(dtype).max):.6g}"
        return text, True

    def _in_float32(self, cause: cause_lib.Cause, policy: jmp.Policy) -> str:
        """Describes the outcome of the same step in float32."""
        config = ml_collections.ConfigDict(self._run.config)
        parameters = jnp.dtype(policy.param_dtype).name
        config.update(precision=f"params={parameters},compute=float32,output=float32")
        experiment = type(self._run.experiment)(config)
        state, batch = self._step.state, self._step.batch
        traced = preflight.single_program(experiment, self._run.mesh).trace(
            state, batch
        )
        program = dataflow.Program(traced, (state, batch))
        observed = observations.make_observer(program, self._run.mesh)(state, batch)
        if cause_lib.find(program, observed, self._run.mesh) is not None:
            return "not finite in float32 either: the precision is not the cause"
        value = self.program.values[cause.value]
        # The float32 program numbers its values differently, so the value is found by
        # its place in the code.
        alike = [n for n, x in enumerate(program.values) if _place(x) == _place(value)]
        text = "in float32 the step is finite"
        if alike and jnp.issubdtype(value.dtype, jnp.floating):
            magnitude = float(observed.largest[np.ix_(cause.replicas, alike)].max())
            text += f", and this value is {magnitude:.3g}: the largest {value.dtype} is {float(jnp.finfo(value.dtype).max):.6g}"
        return text

    def table(self, most: int = 5) -> str:
        """Formats the norm of each gradient, and the largest values, of a finite step."""
        return "\n".join([*self._norms(), *self._largest(most)])

    def _norms(self) -> list[str]:
        if not self.program.gradients:
            return ["no norms of gradients: the step has no update outside of a loop"]
        shape = tuple(self._run.mesh.shape[axis] for axis in mesh_lib.BATCH)
        squares = self.observed.squares.reshape(*shape, -1)
        lines = ["gradients that the update receives: norm, largest |element|"]
        params = state_lib.params(self._step.state)
        for index, ((learner, path), number) in enumerate(
            self.program.gradients.items()
        ):
            # All slices have the same gradients. With a sharded update, each replica of
            # a slice has a part.
            of_replicas = squares[:, 0, :, index]
            groups = shape[0]
            name = trees.join(learner, path)
            whole = int(np.prod(params[name].shape)) // groups if name in params else 0
            is_part = int(np.prod(self.program.values[number].shape)) < whole
            square = of_replicas.sum(axis=1) if is_part else of_replicas[:, 0]
            norms = " ".join(f"{x:.4g}" for x in np.sqrt(square))
            lines.append(
                f"  {norms}  {self.observed.largest[:, number].max():.4g}  {name}"
            )
        return lines

    def _largest(self, most: int) -> list[str]:
        largest = self.observed.largest.max(axis=0)
        texts: dict[str, str] = {}
        for number in np.argsort(-largest).tolist():
            value = self.program.values[number]
            line, _ = dataflow.lines(value)
            if (
                line
                and line not in texts
                and np.isfinite(largest[number])
                and len(texts) < most
            ):
                primitive = value.place[-1].primitive.name
                texts[line] = (
                    f"  {largest[number]:.4g}  {value.dtype}  {primitive}  {line}"
                )
        return ["the largest |value|s of the user's code, by line:", *texts.values()]


def _place(value: dataflow.Value) -> tuple[Any, ...]:
    """Returns features that identify an operation in the same step at another
    precision.
    """
    equation = value.equation
    primitive = "" if equation is None else equation.primitive.name
    return primitive, dataflow.lines(value), dataflow.name_stack(value), value.shape


def _scaled(state: state_lib.TrainState, factor: float) -> state_lib.TrainState:
    """Returns the state with its loss scales multiplied by `factor`, but at least 1."""

    def change(path: Any, x: jax.Array) -> jax.Array:
        if not _is_scale(path):
            return x
        return jax.device_put(
            jnp.maximum(x * jnp.float32(factor), jnp.float32(1)), x.sharding
        )

    return jax.tree_util.tree_map_with_path(change, state)


def _is_scale(path: Any) -> bool:
    return trees.path_name(path).rpartition("/")[2] == _SCALE
