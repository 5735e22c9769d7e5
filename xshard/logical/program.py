"""A function of all replicas, compiled to one or several programs on logical replicas.

With exact sums there are several programs, so that the number of devices does not
affect rounding. In one program the compiler would fuse these steps, differently for
each number of devices, and so round differently:

- Programs with the shapes of one replica, which run once for each replica of a device.
- Programs that exchange values between replicas, in which sums over devices are sums of
  integers.
- A program that all devices evaluate alike on the results of the exchanges.
"""

import functools
from collections.abc import Callable
from concurrent import futures
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from xshard.logical import comparison
from xshard.logical.replicas import Replicas
from xshard.logical.segments import (
    OWN,
    Mapped,
    Replica,
    Results,
    SegmentedProgram,
    placed_on,
)

# XLA sends a program for several devices through passes that one for a single device
# does not see. What it makes of the program afterwards may then differ, and with it the
# rounding, so this is left out: - The elimination of common subexpressions, which comes
# before the simplification for several devices only. - Fusions by YNNPACK on CPUs. A
# long sum becomes one of them, or is divided into two sums, depending on the order of
#   the instructions.
_SAME_ROUNDING = {"xla_disable_hlo_passes": "cse"}
_SAME_ROUNDING_ON_CPUS = {"xla_cpu_experimental_ynn_fusion_type": ""}


class Stage(NamedTuple):
    """One of the programs of a function.

    Attributes:
      program: the result of `jax.jit(...).lower(...)`, or of compiling that.
      times: the number of times that it runs.
      live: the shapes of the arrays on the devices while it runs: its arguments and
        others, but not its results.
    """

    program: Any
    times: int
    live: Any


class Lowered(NamedTuple):
    """The programs of a function before compilation.

    Attributes:
      stages: the programs, in the order in which they run.
    """

    stages: list[Stage]

    def compile(self) -> list[Stage]:
        """Compiles the programs in parallel."""
        with futures.ThreadPoolExecutor() as pool:
            compiled = pool.map(lambda stage: stage.program.compile(), self.stages)
            pairs = zip(self.stages, compiled, strict=True)
            return [stage._replace(program=program) for stage, program in pairs]


class Program:
    """A function of all replicas, run on logical replicas. Call, trace and lower it
    like a result of `jax.jit`.
    """

    def __init__(
        self,
        what: str,
        mapped: Callable[..., Mapped],
        replicas: Replicas,
        **options: Any,
    ):
        """Stores the function.

        Args:
          what: a name of the function, for error messages.
          mapped: returns the function of one replica for given arguments; only their
            shapes and types matter.
          replicas: the logical replicas and their devices. Batches have `replicas.rows`
            rows.
          **options: options of `jax.jit`; `donate_argnums` must be 0 or absent.
        """
        self._what = what
        self._mapped = mapped
        self._replicas = replicas
        self._options = options
        self._say: Callable[[str], None] | None = None
        self._built: dict[Any, _SingleProgram | _SeparatePrograms] = {}

    def compare_first_call(self, say: Callable[[str], None]) -> None:
        """Lets the next call compare the bits of exact sums with those of one device;
        see `comparison`.

        Args:
          say: called with a line if anything differs.
        """
        self._say = say

    def trace(self, *args: Any) -> Any:
        """The program traced for as many devices as there are logical replicas, as
        `jax.jit(...).trace` returns it.

        Raises:
          UserError: if the function cannot be run on logical replicas.
        """
        mesh = self._replicas.mesh
        shapes = self._implementation(args).segmented.shapes(mesh.shape)
        return jax.jit(lambda *args: self._mapped(*args).on(mesh)(*args)).trace(*shapes)

    def lower(self, *args: Any) -> Lowered:
        """Lowers the programs for these arguments."""
        return Lowered(self._implementation(args).lower(args))

    def __call__(self, *args: Any) -> Any:
        """Runs the programs, which are compiled on the first call with arguments of
        these shapes and types.
        """
        implementation = self._implementation(args)
        say, self._say = self._say, None
        if say is not None and isinstance(implementation, _SeparatePrograms):
            return implementation.compared(args, say)
        return implementation(args)

    def _implementation(self, args: Any) -> "_SingleProgram | _SeparatePrograms":
        key = (
            jax.tree.structure(args),
            *((x.shape, x.dtype) for x in jax.tree.leaves(args)),
        )
        if key not in self._built:
            segmented = SegmentedProgram(
                self._what, self._mapped(*args), self._replicas, args
            )
            kind = _SeparatePrograms if self._replicas.num_words else _SingleProgram
            self._built[key] = kind(segmented, **self._options)
        return self._built[key]


