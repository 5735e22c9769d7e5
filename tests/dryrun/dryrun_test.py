"""The dry run from the user's side.

Some tests need the TPU compiler, which is in the large package libtpu. They are skipped
where it is not installed.
"""

import importlib.util
import json
import math
import os
import subprocess
import sys
import types

import jax
import numpy as np
import pytest

from tests import forks, pods, toy
from xshard import errors, logical, mesh
from xshard.dryrun import analysis, costs, summary
from xshard.metrics import chips
from xshard.training import state as state_lib

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="libtpu is not installed: python -m pip install -r "
    "requirements/dryrun_lock.txt",
)
DIGITS = ("--config=configs/digits.py", "--topology=v5e:4x4")
TOY = ("--config=tests/toy.py", "--topology=v5e:2x2")


def run(*arguments, before=""):
    """Runs the dry-run program; returns its exit code, standard output and standard
    error.
    """
    program = (
        f"import sys; {before}\n"
        "from xshard.dryrun import __main__ as dryrun\n"
        "sys.exit(dryrun.run())"
    )
    environment = {**os.environ, "PYTHONPATH": forks.python_path()}
    environment.pop("JAX_PLATFORMS", None)
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True,
        text=True,
        env=environment,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("chip", chips.CHIPS.values(), ids=chips.CHIPS)
def test_chip_figures_are_plausible_and_have_a_source(chip):
    assert chip.source == f"https://docs.cloud.google.com/tpu/docs/{chip.name}"
    assert 1e14 < chip.flops < 1e15 and 2**34 <= chip.hbm < 2**37
    assert chip.flops > 100 * chip.hbm_rate > 100 * chip.ici_rate > 1e13
    assert chip.dcn_rate is None or chip.dcn_rate < chip.ici_rate / 30


@pytest.mark.parametrize(
    "topology",
    ["v5e:1x1", "v5e:16x16", "v6e:4x8", "v4:2x2x1", "v5p:4x4x8", "v5p:16x16x24"],
)
def test_existing_slice_shapes_are_accepted(topology):
    assert chips.parse_topology(topology).name == topology.split(":")[0]


@pytest.mark.parametrize(
    "topology, rule",
    [
        ("v5e", "must be a chip and the shape of a slice, as v5e:16x16"),
        ("v5e:4", "there is no such slice of v5e; there are 1x1, 2x2"),
        ("v5e:0x4", "no such slice"),
        ("v5e:32x32", "no such slice"),
        ("v5p:8x4x4", "multiples of 4 in ascending order"),
        ("v5p:16x16x28", "at most 6144 chips"),
        ("v7x:4x4x4", "must be one of v4, v5e, v5p, v6e"),
    ],
)
def test_slice_shapes_that_do_not_exist_are_refused(topology, rule):
    with pytest.raises(ValueError, match=rule) as e:
        chips.parse_topology(topology)
    assert f"--topology={topology}" in str(e.value)


def test_bounds_are_amounts_divided_by_rates():
    chip = chips.CHIPS["v5e"]
    limits = analysis.bounds(chip, costs.Cost(197 * 10**12, 819 * 10**9), 10**11, 10**9)
    assert [limit["name"] for limit in limits] == ["compute", "memory", "ICI", "DCN"]
    assert [limit["seconds"] for limit in limits] == pytest.approx([1, 1, 0.5, 0.32])
    assert analysis.bounds(chips.CHIPS["v4"], costs.Cost(), 0, 1)[3]["seconds"] is None
    assert analysis.bounds(chips.CHIPS["v4"], costs.Cost(), 0, 0)[3]["seconds"] == 0


def test_shard_bytes_count_a_single_device():
    places = mesh.make_mesh(None, model=2)
    rows = mesh.sharding(places, "model")
    tree = {
        "w": jax.ShapeDtypeStruct((8, 3), np.float32, sharding=rows),
        "b": jax.ShapeDtypeStruct((3,), np.float16, sharding=mesh.sharding(places)),
    }
    assert analysis.shard_bytes(tree) == 4 * 3 * 4 + 3 * 2
    assert analysis.largest(tree, 1) == [("w", 48)]


HLO = """
ENTRY %main (x: f32[1024,1024], w: f32[1024,1024]) -> f32[1024,1024] {
  %x = f32[1024,1024]{1,0} parameter(0)
  %w = f32[1024,1024]{1,0} parameter(1)
  %y = f32[1024,1024]{1,0} convolution(%x, %w), dim_labels=bf_io->bf
  ROOT %all-reduce = f32[1024,1024]{1,0} all-reduce(%y), \
      replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=%sum
}
"""


