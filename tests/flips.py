"""Bits that flip in one device's copy of an array, as by a fault of its memory."""

import itertools

import jax
import numpy as np

from xshard import loop
from xshard.optimizers import trees


def one_bit(word):
    """The word with another bit."""
    return word ^ (1 << 20)


def to_nan(word):
    """The word with all bits of a float32's exponent, and one below."""
    return word | 0x7FC00000


def flipped(state, name, device, change=one_bit):
    """The state with a change of the last element of an array in the copy on one device."""

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
    """Has the state that a run has after each of some steps flipped, once each; `steps` has those that are left.

    Before the run has made `begin` steps, those that it makes again counted anew, nothing is.
    """
    check = loop.Run._check_programs

    def checked(self):
        check(self)
        step_of_run, count = self.train_step, itertools.count()

        def train_step(state, batch):
            if next(count) >= begin and int(state.step) in steps:
                steps.remove(int(state.step))
                leaves = jax.tree_util.tree_leaves_with_path(state)
                assert name in [trees.path_name(path) for path, _ in leaves]
                state = flipped(state, name, device, change)
            return step_of_run(state, batch)

        self.train_step = train_step

    monkeypatch.setattr(loop.Run, "_check_programs", checked)