class _SingleProgram:
    """The parts of a function, combined into one program."""

    def __init__(self, segmented: SegmentedProgram, **options: Any):
        """Combines the parts, with options of `jax.jit`."""
        self.segmented = segmented
        equal, own = segmented.inputs.parted(segmented.inputs.specs)
        leaves = segmented.out_specs, segmented.own_specs
        mapped = Mapped(self._run, (equal, own, OWN), leaves)
        self._jitted = jax.jit(mapped.on(segmented.on), **options)

    def _run(
        self, state: Any, own: Any, numbers: jax.Array
    ) -> tuple[list[jax.Array], ...]:
        segmented = self.segmented
        replicas = segmented.divide(own, numbers)
        results, kept = segmented.run(self._before, segmented.exchange, state, replicas)
        return segmented.after(state, results), segmented.join(kept)

    def _before(
        self, at: int, state: Any, results: Results, replicas: list[Replica]
    ) -> list[Any]:
        before = functools.partial(self.segmented.before, at, state, results)
        # One replica after the other, so that the activations of one are alive at a
        # time.
        made = lax.map(before, jax.tree.map(lambda *xs: jnp.stack(xs), *replicas))
        return [jax.tree.map(lambda x, i=i: x[i], made) for i in range(len(replicas))]

    def lower(self, args: Any) -> list[Stage]:
        """Lowers the program."""
        segmented = self.segmented
        lowered = self._jitted.lower(
            *segmented.inputs.parted(args), segmented.shape_of_numbers
        )
        return [Stage(lowered, 1, args)]

    def __call__(self, args: Any) -> Any:
        """Runs the function."""
        inputs = self.segmented.inputs.parted(args)
        return self.segmented.finish(*self._jitted(*inputs, self.segmented.numbers))