class Compiled:
    """A stand-in for a compiled step."""

    def as_text(self):
        return HLO

    def cost_analysis(self):
        return {"bytes accessed": 9e6}

    def memory_analysis(self):
        return types.SimpleNamespace(
            temp_size_in_bytes=2**22,
            generated_code_size_in_bytes=2**10,
            argument_size_in_bytes=2**22,
            peak_memory_in_bytes=3 * 2**22,
            host_argument_size_in_bytes=0,
            host_temp_size_in_bytes=0,
        )


def described(compiled=None, the_mesh=None, times=1, live=()):
    chip = chips.CHIPS["v5e"]
    result = {
        "topology": "v5e:2x4",
        "slices": 1,
        "chips": 8,
        "mesh": {"replica": 8},
        "examples": 64,
        "chip": {"hbm": chip.hbm, "source": chip.source},
        "memory": {"parameters": 2**22},
        "compile_seconds": 1.0,
    }
    stages = [logical.Stage(compiled or Compiled(), times, live)]
    return analysis.analyze(result, stages, chip, the_mesh or replicas())


def replicas():
    chips_of_a_slice = np.array(pods.make("v5e:2x4"))
    return jax.sharding.Mesh(chips_of_a_slice, "replica")


def check(result):
    """Checks what must hold of every result; returns its bounds by name."""
    json.dumps(result, allow_nan=False)
    limits = {limit["name"]: limit for limit in result["bounds"]}
    assert list(limits) == ["compute", "memory", "ICI", "DCN"]
    assert result["seconds"] == max(limit["seconds"] or 0 for limit in limits.values())
    assert result["seconds"] == limits[result["dominated_by"]]["seconds"]
    assert result["examples_per_second"] == pytest.approx(
        result["examples"] / result["seconds"]
    )
    assert result["memory"]["fits"] is True and result["estimated_cycles"] >= 0
    assert 0 < result["memory"]["peak"] < result["chip"]["hbm"]
    networks = {True: "DCN", False: "ICI"}
    for between, name in networks.items():
        rows = [
            row for row in result["collectives"] if row["between_slices"] is between
        ]
        assert sum(row["sent"] for row in rows) == limits[name]["amount"]
    return limits


def test_a_compiled_step_is_described_and_shown():
    result = described()
    limits = check(result)
    array = 4 * 2**20
    assert limits["compute"]["amount"] == 2**31
    assert limits["memory"]["amount"] == 5 * array
    assert limits["ICI"]["amount"] == 2 * 7 * array // 8
    assert result["dominated_by"] == "ICI" and result["xla_bytes_accessed"] == 9e6
    shown = summary.show(result)
    for line in (
        "v5e:2x4: 8 chips of 16.00 GiB as 8 replica, 64 examples a step; compiled in "
        "1 s: it fits",
        "activations and workspace  4 MiB",
        "kind        over     network  hops  types  times  arrays  gives  a chip sends",
        "all-reduce  replica  ICI      1     f32    1      1       4 MiB  7 MiB",
        "compute     2.15 GFLOP   197 TFLOP/s  10.9 us",
        "ICI         7.34 MB      200 GB/s     36.7 us",
        "A step takes at least 36.7 us, at most 1.74 M examples a second: ICI "
        "dominates.",
        "Peaks: https://docs.cloud.google.com/tpu/docs/v5e",
    ):
        assert line in shown, shown
    assert "DCN" not in shown and "Warning" not in shown and result["warnings"] == []


def test_a_stage_counts_as_often_as_it_is_run():
    live_array = jax.ShapeDtypeStruct(
        (2**21,), np.float32, sharding=mesh.sharding(replicas())
    )
    once, thrice = described(), described(times=3, live=[live_array])
    for name in ("compute", "memory", "ICI"):
        assert check(thrice)[name]["amount"] == 3 * check(once)[name]["amount"]
    # The compiler's peak includes the arguments, so only the rest of the live array is
    # added.
    assert thrice["memory"]["peak"] == once["memory"]["peak"] + 2**23 - 2**22


