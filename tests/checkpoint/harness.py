"""State trees, managers, damage and object stores for the tests of checkpoints."""

import contextlib
import os
import random
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import jax
import jax.numpy as jnp
import numpy as np

import tests
from tests import forks
from xshard import checkpoint
from xshard.checkpoint import array_reader, place
from xshard.checkpoint import format as format_lib

# Seconds that no operation takes, even on busy cores: this limit only ends operations
# that hang.
FOREVER = 600
DTYPES = (
    "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2",
    "int32", "uint8", "int8", "uint32", "bool", "complex64",
)  # fmt: skip


def make_tree(seed=0, shape=(4, 6)):
    rng = np.random.default_rng(seed)
    arrays = {
        name: jnp.asarray(rng.normal(size=shape) * 3).astype(name) for name in DTYPES
    }
    return {
        "arrays": arrays,
        "names": {
            "~/0/mu/a b": jnp.arange(3),
            "empty": jnp.zeros((0, 4)),
            "scalar": jnp.float32(seed),
        },
        "keys": [
            jax.random.key(seed),
            jax.random.split(jax.random.key(seed, impl="rbg"), 3),
        ],
    }


def read_all(directory, step):
    """Returns the arrays of a checkpoint by path."""
    attempt = place.find(f"{directory}@{step}")
    metas = format_lib.read_array_metas(attempt)
    return dict(array_reader.read_arrays(attempt, metas))


def make_manager(folder, keep_last=3, **options):
    return checkpoint.Manager(folder, checkpoint.Keep(keep_last), **options)


def save(manager, step, state, metadata=None, **extra):
    manager.save(step, state, metadata or {}, **extra)
    manager.wait()


def saved_state(step):
    return {
        "a": np.full((50, 40), step, np.float32),
        "b": np.arange(step, step + 9, dtype=np.int32),
    }


def save_until_killed(folder):
    """Saves one step after another, the first after a line of output."""
    manager = make_manager(folder, keep_last=2)
    step = manager.latest_step() or 0
    print("begin", flush=True)
    while True:
        step += 1
        save(manager, step, saved_state(step))


def bits(array):
    """Returns the type, the shape and the bytes of an array or a typed key."""
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    return str(array.dtype), array.shape, np.asarray(array).tobytes()


def damage(kind, path, at=0.5):
    """Damages a file as a disk might.

    Args:
      kind: 'deleted', 'flipped' (one bit), 'zeroed' (up to 4096 bytes) or 'truncated'.
      path: the file.
      at: where the damage begins, as a fraction of the file's length.
    """
    content = bytearray(path.read_bytes())
    place = min(int(len(content) * at), len(content) - 1)
    if kind == "deleted":
        path.unlink()
        return
    if kind == "flipped":
        content[place] ^= 1 << random.Random(str(path.name)).randrange(8)
    elif kind == "zeroed":
        content[place : place + 4096] = bytes(len(content[place : place + 4096]))
    else:
        del content[place:]
    path.write_bytes(content)


def environment(**overrides):
    """Returns the environment variables of a process that a test starts."""
    required = {"PYTHONPATH": forks.python_path(), "JAX_PLATFORMS": "cpu"}
    return {"XLA_FLAGS": tests.XLA_FLAGS, **os.environ, **required, **overrides}


def free_port():
    """Returns a free port below the system's ephemeral range, so that it is still free
    when a program binds it.
    """
    while True:
        port = random.SystemRandom().randrange(20000, 32000)
        with contextlib.suppress(OSError), socket.create_server(("", port)):
            return port


@contextlib.contextmanager
def gcs(**faults):
    """Runs the stand-in for GCS in its own process; yields its address."""
    options = [f"--{name}={value}" for name, value in faults.items()]
    command = [sys.executable, "-m", "tests.checkpoint.gcs_server", *options]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=environment()
    ) as server:
        try:
            yield server.stdout.readline().strip()
        finally:
            server.kill()


@contextlib.contextmanager
def s3():
    """Runs a moto server with the bucket 'bucket' in its own process; yields its
    address.
    """
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment()
    ) as server:
        url = f"http://127.0.0.1:{port}"
        try:
            _make_bucket(url, server)
            yield url
        finally:
            server.kill()


def _make_bucket(url, server):
    request = urllib.request.Request(f"{url}/bucket", method="PUT")
    end = time.monotonic() + FOREVER
    while True:
        try:
            urllib.request.urlopen(request).close()
            return
        except urllib.error.URLError:
            # moto does not report when it begins to listen, so the request is repeated.
            assert server.poll() is None and time.monotonic() < end, (
                "moto did not start"
            )
            time.sleep(0.05)
