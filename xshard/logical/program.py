"""A function of all replicas as a program, or as several, on logical replicas.

With exact sums it is several, and no floating-point number crosses a device: what a replica computes, of the shapes of one,
once for each of a device's; what they exchange, in integers; and what all devices make of that alike. In one program a
compiler fuses them, on other numbers of devices in other ways, and rounds otherwise.
"""

import functools
from collections.abc import Callable
from concurrent import futures
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from xshard.logical.parts import OWN, Mapped, Parts, Replica, Results, placed_on
from xshard.logical.replicas import Replicas

# XLA removes what is computed twice where it divides a program among devices, before it simplifies it. What is divided
# among none would be simplified otherwise, and rounded otherwise.
_ROUNDS_ALIKE = {"xla_disable_hlo_passes": "cse"}


class Stage(NamedTuple):
    """A program of those that a function is made of.

    Attributes:
      program: of `jax.jit(...).lower(...)`, or what that is compiled to.
      times: how often it is run.
      live: the shapes of what the devices hold while it runs, its arguments among it, but for what it makes.
    """

    program: Any
    times: int
    live: Any


class Lowered(NamedTuple):
    """The programs that a function is made of, not compiled; `compile` keeps them for when it is called.

    Attributes:
      stages: in the order in which they are run.
    """

    stages: list[Stage]

    def compile(self) -> list[Stage]:
        """The programs, compiled side by side."""
        with futures.ThreadPoolExecutor() as pool:
            compiled = pool.map(lambda stage: stage.program.compile(), self.stages)
            pairs = zip(self.stages, compiled, strict=True)
            return [stage._replace(program=program) for stage, program in pairs]


class Program:
    """A function of all replicas, run on logical ones; called, traced and lowered as what `jax.jit` returns."""

    def __init__(
        self, what: str, mapped: Callable[..., Mapped], replicas: Replicas, **options: Any
    ):
        """Keeps the function.

        Args:
          what: what it is, for messages.
          mapped: takes the arguments, of which shapes count, to what a replica does with them.
          replicas: where they are. Batches have `replicas.rows` rows.
          **options: of `jax.jit`; `donate_argnums` are 0 or none.
        """
        self._what = what
        self._mapped = mapped
        self._replicas = replicas
        self._options = options
        self._built: dict[Any, _One | _Apart] = {}

    def trace(self, *args: Any) -> Any:
        """The traced program of as many devices as there are replicas, as `jax.jit(...).trace` returns it.

        Raises:
          UserError: if the function cannot be run on logical replicas.
        """
        inputs = self._of(args).parts.inputs
        shapes = jax.tree.unflatten(inputs.tree, inputs.shapes(self._replicas.mesh.shape))
        return jax.jit(lambda *args: self._mapped(*args).on(self._replicas.mesh)(*args)).trace(
            *shapes
        )

    def lower(self, *args: Any) -> Lowered:
        """The programs for such arguments, to be compiled."""
        return Lowered(self._of(args).lower(args))

    def __call__(self, *args: Any) -> Any:
        """The result of the function."""
        program = self._of(args)
        if not program.is_compiled:
            self.lower(*args).compile()
        return program(args)

    def _of(self, args: Any) -> "_One | _Apart":
        key = jax.tree.structure(args), *(x.shape for x in jax.tree.leaves(args))
        if key not in self._built:
            parts = Parts(self._what, self._mapped(*args), self._replicas, args)
            kind = _Apart if self._replicas.limbs else _One
            self._built[key] = kind(parts, **self._options)
        return self._built[key]


class _One:
    """The parts as one program."""

    def __init__(self, parts: Parts, **options: Any):
        """Puts them together; the options are of `jax.jit`."""
        self.parts, self.is_compiled = parts, False
        equal, own = parts.inputs.specs
        leaves = parts.out_specs, parts.own_specs
        mapped = Mapped(self._run, (equal, own, OWN), leaves)
        self._jitted = jax.jit(mapped.on(parts.on), **options)

    def _run(self, state: Any, own: Any, numbers: jax.Array) -> tuple[list[jax.Array], ...]:
        parts = self.parts
        replicas = parts.divide(own, numbers)
        results, kept = parts.run(self._before, parts.exchange, state, replicas)
        return parts.after(state, results), parts.join(kept)

    def _before(self, at: int, state: Any, results: Results, replicas: list[Replica]) -> list[Any]:
        before = functools.partial(self.parts.before, at, state, results)
        made = lax.map(before, jax.tree.map(lambda *xs: jnp.stack(xs), *replicas))
        return [jax.tree.map(lambda x, i=i: x[i], made) for i in range(len(replicas))]

    def lower(self, args: Any) -> list[Stage]:
        """The program, to be compiled."""
        parts, self.is_compiled = self.parts, True
        lowered = self._jitted.lower(*parts.inputs.parted(args), parts.shape_of_numbers)
        return [Stage(lowered, 1, args)]

    def __call__(self, args: Any) -> Any:
        """The result."""
        inputs = self.parts.inputs.parted(args)
        return self.parts.finish(*self._jitted(*inputs, self.parts.numbers))