def test_a_collective_between_distant_chips_causes_a_warning():
    class Apart(Compiled):
        def as_text(self):
            return HLO.replace("{{0,1,2,3,4,5,6,7}}", "{{0,2},{1,3},{4,6},{5,7}}")

    # The chips are in the order of their hosts, two in a row of the slice, so chips 0
    # and 2 are neighbors.
    places = jax.sharding.Mesh(
        np.reshape(pods.make("v5e:2x4"), (4, 2)), ("replica", "model")
    )
    result = described(Apart(), places)
    (row,) = result["collectives"]
    assert (row["over"], row["hops"], row["mean_hops"]) == ("within replica", 1, 1.0)
    # In the order that `make_mesh` chooses, they are two hops apart.
    places = jax.sharding.Mesh(
        mesh.make_mesh(devices=pods.make("v5e:2x4")).devices.reshape(4, 2),
        ("replica", "model"),
    )
    result = described(Apart(), places)
    (row,) = result["collectives"]
    assert (row["hops"], row["mean_hops"]) == (2, 2.0)
    (warning,) = result["warnings"]
    for part in (
        "all-reduce over within replica (2 hops, 4 MiB a chip)",
        "model_parallel",
        "1, 2, 4, 8.",
    ):
        assert part in warning, warning
    assert warning in summary.show(
        result
    ) and "within replica  ICI      2 " in summary.show(result)


def test_an_unreadable_program_gives_one_message_and_its_memory():
    class Newer(Compiled):
        def as_text(self):
            raise jax.errors.JaxRuntimeError(
                "INTERNAL: RET_CHECK failure (hlo_instruction.cc:463)"
            )

    with pytest.raises(analysis.UnreadableError, match="RET_CHECK") as e:
        described(Newer())
    for part in (
        "compiles and fits on v5e:2x4",
        f"jax {jax.__version__} cannot read",
        "[dryrun]",
    ):
        assert part in str(e.value)
    assert e.value.result["memory"]["peak"] == 3 * 2**22
    assert "peak                       12 MiB" in summary.show(e.value.result)


def test_the_compilers_estimate_is_shown_beside_the_bounds():
    result = described()
    assert "Estimated by the compiler" not in summary.show(result)
    result["estimated_cycles"] = 22_546_739_582
    assert "as if nothing overlapped: 22.5 G cycles.\n" in summary.show(result)


def test_an_unpublished_rate_gives_no_bound():
    result = described()
    result["bounds"][3] |= {"amount": 10, "rate": None, "seconds": None}
    assert "DCN         10 B         not published  ?" in summary.show(result)


@pytest.mark.parametrize(
    "needed, first",
    [
        ("30.00G", "Hold parameters and optimizer state in shards"),
        ("90.00G", "Make activations smaller"),
    ],
)
def test_a_step_that_does_not_fit_is_reported_with_remedies(needed, first):
    places = mesh.make_mesh()
    state = state_lib.abstract_state(
        toy.Toy(toy.get_config()), places, 0, {"x": np.ones((1, 3)), "y": np.ones(1)}
    )
    memory = {"parameters": 8 * 2**30, "optimizer_state": 16 * 2**30, "batch": 2**20}
    result = {"topology": "v5e:4x4", "memory": memory}
    words = f"the total memory required ({needed}) exceeds available HBM (15.75G)."
    e = analysis._compiler_error(RuntimeError(words), result, state)
    assert (
        isinstance(e, analysis.DoesNotFitError) and e.result["memory"]["fits"] is False
    )
    message = str(e)
    assert f"needs {needed[:-1]} GiB a chip of the 15.75 GiB" in message
    assert f"{float(needed[:-1]) - 15.75:.2f} GiB too much" in message
    assert "parameters 8.00 GiB, optimizer state 16.00 GiB, batch 1 MiB" in message
    assert "params/linear/w 12 B" in message
    remedies = message.split("12 B. ")[1]
    assert (
        remedies.startswith(first)
        and "model_parallel" in remedies
        and "micro_batches" in remedies
    )


def test_a_compiler_error_is_one_message_with_its_text():
    refused = RuntimeError("UNIMPLEMENTED: no such collective")
    e = analysis._compiler_error(refused, {"topology": "v5e:2x2", "slices": 2}, None)
    assert isinstance(e, errors.UserError)
    for part in (
        "cannot compile the step for v5e:2x2, slices=2",
        "UNIMPLEMENTED: no such",
        "[dryrun]",
    ):
        assert part in str(e)


