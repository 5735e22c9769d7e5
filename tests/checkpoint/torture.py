"""Pods that are killed while they save, merge, commit and delete, and checks of the
checkpoints that then count.
"""

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
    """A store that pods save to.

    Attributes:
      pods: starts pods that can reach the store.
      folder: the folder of the checkpoints.
      newest: the newest step that counted after the last trial; -1 before the first.
    """

    pods: pod.Pods
    folder: str
    newest: int = -1


@dataclasses.dataclass
class Counts:
    """Counts over all trials.

    Attributes:
      trials: the number of trials.
      verified: the checkpoints that counted, summed over the trials.
      dead: the attempts without COMMIT, summed over the trials.
      bad: the differences or the error of each bad checkpoint, by step.
    """

    trials: int = 0
    verified: int = 0
    dead: int = 0
    bad: dict = dataclasses.field(default_factory=dict)

    def __str__(self):
        return (
            f"{self.trials} trials: {self.verified} checkpoints that count, each read "
            f"in full; {self.dead} attempts that do not count; {len(self.bad)} bad "
            f"{self.bad or ''}"
        )


@contextlib.contextmanager
def places(scratch, names=STORES, **faults):
    """Opens stores and starts the servers that they need; `faults` are options of the
    stand-in for GCS.
    """
    with contextlib.ExitStack() as stack:
        opened = {}
        for name in names:
            reports = scratch / name
            reports.mkdir()
            variables, folder = {}, str(scratch / "checkpoints")
            if name == "gcs":
                variables["TENSORSTORE_GCS_HTTP_URL"] = stack.enter_context(
                    harness.gcs(**faults)
                )
                folder = "gs://bucket/run"
            if name == "s3":
                url = stack.enter_context(harness.s3())
                variables = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x"}
                folder = f"s3://bucket/run?endpoint={url}&region=us-east-1"
            opened[name] = Place(pod.Pods(reports, **variables), folder)
        yield opened


def trial(place, rng, counts):
    """Starts a pod that saves one step after another, kills its processes, and verifies
    each checkpoint that counts.
    """
    count = rng.randint(1, 4)
    children = place.pods.start(
        "save until killed", place.folder, count, step=place.newest + 1
    )
    victim = rng.choice(children)
    # Each trial kills at another instant: during the first save, or some saves later.
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
    # A process may notice that process 0 is gone before it is killed itself. Any other
    # exit is an error.
    lost = "process 0, which coordinates, cannot be reached" in place.pods.logs()
    allowed = {
        -signal.SIGKILL,
        -signal.SIGABRT,
        *([1] if lost and victim == children[0] else []),
    }
    assert set(codes) <= allowed, (codes, place.pods.logs())
    (report,) = place.pods.run("verify", place.folder, 1)
    newest = max(report["steps"], default=-1)
    assert newest >= place.newest, (
        f"step {place.newest} counted and is now missing: {report['steps']}"
    )
    place.newest = newest
    counts.trials += 1
    counts.verified += len(report["steps"])
    counts.dead += report["dead"]
    counts.bad.update(report["bad"])


def save_with_faults(scratch, saves, share, fault, seed=0):
    """Saves to the stand-in for GCS with a share of faults of one kind, and verifies
    the result. No save may fail.
    """
    with places(scratch, ["gcs"], **{fault: share, "seed": seed}) as opened:
        place = opened["gcs"]
        place.pods.run("save", place.folder, 1, saves=saves)
        (report,) = place.pods.run("verify", place.folder, 1)
    return report


def run(scratch, trials, seed, names=STORES, say=print):
    """Runs trials on each store in turn; returns their counts."""
    counts = Counts()
    with places(scratch, names) as opened:
        for i in range(trials):
            rng = random.Random(f"{seed}/{i}")
            trial(opened[names[i % len(names)]], rng, counts)
            if (i + 1) % 10 == 0:
                say(str(counts))
    return counts
