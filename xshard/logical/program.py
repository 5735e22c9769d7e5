"""A function of all replicas, compiled to one or several programs on logical replicas.

With exact sums there are several programs, so that the number of devices does not
affect rounding. In one program the compiler would fuse these steps, differently for
each number of devices, and so round differently:

- Programs with the shapes of one replica, which run once for each replica of a device.
- Programs that combine values between replicas, in which sums over devices are sums of
  integers.
- A program that all devices evaluate alike on the results of the collectives.
"""

import abc
import functools
from collections.abc import Callable, Sequence
from concurrent import futures
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xshard import errors
from xshard.logical import comparison, host_sums, sums
from xshard.logical.replicas import Replicas
from xshard.logical.segments import (
    PER_REPLICA,
    Combined,
    Indexed,
    Mapped,
    Replica,
    SegmentedProgram,
    Sent,
    with_shardings,
)

# XLA sends a program for several devices through passes that one for a single device
# does not see. What it makes of the program afterwards may then differ, and with it the
# rounding, so two passes are left out.
#
# The elimination of common subexpressions comes before the simplification for several
# devices only.
_SAME_ROUNDING = {"xla_disable_hlo_passes": "cse"}
# A long sum becomes a fusion by YNNPACK, or is divided into two sums, depending on the
# order of the instructions.
_SAME_ROUNDING_ON_CPUS = {"xla_cpu_experimental_ynn_fusion_type": ""}
# XLA divides a long maximum on CPUs into two, and writes the array to memory for the
# first. No division changes a maximum of integers.
_UNDIVIDED = {"xla_disable_hlo_passes": "tree_reduction_rewriter"}


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


class Exchange(Protocol):
    """What connects the members of a run: processes that share its replicas out.

    All of them make the same calls in the same order.
    """

    def combine(
        self,
        label: str,
        like: Sequence[Any],
        units: int,
        contribute: Callable[[Sequence[int]], list[np.ndarray]],
        operations: Sequence[np.ufunc],
    ) -> list[np.ndarray]:
        """Combines what the members compute; returns the same on each of them.

        Args:
          label: the name of the call, the same on each of them.
          like: the shapes and types of the arrays.
          units: the number of units that the work consists of.
          contribute: computes this member's part for some units, at least one. It is
            called again if another member is gone, for units that were that one's.
          operations: for each array, how two parts are combined.
        """


class Program:
    """A function of all replicas, run on logical replicas.

    Call, trace and lower it like a result of `jax.jit`.
    """

    def __init__(
        self,
        what: str,
        mapped: Callable[..., Mapped],
        replicas: Replicas,
        exchange: Exchange | None = None,
        **options: Any,
    ):
        """Stores the function.

        Args:
          what: a name of the function, for error messages.
          mapped: returns the function of one replica for given arguments; only their
            shapes and types matter.
          replicas: the logical replicas and their devices. Batches have `replicas.rows`
            rows.
          exchange: connects the members of the run, each of which has all devices of
            the mesh and all arguments to itself; None if there are no others.
          **options: options of `jax.jit`; `donate_argnums` must be 0 or absent.
        """
        self._what = what
        self._mapped = mapped
        self._replicas = replicas
        self._exchange = exchange
        self._options = options
        self._log_difference: Callable[[str], None] | None = None
        # By the structure, shapes and types of the arguments, as jit's cache.
        self._implementations: dict[Any, _SingleProgram | _SeparatePrograms] = {}

    def compare_first_call(self, log: Callable[[str], None]) -> None:
        """Lets the next call compare the bits of exact sums with those of one device.

        Args:
          log: called with a line if anything differs.
        """
        self._log_difference = log

    def trace(self, *args: Any) -> Any:
        """Traces the program for as many devices as there are logical replicas.

        Returns:
          What `jax.jit(...).trace` returns.

        Raises:
          UserError: if the function cannot be run on logical replicas.
        """
        mesh = self._replicas.mesh
        shapes = self._implementation(args).segments.shapes(mesh.shape)

        def on_all(*args: Any) -> Any:
            return self._mapped(*args).on(mesh)(*args)

        return jax.jit(on_all).trace(*shapes)

    def lower(self, *args: Any) -> Lowered:
        """Lowers the programs for these arguments."""
        return Lowered(self._implementation(args).lower(args))

    def __call__(self, *args: Any) -> Any:
        """Runs the programs.

        They are compiled on the first call with arguments of these shapes and types.
        """
        implementation = self._implementation(args)
        log = self._log_difference
        self._log_difference = None
        if log is not None and isinstance(implementation, _SeparatePrograms):
            return implementation.compare(args, log)
        return implementation(args)

    def _implementation(self, args: Any) -> "_SingleProgram | _SeparatePrograms":
        leaves = jax.tree.leaves(args)
        types = tuple((leaf.shape, leaf.dtype) for leaf in leaves)
        key = (jax.tree.structure(args), types)
        if key not in self._implementations:
            self._implementations[key] = self._make_implementation(args)
        return self._implementations[key]

    def _make_implementation(self, args: Any) -> "_SingleProgram | _SeparatePrograms":
        segments = SegmentedProgram(
            self._what, self._mapped(*args), self._replicas, args
        )
        # The sums of floats depend on the number of devices anyway.
        if not self._replicas.is_exact:
            return _SingleProgram(segments, **self._options)
        if self._exchange is None:
            return _SeparatePrograms(segments, **self._options)
        return _SharedPrograms(segments, self._what, self._exchange, **self._options)