def test_a_missing_libtpu_is_one_message():
    code, out, err = run(*TOY, before="sys.modules['libtpu'] = None")
    assert (code, out) == (1, "")
    assert err.startswith("error: libtpu is not installed") and "Traceback" not in err
    for part in ("pip install '.[dryrun]'", "'xshard[dryrun]'", "200 MB", "no TPU"):
        assert part in err


# The flags, and parts of the expected message. Each case is refused before anything is
# compiled.
BAD = {
    "no topology": (
        ["--config=tests/toy.py"],
        ["--config and --topology are needed", "v5e:16x16"],
    ),
    "topology": (
        [*TOY, "--topology=v5e:3x5"],
        ["--topology=v5e:3x5", "no such slice", "4x8"],
    ),
    "slices": ([*TOY, "--slices=0"], ["--slices=0", "positive"]),
    "a slice for each process": (
        [*TOY, "--config.slices=0"],
        ["slices=0 is one slice for each process", "--slices=2"],
    ),
    "many slices": ([*TOY, "--slices=512"], ["--slices=512", "at most 511 slices"]),
    "flag": ([*TOY, "--topologie=v5e:2x2"], ["topologie", "topology", "--help"]),
    "key": (
        [*TOY, "--config.batch_sise=3"],
        ["--config.batch_sise", "did you mean batch_size"],
    ),
    "no flag": ([*TOY, "more"], ["more: arguments begin with '--'"]),
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_message(case):
    arguments, parts = BAD[case]
    code, out, err = run(*arguments)
    assert (
        (code, out) == (1, "") and err.startswith("error: ") and "Traceback" not in err
    )
    for part in parts:
        assert part in err, err


def test_help():
    code, out, err = run("--help")
    assert code == 0 and err == ""
    for part in (
        "--config",
        "--topology",
        "--slices",
        "--[no]json",
        "Exit codes",
    ):
        assert part in out


@pytest.mark.sample(2)
@needs_libtpu
@pytest.mark.parametrize(
    "flags, message",
    [
        (
            ["--config.batch_size=10"],
            "batch_size=10 must be a positive multiple of replicas x micro_batches = "
            "4; the nearest: 8 or 12",
        ),
        (
            ["--config.group_assignment=((0,1),(2,3),(4,5))"],
            "group_assignment=[[0, 1], [2, 3], [4, 5]] does not fit",
        ),
        (
            ["--config.model_parallel=3"],
            "model_parallel=3 must divide the number of devices, 4",
        ),
        (["--config.precision=low"], "precision='low' is not a jmp policy"),
    ],
)
def test_a_config_that_does_not_fit_the_pod_is_refused(flags, message):
    code, out, err = run(*TOY, *flags)
    assert (code, out) == (1, "") and err.startswith(f"error: {message}"), err


@pytest.mark.sample(1)
@needs_libtpu
@pytest.mark.parametrize("slices", [1, 2])
def test_a_real_step_is_compiled_for_an_absent_pod(slices, tmp_path, monkeypatch):
    # The environment sets a compilation cache. A dry run must not write to it: it could
    # not read its programs back.
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path))
    code, out, err = run(
        *DIGITS, "--json", f"--slices={slices}", "--config.batch_size=4096"
    )
    assert (code, err) == (0, "") and not list(tmp_path.iterdir())
    result = json.loads(out)
    limits = check(result)
    assert result["chips"] == 16 * slices == math.prod(result["mesh"].values())
    # The network of configs/digits.py has 85,450 float32 parameters, and Adam keeps two
    # moments of each.
    assert result["memory"]["parameters"] == 4 * 85450
    assert 2 * 4 * 85450 <= result["memory"]["optimizer_state"] < 2 * 4 * 85450 + 100
    assert result["memory"]["batch"] == 4096 // 16 // slices * (64 + 1) * 4
    over = {row["over"] for row in result["collectives"]}
    # A reduction over several slices scatters within each slice, in two steps.
    assert over == (
        {"replica", "within replica", "slice"} if slices > 1 else {"replica"}
    )
    assert (limits["DCN"]["amount"] > 0) is (slices > 1)
    # At least the products of the two convolutions and the two dense layers, forward
    # and backward.
    products = 22 * 22 * 24 + 22 * 22 * 24 * 48 // 4 + 768 * 96 + 96 * 10
    assert limits["compute"]["amount"] >= 2 * 2 * products * 256 // slices
    # The step reads and writes the parameters and the moments.
    assert limits["memory"]["amount"] >= 2 * 3 * 4 * 85450
    assert result["unknown_loops"] == 0 and result["estimated_cycles"] > 1000