class _SeparatePrograms:
    """The parts of a function as separate programs.

    The host dispatches them without waiting, except for exchanges between several CPU
    devices.
    """

    def __init__(self, segmented: SegmentedProgram, **options: Any):
        """Jits the parts. The options are for the last part, whose first argument is
        all state equal on replicas.
        """
        self.segmented, on = segmented, segmented.on
        self._is_compiled = False
        # Only during the call that is compared.
        self._comparison: comparison.Comparison | None = None
        compiler_options = dict(_SAME_ROUNDING)
        if on.devices.flat[0].platform == "cpu":
            compiler_options |= _SAME_ROUNDING_ON_CPUS
        self._jit = functools.partial(jax.jit, compiler_options=compiler_options)
        equal, own = segmented.inputs.parted(segmented.inputs.specs)
        self._replica = Replica(own, OWN, OWN)
        replicas = [self._replica] * segmented.rounds
        self._divide = jax.jit(Mapped(segmented.divide, (own, OWN), replicas).on(on))
        self._mapped_befores, self._exchanges = [], []
        for at in range(len(segmented.split.exchanges)):
            takes = (equal, segmented.equal, self._replica)
            before = Mapped(functools.partial(segmented.before, at), takes, OWN)
            exchange = Mapped(
                functools.partial(segmented.exchange, at),
                (OWN, OWN),
                (segmented.equal, OWN),
            )
            self._mapped_befores.append(before)
            self._exchanges.append(jax.jit(exchange.on(on)))
        self._befores = [self._jit(before.on(on)) for before in self._mapped_befores]
        self._join = jax.jit(Mapped(segmented.join, (OWN,), segmented.own_specs).on(on))
        self._mapped_after = Mapped(
            segmented.after, (equal, segmented.equal), segmented.out_specs
        )
        self._after = self._jit(self._mapped_after.on(on), **options)

    def lower(self, args: Any) -> list[Stage]:
        """Lowers the programs, in the order in which they run."""
        segmented, on = self.segmented, self.segmented.on
        self._is_compiled = True
        state, own = segmented.inputs.parted(args)
        stages: list[Stage] = []
        live: list[Any] = [state, own]

        def add(lowered: Any, specs: Any, times: int = 1) -> Any:
            made = placed_on(on, lowered.out_info, specs)
            stages.append(Stage(lowered, times, [*live, *[made] * (times - 1)]))
            live.append([made] * times)
            return made

        def before(
            at: int, state: Any, results: Results, replicas: list[Replica]
        ) -> list[Any]:
            lowered = self._befores[at].lower(state, results, replicas[0])
            return [add(lowered, OWN, segmented.rounds)] * segmented.rounds

        def exchange(at: int, sent: Any, numbers: Any) -> Any:
            lowered = self._exchanges[at].lower(sent, numbers)
            made = add(lowered, (segmented.equal, OWN))
            # The arrays that went into the exchange are freed after it; the replicas
            # keep the others.
            live[-2] = [kept for _, kept in live[-2]]
            return made

        divide = self._divide.lower(own, segmented.shape_of_numbers)
        replicas = add(divide, [self._replica] * segmented.rounds)
        results, kept = segmented.run(before, exchange, state, replicas)
        if segmented.own_specs:
            add(self._join.lower(kept), segmented.own_specs)
        add(self._after.lower(state, results), segmented.out_specs)
        return stages

    def __call__(self, args: Any) -> Any:
        """Runs the function."""
        segmented = self.segmented
        if not self._is_compiled:
            Lowered(self.lower(args)).compile()
        state, own = segmented.inputs.parted(args)
        replicas = self._divide(own, segmented.numbers)
        results, kept = segmented.run(self._before, self._exchange, state, replicas)
        # Joined before the last program, to which the caller may donate the state.
        left = self._join(kept) if segmented.own_specs else []
        expected = self._on_one_device(self._mapped_after, state, results)
        made = self._after(state, results)
        self._compare("the update", expected, made)
        return segmented.finish(made, left)

    def compared(self, args: Any, say: Callable[[str], None]) -> Any:
        """Runs the function, and says what rounds otherwise than on one device would."""
        devices = self.segmented.on.devices.size
        if devices == 1:
            return self(args)
        self._comparison = comparison.Comparison(self.segmented.on, self._jit)
        try:
            returned = self(args)
            differing = self._comparison.differing
        finally:
            self._comparison = None
        if differing:
            say(
                f"warning: XLA computes other bits on one device than on these {devices}, in {' and '.join(differing)}. "
                "With this network, reduction.arithmetic='exact' keeps the bits of a run on this number of devices only."
            )
        return returned

    def _before(
        self, at: int, state: Any, results: Results, replicas: list[Replica]
    ) -> list[Any]:
        made = [self._befores[at](state, results, replica) for replica in replicas]
        expected = self._on_one_device(
            self._mapped_befores[at], state, results, replicas[0]
        )
        what = f"part {at + 1} of {len(self._befores)} of what a replica computes"
        self._compare(what, expected, made[0])
        return made

    def _on_one_device(self, part: Mapped, *args: Any) -> Any:
        if self._comparison is None:
            return None
        return self._comparison.on_one_device(part, *args)

    def _compare(self, what: str, expected: Any, made: Any) -> None:
        if self._comparison is not None:
            self._comparison.compare(what, expected, made)

    def _exchange(self, at: int, sent: Any, numbers: Any) -> Any:
        """Runs an exchange. On several CPU devices it first waits for all earlier
        programs, and then for the exchange.

        XLA's CPU client has one thread for each device. A device that waits in a
        collective blocks its thread, and so does dispatching to a device with 32
        programs in its queue. Together they would deadlock the process.
        """
        devices = self.segmented.on.devices
        if devices.flat[0].platform != "cpu" or devices.size == 1:
            return self._exchanges[at](sent, numbers)
        return jax.block_until_ready(
            self._exchanges[at](jax.block_until_ready(sent), numbers)
        )