class _Schedule(abc.ABC):
    """The order of a program's segments. A subclass says how a segment is run."""

    def __init__(self, segments: SegmentedProgram):
        self.segments = segments

    @abc.abstractmethod
    def before(
        self, index: int, state: Any, results: Indexed, replicas: Sequence[Replica]
    ) -> list[Sent]:
        """Runs `SegmentedProgram.before` for each replica of a device."""

    @abc.abstractmethod
    def combine(self, index: int, sent: list[Any], numbers: list[Any]) -> Combined:
        """Runs `SegmentedProgram.combine`."""

    def run_collectives(
        self, state: Any, replicas: Sequence[Replica]
    ) -> tuple[Indexed, list[Indexed]]:
        """Runs all segments up to the last collective.

        Args:
          state: the leaves of the arguments that are equal on all replicas.
          replicas: the replicas that `divide` returns.

        Returns:
          The results of all collectives that are equal on all replicas, and the outputs
          of each replica of a device.
        """
        results: Indexed = {}
        outputs: list[Indexed] = [{} for _ in replicas]
        numbers = [replica.number for replica in replicas]
        for index, collective in enumerate(self.segments.split.collectives):
            sent = self.before(index, state, results, replicas)
            for place, sent_by_replica in enumerate(sent):
                outputs[place] = outputs[place] | sent_by_replica.outputs
            # The last collective may have outputs, but nothing to send.
            if not collective.kinds:
                continue
            arrays = [sent_by_replica.arrays for sent_by_replica in sent]
            # The sent arrays are large for all replicas of a device together, so
            # nothing but the collective may keep them.
            del sent
            combined = self.combine(index, arrays, numbers)
            del arrays
            results = results | combined.equal
            replicas = _with_shards(replicas, combined)
        return results, outputs


def _with_shards(replicas: Sequence[Replica], combined: Combined) -> list[Replica]:
    """Returns the replicas with the shards that they received in a collective."""
    received = []
    for replica, shards in zip(replicas, combined.shards, strict=True):
        received.append(replica._replace(shards=replica.shards | shards))
    return received


