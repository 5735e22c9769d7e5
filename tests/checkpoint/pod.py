"""Pods of real JAX processes that save and restore. Each process writes its results to
a file that its task names.
"""

import dataclasses
import itertools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

from tests import forks
from tests.checkpoint import harness
from xshard import checkpoint, mesh
from xshard.checkpoint import agreement, leaves
from xshard.checkpoint import arrays as arrays_lib
from xshard.checkpoint import format as format_lib
from xshard.files import buckets, claim

DEVICES = 2
# Divisible by the number of devices of every pod of 1 to 4 processes.
SIZE = 24


@dataclasses.dataclass
class Task:
    """A task for the processes of a pod.

    Attributes:
      action: 'save', 'save until killed', 'restore' the newest checkpoint, 'restore
        without a disk' that only process 0 has, or 'verify' all checkpoints that count;
        or, of a tree of which each process has a copy, 'save copies', 'save unequal
        copies' or 'save other shapes'.
      folder: the folder of the checkpoints.
      count: the number of processes.
      model: the number of devices that hold one replica's arrays together.
      step: the first step to save.
      report: the prefix of the files that the processes write.
      port: the port on which the processes connect.
      saves: the number of steps to save.
    """

    action: str
    folder: str
    count: int
    model: int
    step: int
    report: str
    port: int = 0
    saves: int = 1


def host_state(step):
    """Returns the state of a step, as pairs of an array and its partition spec."""
    rng = np.random.default_rng(step)

    def noise(*shape, dtype=np.float32):
        return rng.standard_normal(shape, np.float32).astype(dtype)

    return {
        "params": {
            "grouped/w": (noise(2, SIZE, SIZE), ("group", None, "model")),
            "along both": (noise(SIZE, SIZE, dtype=jnp.bfloat16), ("model", "replica")),
            # All processes hold this array, so each writes a part of it.
            "large": (noise(SIZE * 1000, 4), ()),
            "half": (noise(2, 5, dtype=np.float16), ("group",)),
        },
        "loss_scale": (np.float32(2.0 ** (step % 16)), ()),
        "good_steps": (np.array([step, 7], np.int32), ("group",)),
        "empty": (np.zeros((0, 3), np.float32), ()),
        "step": (np.int32(step), ()),
    }


def is_pair(node):
    return isinstance(node, tuple)


def device_state(step, devices_mesh):
    """Returns the arrays of `host_state` on a mesh, and a key."""

    def place(pair):
        value, spec = pair
        sharding = mesh.sharding(devices_mesh, *spec)
        return jax.make_array_from_callback(
            value.shape, sharding, lambda index: value[index]
        )

    state = jax.tree.map(place, host_state(step), is_leaf=is_pair)
    data = np.asarray(jax.random.key_data(jax.random.key(step)))
    everywhere = mesh.sharding(devices_mesh)
    key = jax.make_array_from_callback(
        data.shape, everywhere, lambda index: data[index]
    )
    return {**state, "rng": jax.random.wrap_key_data(key)}


def make_target(devices_mesh):
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
        device_state(0, devices_mesh),
    )


def differences(state, step):
    """Returns the paths of the arrays whose bits on this process's devices differ from
    the state of a step.
    """
    actual = leaves.flatten(state)
    wanted = leaves.flatten(
        jax.tree.map(lambda p: p[0], host_state(step), is_leaf=is_pair)
    )
    wanted["rng"] = np.asarray(jax.random.key_data(jax.random.key(step)))
    actual["rng"] = jax.random.key_data(actual["rng"])
    assert actual.keys() == wanted.keys()
    return [
        path
        for path, array in actual.items()
        for shard in array.addressable_shards
        if np.asarray(shard.data).tobytes()
        != np.asarray(wanted[path])[shard.index].tobytes()
    ]


def run(task, index):
    """Performs a task in one process of a pod."""
    jax.config.update("jax_num_cpu_devices", DEVICES)
    if task.count > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(
            f"127.0.0.1:{task.port}",
            task.count,
            index,
            initialization_timeout=harness.FOREVER,
            heartbeat_timeout_seconds=harness.FOREVER,
            shutdown_timeout_seconds=harness.FOREVER,
        )
    # With small chunks, the arrays of a test are cut into as many chunks as those of a
    # large model.
    arrays_lib.SHARED_CHUNK_BYTES = 4 << 10
    arrays_lib.CHUNK_BYTES = 64 << 10
    arrays_lib.LARGE_BYTES = 8 << 10
    # These times are short because a pod waits for the lease of a killed one, and
    # before each retry of a request.
    claim.RENEW_SECONDS = 0.1
    claim.WATCH_SECONDS = 0.5
    buckets.RETRIES.update(initial_delay="1ms", max_delay="20ms")
    folder = task.folder
    if task.action == "restore without a disk":
        # No listing lags behind here, so the pod need not wait for one.
        agreement.LAG_SECONDS = 0.1
        if index > 0:
            folder = f"{task.folder}/not mounted"
    manager = harness.make_manager(
        folder, keep_last=2, deadline_seconds=harness.FOREVER
    )
    actions = {
        "restore": restore,
        "restore without a disk": restore,
        "verify": verify,
        "save copies": save_copies,
        "save unequal copies": save_copies,
        "save other shapes": save_copies,
    }
    action = actions.get(task.action, save)
    try:
        report = action(task, index, manager)
        manager.close()
        pathlib.Path(f"{task.report}.{index}.json").write_text(json.dumps(report))
    finally:
        # All processes shut down together, since the end of process 0 ends the others.
        if task.count > 1:
            jax.distributed.shutdown()


