"""Pods that are killed while they save, merge, commit and delete; and what counts afterwards."""

import contextlib
import dataclasses
import os
import random
import signal
import time

from tests.checkpoint import harness, pod

STORES = ("disk", "gcs", "s3")


@dataclasses.dataclass
class Place:
    """A store under torture.

    Attributes:
      pods: pods that reach it.
      folder: where they save.
      newest: the newest step that has counted.
    """

    pods: pod.Pods
    folder: str
    newest: int = -1


@dataclasses.dataclass
class Counts:
    """What the trials have seen."""

    trials: int = 0
    verified: int = 0
    dead: int = 0
    bad: dict = dataclasses.field(default_factory=dict)

    def __str__(self):
        return (
            f"{self.trials} trials: {self.verified} checkpoints that count, each read whole; "
            f"{self.dead} attempts that do not; {len(self.bad)} bad {self.bad or ''}"
        )


@contextlib.contextmanager
def places(scratch, names=STORES, **faults):
    """The stores, with servers where they need them; faults are those of GCS."""
    with contextlib.ExitStack() as stack:
        made = {}
        for name in names:
            reports = scratch / name
            reports.mkdir()
            variables, folder = {}, str(scratch / "checkpoints")
            if name == "gcs":
                variables["TENSORSTORE_GCS_HTTP_URL"] = stack.enter_context(harness.gcs(**faults))
                folder = "gs://bucket/run"
            if name == "s3":
                url = stack.enter_context(harness.s3())
                variables = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x"}
                folder = f"s3://bucket/run?endpoint={url}&region=us-east-1"
            made[name] = Place(stack.enter_context(pod.pods(reports, **variables)), folder)
        yield made


def trial(place, rng, counts):
    """A pod saves one step after the other until one of its processes is killed, then the others are."""
    count = rng.randint(1, 4)
    children = place.pods.start("save until killed", place.folder, count, step=place.newest + 1)
    victim = rng.choice(children)
    # The instant of the kill is what is tried: during the first save, or some saves later.
    saves, end = rng.randint(0, 2), time.monotonic() + harness.FOREVER
    while place.pods.saved() < saves:
        assert time.monotonic() < end, place.pods.logs()
        time.sleep(0.01)
    time.sleep(rng.uniform(0, 0.7))
    os.kill(victim, signal.SIGKILL)
    time.sleep(rng.uniform(0, 0.1))
    for child in children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
    codes = place.pods.wait()
    # Who was quick has noticed that process 0 is gone. Anything else is an error of its own.
    lost = "process 0, which coordinates, cannot be reached" in place.pods.logs()
    allowed = {-signal.SIGKILL, -signal.SIGABRT, *([1] if lost and victim == children[0] else [])}
    assert set(codes) <= allowed, (codes, place.pods.logs())
    (report,) = place.pods.run("verify", place.folder, 1)
    newest = max(report["steps"], default=-1)
    assert newest >= place.newest, f"step {place.newest} counted, and is gone: {report['steps']}"
    place.newest = newest
    counts.trials += 1
    counts.verified += len(report["steps"])
    counts.dead += report["dead"]
    counts.bad.update(report["bad"])


def save_with_faults(scratch, saves, share, fault, seed=0):
    """Saves on a GCS with a share of faults of one kind, and reads what counts; none may fail."""
    with places(scratch, ["gcs"], **{fault: share, "seed": seed}) as made:
        place = made["gcs"]
        place.pods.run("save", place.folder, 1, saves=saves)
        (report,) = place.pods.run("verify", place.folder, 1)
    return report


def run(scratch, trials, seed, names=STORES, say=print):
    """Trials in turn on each store; what they have seen."""
    counts = Counts()
    with places(scratch, names) as made:
        for i in range(trials):
            rng = random.Random(f"{seed}/{i}")
            trial(made[names[i % len(names)]], rng, counts)
            if (i + 1) % 10 == 0:
                say(str(counts))
    return counts
