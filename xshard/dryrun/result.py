"""The result of a dry run, in the form of its JSON."""

from typing import Any, TypedDict


class Collective(TypedDict):
    """The collectives of a step that are of one kind, over the same devices and types.

    Attributes:
      kind: the operation, as XLA names it.
      over: the axes of the mesh.
      types: the types of the arrays.
      count: how often they run in a step.
      arrays: the number of arrays.
      bytes: the bytes that they give a chip.
      sent: the bytes that a chip sends for them.
      between_slices: whether data leaves a slice.
      is_conditional: whether they are in a branch.
      hops: the most links of the torus between two chips; None without a torus.
      mean_hops: the mean number of links.
    """

    kind: str
    over: str
    types: str
    count: int
    arrays: int
    bytes: int
    sent: int
    between_slices: bool
    is_conditional: bool
    hops: int | None
    mean_hops: float | None


class Kernel(TypedDict):
    """A Pallas kernel of a step.

    Attributes:
      kernel: its name.
      count: how often it runs in a step.
      flops: its FLOPs in a step, on a chip; None: not counted.
      hbm_bytes: the bytes that it moves; None: not counted.
    """

    kernel: str
    count: int
    flops: int | None
    hbm_bytes: int | None


class Bound(TypedDict):
    """A lower bound on a step's time by one resource.

    Attributes:
      name: the resource: 'compute', 'memory', 'ICI', 'DCN' or 'host'.
      amount: a chip's use of it in a step: FLOPs, or bytes.
      rate: the peak per second; None: not published.
      seconds: amount / rate; None: unknown.
    """

    name: str
    amount: int
    rate: float | None
    seconds: float | None


class Result(TypedDict, total=False):
    """What a step needs of a chip. Sizes are in bytes of a chip, times in seconds.

    Before a step is compiled there are the entries up to `memory`. If it does not fit,
    or its program cannot be read, there are no more than `compile_seconds` besides.

    Attributes:
      topology: the chip and the shape of a slice.
      slices: the number of slices.
      chips: the number of chips of all slices.
      mesh: the sizes of the mesh's axes.
      examples: the examples of a step.
      exchange_every_steps: the steps between exchanges of slices that train apart; 0 if
        they do not.
      chip: the fields of the chip.
      memory: the sizes of what a chip holds; and `fits`, once that is known.
      compile_seconds: the time of the compilation.
      collectives: the collectives.
      warnings: warnings about them, as sentences.
      kernels: the kernels.
      bounds: the bounds on a step's time.
      estimated_cycles: the compiler's estimate.
      unknown_loops: the number of loops of unknown length.
      xla_bytes_accessed: the traffic to memory, as XLA counts it.
      seconds: the largest bound.
      dominated_by: its name.
      examples_per_second: the rate that it allows; None if it is 0.
    """

    topology: str
    slices: int
    chips: int
    mesh: dict[str, int]
    examples: int
    exchange_every_steps: int
    chip: dict[str, Any]
    memory: dict[str, int]
    compile_seconds: float
    collectives: list[Collective]
    warnings: list[str]
    kernels: list[Kernel]
    bounds: list[Bound]
    estimated_cycles: int
    unknown_loops: int
    xla_bytes_accessed: float
    seconds: float
    dominated_by: str
    examples_per_second: float | None
