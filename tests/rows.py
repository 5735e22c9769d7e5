"""What a run has logged, for comparisons."""

import json


def read(directory):
    """The rows of a work directory."""
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def same_bits(directory):
    """Its rows as text, but for what differs between runs of the same bits."""
    return [
        json.dumps({name: value for name, value in row.items() if not name.startswith("perf/")})
        for row in read(directory)
    ]


def results(directory):
    """Its results, but for the run's own name."""
    found = json.loads((directory / "results.json").read_text())
    assert found.pop("run")
    return found
