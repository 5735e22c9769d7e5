"""Tests of the memory that is noted when a device has no more."""

import gzip

import jax
import jax.numpy as jnp
import pytest

from tests import toy, winged
from xshard.pod import members
from xshard.wings.profiles import wing


class Hungry(toy.Toy):
    """Allocates more memory than there is, in a callback."""

    def callbacks(self):
        return [lambda history: jnp.zeros((1 << 45,)).block_until_ready()]


def test_what_is_in_memory_is_kept_when_there_is_no_more(tmp_path):
    config = toy.get_config()
    config.experiment = "tests.wings.profiles.wing_test.Hungry"
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED") as info:
        winged.run(config.lock(), str(tmp_path), "")
    path = tmp_path / "profile" / "memory_process_0.prof"
    assert gzip.decompress(path.read_bytes())
    # JAX adds a note of its own.
    note = info.value.__notes__[-1]
    assert note.startswith(f"{path} has what was in the memory of the devices")


class Third(members.Members):
    """Members of which this process is the third, though JAX has joined no other."""

    number = 2


def test_members_that_run_out_of_memory_write_files_of_their_own(tmp_path):
    run = winged.Run(toy.get_config().lock(), str(tmp_path), members=Third())
    e = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")
    wing.Profiles(run).note(e)
    assert (tmp_path / "profile" / "memory_process_2.prof").exists()


def test_a_memory_profile_that_cannot_be_written_does_not_hide_the_error(tmp_path):
    (tmp_path / "profile").write_text("a file")
    e = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")
    wing.note_memory(tmp_path / "profile" / "memory_process_0.prof", e)
    (note,) = e.__notes__
    assert note.startswith("what was in memory could not be written to ")


@pytest.mark.parametrize(
    "e",
    [
        jax.errors.JaxRuntimeError("INTERNAL: a bug"),
        ValueError("RESOURCE_EXHAUSTED of something else"),
    ],
)
def test_other_errors_leave_no_memory_profile(tmp_path, e):
    wing.note_memory(tmp_path / "memory_process_0.prof", e)
    assert not list(tmp_path.iterdir()) and not hasattr(e, "__notes__")
