"""Bit flips in one device's copy of an array, as a memory fault would cause them."""

import itertools

import jax
import numpy as np

from xshard import loop
from xshard.optimizers import trees


def one_bit(word):
    """Returns the word with one bit flipped."""
    return word ^ (1 << 20)


def to_nan(word):
    """Returns the word with the bits set that make a float32 NaN.

    They are those of the exponent, and the highest of the fraction.
    """
    return word | 0x7FC00000


def flipped(state, name, device, change=one_bit):
    """Returns the state with one device's copy of an array's last element changed."""

    def flip(path, x):
        if trees.path_name(path) != name:
            return x
        shards = []
        for shard in x.addressable_shards:
            part = np.array(shard.data)
            if shard.device.id == device:
                words = part.reshape(-1).view(np.uint32)
                words[-1] = change(int(words[-1]))
            shards.append(jax.device_put(part, shard.device))
        return jax.make_array_from_single_device_arrays(x.shape, x.sharding, shards)

    return jax.tree_util.tree_map_with_path(flip, state)


def after(monkeypatch, steps, name, device, *, begin=0, change=one_bit):
    """Patches runs so that their state changes after some steps, once per step.

    Args:
      monkeypatch: undoes the patch at the end of the test.
      steps: a list of steps. The patch removes each step once the state has changed
        after it.
      name: the path of the array that changes.
      device: the ID of the device whose copy changes.
      begin: the number of steps that the run makes before the first change. A repeated
        step counts again.
      change: a function from an element's bits to the changed bits.
    """
    create = loop.Run.__init__

    def created(self, *args, **options):
        create(self, *args, **options)
        step_of_run = self.train_step
        count = itertools.count()

        def train_step(state, *rest):
            if next(count) >= begin and int(state.step) in steps:
                steps.remove(int(state.step))
                leaves = jax.tree_util.tree_leaves_with_path(state)
                assert name in [trees.path_name(path) for path, _ in leaves]
                state = flipped(state, name, device, change)
            return step_of_run(state, *rest)

        self.train_step = train_step
        # One step a dispatch, so that the state can change after any.
        last_to_dispatch = self._last_to_dispatch
        self._last_to_dispatch = lambda: min(last_to_dispatch(), self.step + 1)

    monkeypatch.setattr(loop.Run, "__init__", created)
