"""A part of one run's checkpoint in another run's state."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.checkpoint.harness import make_manager, save
from xshard import checkpoint, mesh


def make_state(groups=0, value=1.0, head=3, dtype=jnp.float32):
    lead = (groups,) if groups else ()

    def array(*shape):
        whole = np.arange(np.prod(lead + shape), dtype=np.float32).reshape(lead + shape)
        return jnp.asarray(value * whole).astype(dtype)

    return {
        "step": jnp.int32(9 * value),
        "global_step": jnp.zeros(lead, jnp.int32),
        "params": {"body": {"w": array(4, 5), "b": array(5)}, "head": {"w": array(5, head)}},
        "opt_state": {"mu": array(4, 5)},
    }


def save_state(folder, **changes):
    manager = make_manager(folder)
    for step in (1, 2):
        save(manager, step, make_state(value=float(step), **changes))
    manager.close()
    return str(folder)


def take(source, state, **options):
    said = []
    chosen = checkpoint.Source(source, **options)
    # What is found before a run begins is what is found then.
    checkpoint.check_init(chosen, state)
    return checkpoint.init_from(chosen, state, said.append), said


def test_neither_slots_nor_steps_by_default(tmp_path):
    state, said = take(save_state(tmp_path), make_state(value=-1.0))
    wanted = make_state(value=2.0)["params"]
    jax.tree.map(np.testing.assert_array_equal, state["params"], wanted)
    np.testing.assert_array_equal(
        state["opt_state"]["mu"], make_state(value=-1.0)["opt_state"]["mu"]
    )
    assert int(state["step"]) == -9 and "initialised 3 arrays" in said[-1]


def with_averages(state, names, value):
    averages = {name: jnp.full(3, value) for name in names}
    return {**state, "net_state": {"batch_norm": averages}}


def test_the_network_s_state_goes_with_its_parameters(tmp_path):
    manager = make_manager(tmp_path)
    save(manager, 1, with_averages(make_state(), ["mean", "var"], 2.0))
    manager.close()
    new = with_averages(make_state(value=-1.0), ["mean", "scale"], -1.0)
    state, said = take(str(tmp_path), new)
    averages = state["net_state"]["batch_norm"]
    np.testing.assert_array_equal(averages["mean"], np.full(3, 2.0))
    # What the checkpoint lacks is no error where nobody has asked for it by name.
    np.testing.assert_array_equal(averages["scale"], np.full(3, -1.0))
    assert "initialised 4 arrays" in said[-1]
    assert "not used: net_state/batch_norm/var" in said[-1]
    assert "left as new: net_state/batch_norm/scale" in said[-1]
    with pytest.raises(checkpoint.CheckpointError, match="'net_state/batch_norm/scale' is missing"):
        take(str(tmp_path), new, select="^net_state/")
    state, _ = take(str(tmp_path), new, select=checkpoint.PARAMS)
    np.testing.assert_array_equal(state["net_state"]["batch_norm"]["mean"], np.full(3, -1.0))


def test_an_older_step_and_a_run_s_directory(tmp_path):
    save_state(tmp_path / "run" / "checkpoints")
    state, _ = take(f"{tmp_path / 'run'}@1", make_state(value=-1.0))
    np.testing.assert_array_equal(state["params"]["body"]["w"], make_state()["params"]["body"]["w"])


def test_a_pattern_leaves_the_rest_and_says_what_was_not_used(tmp_path):
    source = save_state(tmp_path, head=7)
    with pytest.raises(
        checkpoint.CheckpointError,
        match=r"'params/head/w' is float32\[5, 7\] in it, float32\[5, 3\] here. Narrow it",
    ):
        take(source, make_state())
    new = make_state(value=-1.0)
    state, _ = take(source, new, select="^params/(?!head)")
    assert float(state["params"]["body"]["b"][1]) == 2.0
    np.testing.assert_array_equal(state["params"]["head"]["w"], new["params"]["head"]["w"])
    without = make_state()
    del without["params"]["head"]
    assert "not used: params/head/w" in take(source, without)[1][-1]


def test_narrower_types_are_converted_and_others_are_not(tmp_path):
    source = save_state(tmp_path)
    state, _ = take(source, make_state(dtype=jnp.bfloat16))
    assert state["params"]["body"]["w"].dtype == jnp.bfloat16
    other = make_state()
    other["params"]["body"]["b"] = jnp.zeros(5, jnp.int32)
    with pytest.raises(
        checkpoint.CheckpointError, match=r"'params/body/b' is float32\[5\] in it, int32"
    ):
        take(source, other)


@pytest.mark.parametrize("group", [0, 2])
def test_one_group_of_several(tmp_path, group):
    source = save_state(tmp_path, groups=3)
    state, _ = take(source, make_state(value=-1.0), group=group)
    wanted = make_state(groups=3, value=2.0)["params"]
    jax.tree.map(lambda x, w: np.testing.assert_array_equal(x, w[group]), state["params"], wanted)
    with pytest.raises(checkpoint.CheckpointError, match="--init_group=3: .* the groups 0 to 2"):
        take(source, make_state(), group=3)


@pytest.mark.parametrize("stored", [0, 3])
def test_all_groups_begin_alike_on_their_devices(tmp_path, stored):
    source = save_state(tmp_path, groups=stored)
    place = mesh.sharding(mesh.make_mesh([[0, 1, 2, 3], [4, 5, 6, 7]]), "group")
    new = make_state(groups=2, value=-1.0)
    new["params"] = jax.device_put(new["params"], place)
    state, _ = take(source, new, group=0)
    wanted = make_state(groups=stored, value=2.0)["params"]["body"]["w"]
    wanted = wanted[0] if stored else wanted
    found = state["params"]["body"]["w"]
    assert found.sharding == place
    np.testing.assert_array_equal(found, np.stack([wanted, wanted]))


@pytest.mark.parametrize(
    "source,select,match",
    [
        ("", "nothing", "'nothing' matches none of the paths of this run, such as global_step"),
        ("", "(", "is no regular expression"),
        ("@7", "^params/", r"no checkpoint of step 7 in .*\[1, 2\]"),
        ("/elsewhere", "^params/", "There is no checkpoint in .*elsewhere"),
    ],
)
def test_what_is_not_there(tmp_path, source, select, match):
    with pytest.raises(checkpoint.CheckpointError, match=match):
        take(save_state(tmp_path) + source, make_state(), select=select)