class _SingleProgram(_Schedule):
    """All segments in one program."""

    def __init__(self, segments: SegmentedProgram, **options: Any):
        """Combines the segments, with options of `jax.jit`."""
        super().__init__(segments)
        equal, per_replica = segments.inputs.partition(segments.inputs.specs)
        mapped = Mapped(
            self._run,
            in_specs=(equal, per_replica, PER_REPLICA),
            out_specs=segments.outputs.partition(segments.outputs.specs),
        )
        self._jitted = jax.jit(mapped.on(segments.mesh), **options)

    def _run(
        self, state: Any, per_replica: Any, numbers: jax.Array
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        replicas = self.segments.divide(per_replica, numbers)
        results, outputs = self.run_collectives(state, replicas)
        return self.segments.after(state, results), self.segments.join(outputs)

    def before(
        self, index: int, state: Any, results: Indexed, replicas: Sequence[Replica]
    ) -> list[Sent]:
        """Runs the segment for one replica after the other.

        The activations of only one replica are then alive at a time.
        """

        def before_of_replica(replica: Replica) -> Sent:
            return self.segments.before(index, state, results, replica)

        stacked = jax.tree.map(lambda *arrays: jnp.stack(arrays), *replicas)
        sent = lax.map(before_of_replica, stacked)
        count = len(replicas)
        return [jax.tree.map(lambda array, i=i: array[i], sent) for i in range(count)]

    def combine(self, index: int, sent: list[Any], numbers: list[Any]) -> Combined:
        """Combines arrays within the program."""
        return self.segments.combine(index, sent, numbers)

    def lower(self, args: Any) -> list[Stage]:
        """Lowers the program."""
        equal, per_replica = self.segments.inputs.partition(args)
        numbers = self.segments.shape_of_numbers
        lowered = self._jitted.lower(equal, per_replica, numbers)
        return [Stage(lowered, times=1, live=args)]

    def __call__(self, args: Any) -> Any:
        """Runs the function."""
        equal, per_replica = self.segments.inputs.partition(args)
        outputs = self._jitted(equal, per_replica, self.segments.numbers)
        return self.segments.finish(*outputs)


class _SeparatePrograms(_Schedule):
    """Each segment as a program.

    The host dispatches the programs without waiting, except for collectives between
    several CPU devices.

    Attributes:
      divide_program: `SegmentedProgram.divide`, jitted.
      before_programs: `SegmentedProgram.before` of each collective.
      combine_programs: `SegmentedProgram.combine` of each collective.
      after_program: `SegmentedProgram.after`.
      join_program: `SegmentedProgram.join`.
      replica_specs: the specs of a `Replica`.
    """

    def __init__(self, segments: SegmentedProgram, **options: Any):
        """Jits the segments.

        Args:
          segments: the segments.
          **options: options of `jax.jit` for the last segment, whose first argument is
            all state that is equal on replicas.
        """
        super().__init__(segments)
        mesh = segments.mesh
        self._is_compiled = False
        # Set only during the call that is compared.
        self._comparison: comparison.Comparison | None = None
        # What a replica computes, and the update, must round alike on any number of
        # devices. The other programs only move arrays and add integers.
        compiler_options = dict(_SAME_ROUNDING)
        if mesh.devices.flat[0].platform == "cpu":
            compiler_options |= _SAME_ROUNDING_ON_CPUS
        self._jit = functools.partial(jax.jit, compiler_options=compiler_options)

        equal, per_replica = segments.inputs.partition(segments.inputs.specs)
        equal_outputs, per_replica_outputs = segments.outputs.partition(
            segments.outputs.specs
        )
        self.replica_specs = Replica(per_replica, PER_REPLICA, PER_REPLICA)
        divide = Mapped(
            segments.divide,
            in_specs=(per_replica, PER_REPLICA),
            out_specs=[self.replica_specs] * segments.rounds,
        )
        self.divide_program = jax.jit(divide.on(mesh))
        self._befores = []
        self.before_programs = []
        self.combine_programs = []
        for index in range(len(segments.split.collectives)):
            before = Mapped(
                functools.partial(segments.before, index),
                in_specs=(equal, segments.equal_spec, self.replica_specs),
                out_specs=PER_REPLICA,
            )
            self._befores.append(before)
            self.before_programs.append(self._jit(before.on(mesh)))
            collective = Mapped(
                functools.partial(segments.combine, index),
                in_specs=(PER_REPLICA, PER_REPLICA),
                out_specs=Combined(segments.equal_spec, PER_REPLICA),
            )
            self.combine_programs.append(jax.jit(collective.on(mesh)))
        self._after = Mapped(
            segments.after,
            in_specs=(equal, segments.equal_spec),
            out_specs=equal_outputs,
        )
        self.after_program = self._jit(self._after.on(mesh), **options)
        join = Mapped(
            segments.join, in_specs=(PER_REPLICA,), out_specs=per_replica_outputs
        )
        self.join_program = jax.jit(join.on(mesh))

    def lower(self, args: Any) -> list[Stage]:
        """Lowers the programs, in the order in which they run."""
        self._is_compiled = True
        return _Lowering(self, args).stages

    def __call__(self, args: Any) -> Any:
        """Runs the function."""
        segments = self.segments
        if not self._is_compiled:
            Lowered(self.lower(args)).compile()
        state, per_replica = segments.inputs.partition(args)
        replicas = self.divide_program(per_replica, segments.numbers)
        results, outputs = self.run_collectives(state, replicas)
        # Joined before the last program, to which the caller may donate the state.
        joined = []
        if segments.outputs.dims:
            joined = self.join_program(outputs)
        # The comparison, too, must read the state before it is donated.
        expected = self._on_one_device(self._after, state, results)
        equal_outputs = self.after_program(state, results)
        self._compare("the update", expected, equal_outputs)
        return segments.finish(equal_outputs, joined)

    def compare(self, args: Any, log: Callable[[str], None]) -> Any:
        """Runs the function, and logs which parts would round otherwise on one device.

        Args:
          args: the arguments.
          log: called with a line if any part does.
        """
        num_devices = self.segments.mesh.devices.size
        if num_devices == 1:
            return self(args)
        self._comparison = comparison.Comparison(self.segments.mesh, self._jit)
        try:
            returned = self(args)
            differing = self._comparison.differing
        finally:
            self._comparison = None
        if differing:
            log(
                "warning: XLA computes other bits on one device than on these "
                f"{num_devices}, in {' and '.join(differing)}. With this network, "
                "reduction.arithmetic='exact' keeps the bits of a run on this number "
                "of devices only."
            )
        return returned

    def before(
        self, index: int, state: Any, results: Indexed, replicas: Sequence[Replica]
    ) -> list[Sent]:
        """Runs the program of one replica, once for each replica of a device."""
        program = self.before_programs[index]
        sent = [program(state, results, replica) for replica in replicas]
        expected = self._on_one_device(
            self._befores[index], state, results, replicas[0]
        )
        count = len(self._befores)
        what = f"part {index + 1} of {count} of what a replica computes"
        self._compare(what, expected, sent[0])
        return sent

    def combine(self, index: int, sent: list[Any], numbers: list[Any]) -> Combined:
        """Runs a collective.

        On several CPU devices it first waits for all earlier programs, and then for the
        collective. XLA's CPU client has one thread for each device. A device that waits
        in a collective blocks its thread, and so does dispatching to a device with 32
        programs in its queue. Together they would deadlock the process.
        """
        program = self.combine_programs[index]
        devices = self.segments.mesh.devices
        if devices.flat[0].platform != "cpu" or devices.size == 1:
            return program(sent, numbers)
        jax.block_until_ready(sent)
        return jax.block_until_ready(program(sent, numbers))

    def lower_collective(
        self, index: int, sent: list[Any], numbers: list[Any]
    ) -> list[tuple[Any, int]]:
        """Lowers the programs of a collective; returns how often each runs, too."""
        return [(self.combine_programs[index].lower(sent, numbers), 1)]

    def _on_one_device(self, part: Mapped, *args: Any) -> Any:
        if self._comparison is None:
            return None
        return self._comparison.on_one_device(part, *args)

    def _compare(self, what: str, expected: Any, made: Any) -> None:
        if self._comparison is not None:
            self._comparison.compare(what, expected, made)


class _SharedPrograms(_SeparatePrograms):
    """Separate programs of a run whose members share the replicas out.

    Each member computes what some replicas send into a collective. The members combine
    that on the host, as integers, and all else each of them computes alike. So whoever
    is left has everything that the program needs.
    """

    def __init__(
        self, segments: SegmentedProgram, what: str, exchange: Exchange, **options: Any
    ):
        """Jits the segments.

        Args:
          segments: the segments.
          what: a name of the function, for the members and for error messages.
          exchange: connects the members.
          **options: as of `_SeparatePrograms`.

        Raises:
          UserError: if the program has what the members cannot combine.
        """
        super().__init__(segments, **options)
        _check_is_shared(segments, what)
        self._what = what
        self._exchange = exchange
        # Of each collective, once it has been lowered.
        self._host_sums: dict[int, host_sums.HostSums] = {}
        self.magnitude_programs = []
        self.term_programs = []
        self.result_programs = []
        for index in range(len(segments.split.collectives)):
            magnitudes = Mapped(
                functools.partial(segments.magnitudes, index),
                in_specs=(PER_REPLICA, PER_REPLICA),
                out_specs=segments.equal_spec,
            )
            self.magnitude_programs.append(
                jax.jit(magnitudes.on(segments.mesh), compiler_options=_UNDIVIDED)
            )
            equal = segments.equal_spec
            terms = Mapped(
                functools.partial(segments.terms, index),
                in_specs=(equal, PER_REPLICA, PER_REPLICA, equal),
                out_specs=equal,
            )
            # The total's own memory takes the sum.
            self.term_programs.append(
                jax.jit(terms.on(segments.mesh), donate_argnums=0)
            )
            results = Mapped(
                functools.partial(segments.results, index),
                in_specs=(segments.equal_spec, segments.equal_spec, PER_REPLICA),
                out_specs=Combined(segments.equal_spec, PER_REPLICA),
            )
            self.result_programs.append(jax.jit(results.on(segments.mesh)))

    def run_collectives(
        self, state: Any, replicas: Sequence[Replica]
    ) -> tuple[Indexed, list[Indexed]]:
        """Runs all segments up to the last collective, each member some replicas."""
        results: Indexed = {}
        for index, collective in enumerate(self.segments.split.collectives):
            if not collective.kinds:
                continue
            combined = self._combined(index, state, results, replicas)
            results = results | combined.equal
            replicas = _with_shards(replicas, combined)
        return results, [{} for _ in replicas]

    def _combined(
        self, index: int, state: Any, results: Indexed, replicas: Sequence[Replica]
    ) -> Combined:
        """Runs a collective of all replicas."""
        name = f"{self._what}, collective {index}"
        host = self._host_sums[index]
        numbers = [replica.number for replica in replicas]
        # What replicas send, until all members have added it.
        sent: dict[int, list[Any]] = {}

        def send(rounds: Sequence[int]) -> None:
            # All are dispatched before the host waits for any.
            for i in rounds:
                if i not in sent:
                    [made] = self.before(index, state, results, [replicas[i]])
                    sent[i] = made.arrays

        def magnitudes(rounds: Sequence[int]) -> list[np.ndarray]:
            send(rounds)
            program = self.magnitude_programs[index]
            made = [program(sent[i], numbers[i]) for i in rounds]
            return [np.max([np.asarray(x) for x in made], axis=0)]

        largest = None
        if host.magnitudes is not None:
            [largest] = self._exchange.combine(
                f"{name}: magnitudes",
                [host.magnitudes],
                len(replicas),
                magnitudes,
                [np.maximum],
            )

        def terms(rounds: Sequence[int]) -> list[np.ndarray]:
            send(rounds)
            total: Any = None
            for i in rounds:
                total = self.term_programs[index](total, sent[i], numbers[i], largest)
            return host.arrays(total)

        combined = self._exchange.combine(
            f"{name}: terms", host.like, len(replicas), terms, host.operations
        )
        program = self.result_programs[index]
        return program(host.terms(combined), largest, numbers)

    def lower_collective(
        self, index: int, sent: list[Any], numbers: list[Any]
    ) -> list[tuple[Any, int]]:
        """Lowers the programs of a collective; returns how often each runs, too."""
        segments = self.segments
        kinds = segments.whole_kinds(index)
        lowered = []
        largest = None
        shapes = segments.split.collectives[index].shapes
        if sums.floating_sums(kinds, shapes):
            magnitudes = self.magnitude_programs[index].lower(sent[0], numbers[0])
            lowered.append((magnitudes, len(sent)))
            largest = magnitudes.out_info
        program = self.term_programs[index]
        terms = program.lower(None, sent[0], numbers[0], largest)
        lowered.append((terms, 1))
        total = with_shardings(segments.mesh, terms.out_info, segments.equal_spec)
        if len(sent) > 1:
            more = program.lower(total, sent[0], numbers[0], largest)
            lowered.append((more, len(sent) - 1))
        host = host_sums.HostSums(kinds, terms.out_info, largest)
        self._host_sums[index] = host
        results = self.result_programs[index].lower(terms.out_info, largest, numbers)
        return [*lowered, (results, 1)]


def _check_is_shared(segments: SegmentedProgram, what: str) -> None:
    """Raises UserError unless members can combine all that replicas compute."""
    if segments.outputs.dims:
        raise errors.UserError(
            f"{what} returns {len(segments.outputs.dims)} arrays of which each replica "
            "has its own (xshard.PerReplica, xshard.PerExample). They would be lost "
            "with the member of the run that computes them: leave --spares and "
            "--elastic out."
        )
    for collective in segments.split.collectives:
        for shape in collective.shapes:
            if jnp.issubdtype(shape.dtype, jnp.complexfloating):
                raise errors.UserError(
                    f"{what} sums {shape.dtype} over its replicas, whose bits depend "
                    "on the order: sum the real and the imaginary part, or leave "
                    "--spares and --elastic out."
                )


class _Lowering(_Schedule):
    """Lowers separate programs, and finds which arrays are alive while each runs.

    Attributes:
      stages: the programs, in the order in which they run.
    """

    def __init__(self, programs: _SeparatePrograms, args: Any):
        """Lowers the programs for these arguments.

        Args:
          programs: the programs.
          args: arrays or shapes.
        """
        super().__init__(programs.segments)
        self.stages: list[Stage] = []
        self._programs = programs
        segments = programs.segments
        state, per_replica = segments.inputs.partition(args)
        self._live: list[Any] = [state, per_replica]

        divide = programs.divide_program.lower(per_replica, segments.shape_of_numbers)
        specs = [programs.replica_specs] * segments.rounds
        replicas = self._add_stage(divide, specs)
        self._live.append(replicas)
        results, outputs = self.run_collectives(state, replicas)
        equal_outputs, per_replica_outputs = segments.outputs.partition(
            segments.outputs.specs
        )
        if per_replica_outputs:
            join = programs.join_program.lower(outputs)
            self._live.append(self._add_stage(join, per_replica_outputs))
        after = programs.after_program.lower(state, results)
        self._add_stage(after, equal_outputs)

    def before(
        self, index: int, state: Any, results: Indexed, replicas: Sequence[Replica]
    ) -> list[Sent]:
        """Lowers the program of one replica, which runs once for each of a device."""
        program = self._programs.before_programs[index]
        lowered = program.lower(state, results, replicas[0])
        sent = self._add_stage(lowered, PER_REPLICA, times=len(replicas))
        of_replicas = [sent] * len(replicas)
        self._live += of_replicas
        return of_replicas

    def combine(self, index: int, sent: list[Any], numbers: list[Any]) -> Combined:
        """Lowers a collective, after which the sent arrays are freed."""
        *parts, (last, times) = self._programs.lower_collective(index, sent, numbers)
        for part, times_of_part in parts:
            self._add_stage(part, self.segments.equal_spec, times_of_part)
        specs = Combined(self.segments.equal_spec, PER_REPLICA)
        combined = self._add_stage(last, specs, times)
        # The outputs of the replicas stay alive until they are joined.
        sent_by_replicas = self._live[-len(sent) :]
        del self._live[-len(sent) :]
        self._live += [sent_by_replica.outputs for sent_by_replica in sent_by_replicas]
        self._live.append(combined)
        return combined

    def _add_stage(self, lowered: Any, specs: Any, times: int = 1) -> Any:
        """Adds a program to the stages.

        Args:
          lowered: the program.
          specs: the specs of its results.
          times: the number of times that it runs.

        Returns:
          The shapes of the results of one time.
        """
        results = with_shardings(self.segments.mesh, lowered.out_info, specs)
        # While it runs the last time, the results of the other times are alive.
        live = [*self._live, *[results] * (times - 1)]
        self.stages.append(Stage(lowered, times, live))
        return results