@needs_libtpu
def test_an_exchange_of_slices_counts_as_its_part_of_a_step():
    code, out, err = run(*TOY, "--json", "--slices=2", "--config.outer.every_steps=10")
    assert (code, err) == (0, "")
    result = json.loads(out)
    assert result["exchange_every_steps"] == 10
    (between,) = [row for row in result["collectives"] if row["between_slices"]]
    assert between["is_conditional"] and between["over"] == "group"
    # Each of the network's 4 small arrays is padded to a block of 256 numbers, and each
    # of 4 replicas sends its part of them. Of two slices, each sends half of its part,
    # and half of the sums.
    sent = between["sent"]
    assert sent == 4 * 256 * 4 / 4
    limits = {limit["name"]: limit["amount"] for limit in result["bounds"]}
    assert limits["DCN"] == round(sent / 10)
    assert f"sends {summary.size(sent)} to other slices in 10 steps" in " ".join(
        summary.show(result).split()
    )


@needs_libtpu
def test_what_lies_on_the_host_is_counted_by_itself():
    flags = ("--config.model.hidden=1024", "--config.batch_size=4096", "--json")
    results = []
    for memory in ("device", "pinned_host"):
        code, out, err = run(*DIGITS, *flags, f"--config.slots_memory={memory}")
        assert code == 0, err
        results.append(json.loads(out))
    device, host = (result["memory"] for result in results)
    # The count and the loss scale stay on the device. TPUs pad small arrays.
    slots = device["optimizer_state"] - host["optimizer_state"]
    assert host["optimizer_state"] < 100 and "host" not in device
    assert slots <= host["host"] < 1.2 * slots + 2**20
    assert host["peak"] < device["peak"] + slots
    *_, bound = results[1]["bounds"]
    # There and back.
    assert bound["name"] == "host" and bound["amount"] >= 1.9 * slots
    assert bound["seconds"] is None


@pytest.mark.sample(0.4)
@needs_libtpu
def test_a_model_that_does_not_fit_gives_one_message():
    code, out, err = run(*DIGITS, "--json", "--config.model.hidden=3000000")
    memory = json.loads(out)["memory"]
    assert (
        code == 1 and memory["fits"] is False and memory["needed"] > memory["available"]
    )
    for part in (
        "does not fit on v5e:4x4",
        "GiB too much",
        "hidden/w 8.58 GiB",
        "model_parallel",
    ):
        assert part in err, err
    assert err.startswith("error: ") and "Traceback" not in err


@pytest.mark.long
@needs_libtpu
def test_attention_kernels_of_a_language_model_are_counted():
    length, heads, size, parts, layers = 256, 4, 64, 2, 3
    code, out, err = run(
        "--config=configs/lm.py",
        "--topology=v5e:2x2",
        "--json",
        "--config.batch_size=4",
        "--config.micro_batches=2",
        f"--config.model_parallel={parts}",
        f"--config.text.length={length}",
        f"--config.model.layers={layers}",
        f"--config.model.heads={heads}",
        f"--config.model.width={heads * size}",
        "--config.model.feed_forward=128",
        "--config.model.remat=True",
    )
    assert (code, err) == (0, "")
    result = json.loads(out)
    check(result)
    actual = {row["kernel"]: row for row in result["kernels"]}
    # A micro-batch is one sequence, and each device computes its share of the heads.
    # With remat, each layer runs its forward kernel twice.
    times = layers * 2
    expected = {
        "fwd_residuals": (2, 2 * times),
        "dkv_no_residuals": (4, times),
        "dq_no_residuals": (3, times),
    }
    for phase, (products, count) in expected.items():
        row = actual.pop(f"splash_mha_{phase}")
        scores = heads // parts * length * (length + 1) // 2
        assert (row["count"], row["flops"]) == (
            count,
            count * 2 * products * scores * size,
        )
        # At most ten arrays, each moved once. A row sum occupies 128 float32 values of
        # memory, so the limit takes as many for each position of every array.
        assert row["hbm_bytes"] <= count * 10 * heads // parts * length * 128 * 4
    assert not actual


