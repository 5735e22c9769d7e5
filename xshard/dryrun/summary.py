"""Formats the result of a dry run."""

from typing import Any

from xshard import torus
from xshard.metrics import formatting as formatting_lib

_NAMES = {"workspace": "activations and workspace", "program": "the program itself"}


def show(result: dict[str, Any]) -> str:
    """Formats a result as text."""
    memory, chip = result["memory"], result["chip"]
    shape = " x ".join(f"{count} {axis}" for axis, count in result["mesh"].items())
    slices = f"{result['slices']} slices of " if result["slices"] > 1 else ""
    head = (
        f"{slices}{result['topology']}: {result['chips']} chips of {size(chip['hbm'])} as {shape}, "
        f"{result['examples']} examples a step"
    )
    held = formatting_lib.table(_memory_rows(memory, chip))
    # A step that does not fit, or whose program cannot be read, has only its memory.
    if "collectives" not in result:
        return f"{head}\n\n{held}"
    times = [_show_bound(limit) for limit in result["bounds"] if limit["amount"]]
    seconds = formatting_lib.scaled(result["seconds"], "s")
    rate = formatting_lib.scaled(result["examples_per_second"] or 0.0, "")
    parts = [
        f"{head}; compiled in {result['compile_seconds']:.0f} s: it fits",
        held,
        f"collectives of a step\n{formatting_lib.table(_sent(result))}",
        *_kernels(result),
        *result["warnings"],
        f"a step takes at least\n{formatting_lib.table(times)}",
        f"A step takes at least {seconds}, at most {rate} examples a second: {result['dominated_by']} dominates. "
        "Bounds, not predictions.",
    ]
    if result["estimated_cycles"]:
        parts.append(
            "Estimated by the compiler, without collectives and kernels and as if nothing overlapped: "
            f"{formatting_lib.scaled(result['estimated_cycles'], '')} cycles."
        )
    if result["unknown_loops"]:
        parts.append(
            f"{result['unknown_loops']} loops of unknown length count as one round."
        )
    parts.append(f"Peaks: {chip['source']}")
    return "\n\n".join(parts)


def warnings(rows: list[dict[str, Any]], topology: str) -> list[str]:
    """Returns a warning about collectives between chips that are not neighbors, if
    there are any.
    """
    far = [row for row in rows if row["hops"] and row["hops"] > 1]
    if not far:
        return []
    named = ", ".join(
        f"{row['kind']} over {row['over']} ({row['hops']} hops, {size(row['sent'])} a chip)"
        for row in far
    )
    shape = [int(size) for size in topology.split(":")[1].split("x")]
    good = ", ".join(map(str, torus.whole_axes(shape)))
    return [
        f"Warning: these collectives are not between neighbors on the torus: {named}. Data that crosses several "
        "links shares them with other data, and takes longer than the ICI bound. Replicas, and the devices of a "
        f"model, are neighbors where model_parallel fills whole axes of the torus: {good}."
    ]


def _memory_rows(memory: dict[str, Any], chip: dict[str, Any]) -> list[dict[str, Any]]:
    rows = []
    for name, held_bytes in memory.items():
        # 'fits' is not a size.
        if name != "fits":
            row = {
                "memory a chip": _NAMES.get(name, name.replace("_", " ")),
                "size": size(held_bytes),
                "share": f"{100 * held_bytes / chip['hbm']:.2f} %",
            }
            rows.append(row)
    return rows


def _sent(result: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {
            "kind": row["kind"],
            "over": row["over"],
            "network": "DCN" if row["between_slices"] else "ICI",
            "hops": _show_hops(row),
            "types": row["types"],
            "times": row["count"],
            "arrays": row["arrays"],
            "gives": size(row["bytes"]),
            "a chip sends": size(row["sent"]),
        }
        for row in result["collectives"]
    ]


def _kernels(result: dict[str, Any]) -> list[str]:
    """Returns the table of a step's kernels, if there are any."""
    rows = []
    for row in result["kernels"]:
        known = row["flops"] is not None
        shown = {
            "kernel": row["kernel"],
            "times": row["count"],
            "a chip does": formatting_lib.scaled(row["flops"], "FLOP")
            if known
            else "not counted",
            "moves": formatting_lib.scaled(row["hbm_bytes"], "B")
            if known
            else "not counted",
        }
        rows.append(shown)
    return [f"kernels of a step\n{formatting_lib.table(rows)}"] if rows else []


def _show_hops(row: dict[str, Any]) -> str:
    longest, mean = row["hops"], row["mean_hops"]
    if longest is None:
        return ""
    return f"{longest}" if longest == mean else f"{longest} (mean {mean:.2g})"


def _show_bound(limit: dict[str, Any]) -> dict[str, str]:
    unit = "FLOP" if limit["name"] == "compute" else "B"
    rate, seconds = limit["rate"], limit["seconds"]
    return {
        "because of": limit["name"],
        "a chip does": formatting_lib.scaled(limit["amount"], unit),
        "at most": formatting_lib.scaled(rate, f"{unit}/s")
        if rate
        else "not published",
        "time": "?" if seconds is None else formatting_lib.scaled(seconds, "s"),
    }


def size(count: float) -> str:
    """Formats a number of bytes."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"