class _Apart:
    """The parts as programs of their own, for which the host does not wait, but for exchanges of several CPU devices."""

    def __init__(self, parts: Parts, **options: Any):
        """Jits them; the options are those of the last, whose first argument is all that is equal on replicas."""
        self.parts, on, self.is_compiled = parts, parts.on, False
        jit = functools.partial(jax.jit, compiler_options=_ROUNDS_ALIKE)
        equal, own = parts.inputs.specs
        self._replica = Replica(own, OWN, OWN)
        replicas = [self._replica] * parts.rounds
        self._divide = jax.jit(Mapped(parts.divide, (own, OWN), replicas).on(on))
        self._befores, self._exchanges = [], []
        for at in range(len(parts.split.exchanges)):
            takes = (equal, parts.equal, self._replica)
            before = Mapped(functools.partial(parts.before, at), takes, OWN)
            exchange = Mapped(functools.partial(parts.exchange, at), (OWN, OWN), (parts.equal, OWN))
            self._befores.append(jit(before.on(on)))
            self._exchanges.append(jax.jit(exchange.on(on)))
        self._join = jax.jit(Mapped(parts.join, (OWN,), parts.own_specs).on(on))
        after = Mapped(parts.after, (equal, parts.equal), parts.out_specs)
        self._after = jit(after.on(on), **options)

    def lower(self, args: Any) -> list[Stage]:
        """The programs, to be compiled, in the order in which they are run."""
        parts, on = self.parts, self.parts.on
        self.is_compiled = True
        state, own = parts.inputs.parted(args)
        stages: list[Stage] = []
        live: list[Any] = [state, own]

        def add(lowered: Any, specs: Any, times: int = 1) -> Any:
            made = placed_on(on, lowered.out_info, specs)
            stages.append(Stage(lowered, times, [*live, *[made] * (times - 1)]))
            live.append([made] * times)
            return made

        def before(at: int, state: Any, results: Results, replicas: list[Replica]) -> list[Any]:
            lowered = self._befores[at].lower(state, results, replicas[0])
            return [add(lowered, OWN, parts.rounds)] * parts.rounds

        def exchange(at: int, brought: Any, numbers: Any) -> Any:
            lowered = self._exchanges[at].lower(brought, numbers)
            made = add(lowered, (parts.equal, OWN))
            # What was brought is gone.
            live[-2] = [kept for _, kept in live[-2]]
            return made

        divide = self._divide.lower(own, parts.shape_of_numbers)
        replicas = add(divide, [self._replica] * parts.rounds)
        results, kept = parts.run(before, exchange, state, replicas)
        if parts.own_specs:
            add(self._join.lower(kept), parts.own_specs)
        add(self._after.lower(state, results), parts.out_specs)
        return stages

    def __call__(self, args: Any) -> Any:
        """The result."""
        parts = self.parts
        state, own = parts.inputs.parted(args)
        replicas = self._divide(own, parts.numbers)
        results, kept = parts.run(self._before, self._exchange, state, replicas)
        # Before what is given away with the last program.
        left = self._join(kept) if parts.own_specs else []
        return parts.finish(self._after(state, results), left)

    def _before(self, at: int, state: Any, results: Results, replicas: list[Replica]) -> list[Any]:
        return [self._befores[at](state, results, replica) for replica in replicas]

    def _exchange(self, at: int, brought: Any, numbers: Any) -> Any:
        """Runs an exchange; on several devices of a CPU when all before it is done, and to its end.

        XLA's CPU client has a thread for each device. One that waits in a collective keeps it, and so does one that has 32
        programs to run and is given another: the process would wait for ever.
        """
        devices = self.parts.on.devices
        if devices.flat[0].platform != "cpu" or devices.size == 1:
            return self._exchanges[at](brought, numbers)
        return jax.block_until_ready(self._exchanges[at](jax.block_until_ready(brought), numbers))
