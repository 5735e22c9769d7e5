"""Formats the result of a dry run."""

from typing import Any

from xshard.base import formatting as formatting_lib
from xshard.base import torus_layout
from xshard.dryrun import result as result_lib
from xshard.metrics import chips

_NAMES = {
    "workspace": "activations and workspace",
    "program": "the program itself",
    "host": "on the host, for a chip",
}


def show(result: result_lib.Result) -> str:
    """Formats a result as text."""
    memory = result["memory"]
    chip = result["chip"]
    shape = " x ".join(f"{count} {axis}" for axis, count in result["mesh"].items())
    slices = f"{result['slices']} slices of " if result["slices"] > 1 else ""
    head = (
        f"{slices}{result['topology']}: {result['chips']} chips of {size(chip['hbm'])} "
        f"as {shape}, {result['examples']} examples a step"
    )
    memory_table = formatting_lib.table(_memory_rows(memory, chip))
    # A step that does not fit, or whose program cannot be read, has only its memory.
    if "collectives" not in result:
        return f"{head}\n\n{memory_table}"
    times = [_bound_row(bound) for bound in result["bounds"] if bound["amount"]]
    seconds = formatting_lib.scaled(result["seconds"], "s")
    rate = formatting_lib.scaled(result["examples_per_second"] or 0.0, "")
    parts = [
        f"{head}; compiled in {result['compile_seconds']:.0f} s: it fits",
        memory_table,
        f"collectives of a step\n{formatting_lib.table(_collective_rows(result))}",
        *_kernels(result),
        *result["warnings"],
        *_exchanges(result),
        f"a step takes at least\n{formatting_lib.table(times)}",
        f"A step takes at least {seconds}, at most {rate} examples a second: "
        f"{result['dominated_by']} dominates. Bounds, not predictions.",
    ]
    if result["estimated_cycles"]:
        cycles = formatting_lib.scaled(result["estimated_cycles"], "")
        parts.append(
            "Estimated by the compiler, without collectives and kernels and as if "
            f"nothing overlapped: {cycles} cycles."
        )
    if result["unknown_loops"]:
        parts.append(
            f"{result['unknown_loops']} loops of unknown length count as one round."
        )
    parts.append(f"Peaks: {chip['source']}")
    return "\n\n".join(parts)


def warnings(rows: list[result_lib.Collective], topology: str) -> list[str]:
    """Returns a warning about collectives between chips that are not neighbors, if
    there are any.

    Args:
      rows: the rows of collectives.
      topology: the chip and the shape of a slice, such as v5e:16x16.
    """
    far = []
    for row in rows:
        if row["hops"] and row["hops"] > 1:
            far.append(
                f"{row['kind']} over {row['over']} ({row['hops']} hops, "
                f"{size(row['sent'])} a chip)"
            )
    if not far:
        return []
    shape = chips.slice_shape(topology)
    good = ", ".join(map(str, torus_layout.whole_axes(shape)))
    return [
        "Warning: these collectives are not between neighbors on the torus: "
        f"{', '.join(far)}. Data that crosses several links shares them with other "
        "data, and takes longer than the ICI bound. Replicas, and the devices of a "
        "model, are neighbors where model_parallel fills whole axes of the torus: "
        f"{good}."
    ]


def _memory_rows(memory: dict[str, int], chip: dict[str, Any]) -> list[dict[str, Any]]:
    rows = []
    for name, num_bytes in memory.items():
        # Whether the step fits is not a size.
        if name == "fits":
            continue
        row = {
            "memory a chip": _NAMES.get(name, name.replace("_", " ")),
            "size": size(num_bytes),
            "share": f"{100 * num_bytes / chip['hbm']:.2f} %",
        }
        if name == "host":
            row["share"] = ""
        rows.append(row)
    return rows


def _exchanges(result: result_lib.Result) -> list[str]:
    """Returns a sentence about what an outer rule sends, if there is one."""
    every = result.get("exchange_every_steps")
    if not every:
        return []
    rows = [row for row in result["collectives"] if row["is_conditional"]]
    between = sum(row["sent"] for row in rows if row["between_slices"])
    within = sum(row["sent"] for row in rows if not row["between_slices"])
    return [
        f"Slices train apart: a chip sends {size(between)} to other slices in "
        f"{every} steps, {size(between / every)} a step on average, and "
        f"{size(within)} within its slice for that. In the table the collectives of an "
        f"exchange count as if it were made in this step; the bounds count 1/{every} "
        "of them."
    ]


def _collective_rows(result: result_lib.Result) -> list[dict[str, Any]]:
    every = result.get("exchange_every_steps")
    rows = []
    for row in result["collectives"]:
        times = f"{row['count']}"
        if every and row["is_conditional"]:
            times += f" in {every} steps"
        longest = row["hops"]
        hops = "" if longest is None else f"{longest}"
        if longest != row["mean_hops"]:
            hops += f" (mean {row['mean_hops']:.2g})"
        shown = {
            "kind": row["kind"],
            "over": row["over"],
            "network": "DCN" if row["between_slices"] else "ICI",
            "hops": hops,
            "types": row["types"],
            "times": times,
            "arrays": row["arrays"],
            "gives": size(row["bytes"]),
            "a chip sends": size(row["sent"]),
        }
        rows.append(shown)
    return rows


def _kernels(result: result_lib.Result) -> list[str]:
    """Returns the table of a step's kernels, if there are any."""
    rows = []
    for row in result["kernels"]:
        flops = moved = "not counted"
        if row["flops"] is not None and row["hbm_bytes"] is not None:
            flops = formatting_lib.scaled(row["flops"], "FLOP")
            moved = formatting_lib.scaled(row["hbm_bytes"], "B")
        shown = {
            "kernel": row["kernel"],
            "times": row["count"],
            "a chip does": flops,
            "moves": moved,
        }
        rows.append(shown)
    if not rows:
        return []
    return [f"kernels of a step\n{formatting_lib.table(rows)}"]


def _bound_row(bound: result_lib.Bound) -> dict[str, str]:
    unit = "FLOP" if bound["name"] == "compute" else "B"
    rate = "not published"
    if bound["rate"]:
        rate = formatting_lib.scaled(bound["rate"], f"{unit}/s")
    time = "?"
    if bound["seconds"] is not None:
        time = formatting_lib.scaled(bound["seconds"], "s")
    return {
        "because of": bound["name"],
        "a chip does": formatting_lib.scaled(bound["amount"], unit),
        "at most": rate,
        "time": time,
    }


def size(count: float) -> str:
    """Formats a number of bytes."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"