TOPOLOGIES = (
    ("v4:2x2x1", 1),
    ("v4:4x4x4", 1),
    ("v4:8x8x8", 1),
    ("v5e:1x1", 1),
    ("v5e:2x4", 1),
    ("v5e:16x16", 2),
    ("v5p:2x2x2", 1),
    ("v5p:4x4x8", 4),
    ("v5p:8x8x16", 1),
    ("v6e:4x4", 1),
    ("v6e:8x16", 4),
)
# Prints the attributes of each device. Devices of a single slice may have no
# slice_index; 0 stands in for it.
DEVICES = """
import json
from xshard.metrics import chips
from xshard.dryrun import analysis

def described(device):
    names = ("id", "device_kind", "process_index", "core_on_chip", "platform")
    values = [getattr(device, name) for name in names]
    return [*values, *device.coords, getattr(device, "slice_index", 0)]

for topology, slices in json.loads(sys.argv[1]):
    devices = analysis._devices(topology, chips.parse_topology(topology), slices)
    print(json.dumps([described(device) for device in devices]))
"""


def run_program(program, *arguments):
    """Runs a program in its own process, which loads libtpu; returns its output lines,
    decoded from JSON.
    """
    environment = {**os.environ, "PYTHONPATH": forks.python_path()}
    done = subprocess.run(
        [sys.executable, "-c", f"import sys\n{program}", *arguments],
        capture_output=True,
        text=True,
        env=environment,
        check=True,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


@needs_libtpu
def test_stand_in_chips_match_libtpus_description():
    printed = run_program(DEVICES, json.dumps(TOPOLOGIES))
    for (topology, slices), actual in zip(TOPOLOGIES, printed, strict=True):
        expected = [
            [
                chip.id,
                chip.device_kind,
                chip.process_index,
                chip.core_on_chip,
                chip.platform,
                *chip.coords,
                chip.slice_index,
            ]
            for chip in pods.make(topology, slices)
        ]
        assert actual == expected, topology


SCATTERED = """
import jax, json
from xshard import mesh as mesh_lib
from xshard.metrics import chips
from xshard.dryrun import analysis, collectives
from xshard.optimizers import layouts as layouts_lib
from xshard.optimizers import shards
for topology, slices in json.loads(sys.argv[1]):
    devices = analysis._devices(topology, chips.parse_topology(topology), slices)
    mesh = mesh_lib.make_mesh(slices=slices, devices=devices)
    scatter, gather = mesh_lib.torus_steps(mesh)

    def update(x):
        steps = {"scatter_steps": scatter, "gather_steps": gather}
        count = mesh.shape["replica"]
        layouts = layouts_lib.of_params({"m": {"w": x}}, count)
        parts = shards.Partition(layouts, count, "replica", **steps)
        layout = parts.layouts["m/w"]
        part = jax.lax.psum(parts.scatter(layout, x + 1), "slice")
        return parts.gather(layout, 2 * part)

    mapped = jax.shard_map(
        update, mesh=mesh, in_specs=jax.P(), out_specs=jax.P(), check_vma=False
    )
    shape = jax.ShapeDtypeStruct((2048, 2048), "float32")
    compiled = jax.jit(mapped).lower(shape).compile()
    print(json.dumps(collectives.rows(mesh, collectives.of(compiled))))
"""
PLACES = (
    ("v5e:4x4", 1),
    ("v5e:16x16", 2),
    ("v6e:8x8", 1),
    ("v5p:4x4x8", 2),
    ("v4:4x4x4", 1),
)


@pytest.mark.sample(0.4)
@needs_libtpu
def test_scatter_and_gather_over_a_slice_send_to_neighbors_only():
    whole = 4 * 2048 * 2048
    printed = run_program(SCATTERED, json.dumps(PLACES))
    for place, rows in zip(PLACES, printed, strict=True):
        inside = [row for row in rows if not row["between_slices"]]
        assert {row["hops"] for row in inside} == {1}, (place, rows)
        scattered = [row["sent"] for row in inside if row["kind"] == "reduce-scatter"]
        assert 0.9 * whole < sum(scattered) < whole, (place, rows)
        # On a plane the gather takes as many steps as the scatter. On a torus of three
        # axes it takes one step, which XLA compiles to an all-reduce.
        is_plane = place[0].startswith(("v5e", "v6e"))
        summed = [row["bytes"] for row in inside if row["kind"] == "all-reduce"]
        assert sum(summed) == (0 if is_plane else whole), (place, rows)