def make_mesh(task):
    devices = DEVICES * task.count
    halves = np.arange(devices // task.model).reshape(2, -1).tolist()
    return mesh.make_mesh(halves if task.model < devices else None, model=task.model)


def save(task, index, manager):
    devices_mesh = make_mesh(task)
    saves = (
        itertools.count() if task.action == "save until killed" else range(task.saves)
    )
    for number in saves:
        step = task.step + number
        state = device_state(step, devices_mesh)
        saved_path(task.report, index).write_text(str(number))
        harness.save(manager, step, state, {"note": step}, data={"at": [step, index]})
    plan = manager._plan[1]
    written = sum(plan.arrays[chunk.path].chunk_bytes for chunk in plan.chunks)
    return {"loads": plan.loads, "written": written}


def save_copies(task, index, manager):
    """Saves and restores a tree that lies on no mesh: each process has a copy."""
    tree = {
        "numpy": np.arange(SIZE * 1000.0).reshape(SIZE, 1000),
        "number": np.int64(2**40),
        "on a device": jnp.arange(5, dtype=jnp.bfloat16),
        "key": jax.random.key(3),
    }
    if index and task.action == "save unequal copies":
        tree["numpy"][3, 4] += 1
        tree["on a device"] += 1
    if index and task.action == "save other shapes":
        tree["numpy"] = tree["numpy"].T
    harness.save(manager, task.step, tree)
    restored = manager.restore(tree).state
    same = lambda x, y: harness.bits(x) == harness.bits(y) and type(x) is type(y)
    return {"equal": jax.tree.map(same, restored, tree)}


def saved_path(report, index):
    """Returns the file with the number of steps that a process has saved. It does not
    exist before the first save.
    """
    return pathlib.Path(f"{report}.{index}.saved")


def restore(task, index, manager):
    del index
    restored = manager.restore(make_target(make_mesh(task)))
    return {
        "differences": differences(restored.state, restored.step),
        "step": restored.step,
        "data": restored.data,
        "note": restored.metadata["note"],
    }


def verify(task, index, manager):
    """Reads every byte of each checkpoint that counts."""
    del index
    bad = {}
    for step in manager.all_steps():
        try:
            wrong = differences(
                manager.restore(make_target(make_mesh(task)), step).state, step
            )
        except checkpoint.CheckpointError as e:
            wrong = [str(e)]
        if wrong:
            bad[step] = wrong
    attempts = format_lib.attempts(manager.store)
    dead = sum(format_lib.COMMIT not in attempt.marks for attempt in attempts)
    return {"steps": manager.all_steps(), "bad": bad, "dead": dead}


class Pods:
    """Starts pods, one after another."""

    def __init__(self, scratch, **environment):
        """Takes a folder for the reports, and additional environment variables of the
        processes.
        """
        self._scratch = pathlib.Path(scratch)
        self._environment = harness.environment(**environment)
        self._number = 0

    def start(self, action, folder, count, *, model=1, step=0, saves=1):
        """Starts a pod; returns the ids of its processes."""
        port = harness.free_port()
        self._number += 1
        self._report = self._scratch / f"pod{self._number}"
        task = Task(
            action, str(folder), count, model, step, str(self._report), port, saves
        )
        self._processes = []
        for index in range(count):
            log = f"{self._report}.{index}.log"
            process = forks.Process(
                run, task, index, env=self._environment, output=[log, f"{log}.errors"]
            )
            self._processes.append(process)
        return [process.pid for process in self._processes]

    def wait(self):
        """Waits for the end of the pod; returns the exit codes of its processes."""
        return [process.wait(harness.FOREVER) for process in self._processes]

    def saved(self):
        """Returns the number of steps that process 0 has saved; -1 before its first
        save begins.
        """
        path = saved_path(self._report, 0)
        text = path.read_text() if path.exists() else ""
        return int(text or -1)

    def run(self, *args, **kwargs):
        """Runs a pod to its end; returns the reports of its processes."""
        self.start(*args, **kwargs)
        assert self.wait() == [0] * len(self._processes), self.logs()
        return [json.loads(f.read_text()) for f in self._files("json")]

    def logs(self):
        return "\n".join(
            f.read_text() for f in [*self._files("log"), *self._files("log.errors")]
        )

    def _files(self, kind):
        return [
            pathlib.Path(f"{self._report}.{i}.{kind}")
            for i in range(len(self._processes))
        ]
