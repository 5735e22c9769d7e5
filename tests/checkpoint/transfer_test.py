"""Tests of initializing a run's state from a part of another run's checkpoint, or from
a file.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.checkpoint.harness import make_manager, save
from xshard import checkpoint, errors, mesh
from xshard.files import tensors


def make_state(groups=0, value=1.0, head=3, dtype=jnp.float32):
    lead = (groups,) if groups else ()

    def array(*shape):
        whole = np.arange(np.prod(lead + shape), dtype=np.float32).reshape(lead + shape)
        return jnp.asarray(value * whole).astype(dtype)

    return {
        "step": jnp.int32(9 * value),
        "global_step": jnp.zeros(lead, jnp.int32),
        "params": {
            "body": {"w": array(4, 5), "b": array(5)},
            "head": {"w": array(5, head)},
        },
        "opt_state": {"mu": array(4, 5)},
    }


def save_state(folder, **changes):
    manager = make_manager(folder)
    for step in (1, 2):
        save(manager, step, make_state(value=float(step), **changes))
    manager.close()
    return str(folder)


def take(source, state, **options):
    messages = []
    chosen = checkpoint.Source(source, **options)
    # A run makes this check before it begins. It raises the same errors as `init_from`,
    # except for damage.
    checkpoint.check_init(chosen, state)
    return checkpoint.init_from(chosen, state, messages.append), messages


def test_slots_and_steps_are_not_taken_by_default(tmp_path):
    state, messages = take(save_state(tmp_path), make_state(value=-1.0))
    wanted = make_state(value=2.0)["params"]
    jax.tree.map(np.testing.assert_array_equal, state["params"], wanted)
    np.testing.assert_array_equal(
        state["opt_state"]["mu"], make_state(value=-1.0)["opt_state"]["mu"]
    )
    assert int(state["step"]) == -9 and "initialized 3 arrays" in messages[-1]


def injected(rate, count, groups=0):
    """Returns a state like that of a run with `optax.inject_hyperparams`."""
    lead = (groups,) if groups else ()
    params = {"hyperparams": {"w": jnp.full((*lead, 3), rate)}, "b": jnp.full(lead, 1)}
    return {
        "global_step": jnp.zeros(lead, jnp.int32),
        "params": params,
        "opt_state": {
            "rule/count": jnp.full(lead, count),
            "rule/hyperparams/learning_rate": jnp.full(lead, rate),
            "rule/hyperparams_states/learning_rate/count": jnp.full(lead, count),
            "rule/inner_state/0/mu/hyperparams": {"w": params["hyperparams"]["w"]},
            "rule/inner_state/0/mu": {"b": jnp.full(lead, rate)},
            "loss_scale": jnp.full(lead, 8.0),
        },
    }


@pytest.mark.parametrize("groups", [0, 2])
@pytest.mark.parametrize("select", ["^(params|net_state|opt_state)/", "."])
def test_the_values_of_the_config_are_not_taken(tmp_path, select, groups):
    manager = make_manager(tmp_path)
    save(manager, 1, injected(0.5, 60, groups))
    manager.close()
    state, (*_, message) = take(str(tmp_path), injected(0.25, 0, groups), select=select)
    # The moments of a module that is called hyperparams are no hyperparameters.
    wanted = injected(0.5, 60, groups)
    name = "rule/hyperparams/learning_rate"
    wanted["opt_state"][name] = injected(0.25, 0, groups)["opt_state"][name]
    jax.tree.map(np.testing.assert_array_equal, state, wanted)
    assert f"left at their initial values: opt_state/{name};" in message
    _, _, scalars = message.partition("the value in brackets: ")
    shown = ["60", "0"] if not groups else [r"[60 60]", r"[0 0]"]
    assert f"opt_state/rule/count {shown[0]} ({shown[1]})" in scalars
    assert "hyperparams_states/learning_rate/count" in scalars
    assert "loss_scale" not in scalars and "hyperparams/w" not in scalars


def with_averages(state, names, value):
    averages = {name: jnp.full(3, value) for name in names}
    return {**state, "net_state": {"batch_norm": averages}}


def test_the_network_state_is_taken_with_the_parameters(tmp_path):
    manager = make_manager(tmp_path)
    save(manager, 1, with_averages(make_state(), ["mean", "var"], 2.0))
    manager.close()
    new = with_averages(make_state(value=-1.0), ["mean", "scale"], -1.0)
    state, messages = take(str(tmp_path), new)
    averages = state["net_state"]["batch_norm"]
    np.testing.assert_array_equal(averages["mean"], np.full(3, 2.0))
    # Network state that the checkpoint lacks is an error only if `select` is given.
    np.testing.assert_array_equal(averages["scale"], np.full(3, -1.0))
    assert "initialized 4 arrays" in messages[-1]
    assert "not used: net_state/batch_norm/var" in messages[-1]
    assert "left at their initial values: net_state/batch_norm/scale" in messages[-1]
    with pytest.raises(
        checkpoint.CheckpointError, match="'net_state/batch_norm/scale' is missing"
    ):
        take(str(tmp_path), new, select="^net_state/")
    state, _ = take(str(tmp_path), new, select=checkpoint.PARAMS)
    np.testing.assert_array_equal(
        state["net_state"]["batch_norm"]["mean"], np.full(3, -1.0)
    )


def test_an_older_step_is_taken_from_a_run_directory(tmp_path):
    save_state(tmp_path / "run" / "checkpoints")
    state, _ = take(f"{tmp_path / 'run'}@1", make_state(value=-1.0))
    np.testing.assert_array_equal(
        state["params"]["body"]["w"], make_state()["params"]["body"]["w"]
    )


def test_a_pattern_excludes_arrays_and_unused_arrays_are_reported(tmp_path):
    source = save_state(tmp_path, head=7)
    with pytest.raises(
        checkpoint.CheckpointError,
        match=r"'params/head/w' is float32\[5, 7\] in it, float32\[5, 3\] here. "
        "Narrow the",
    ):
        take(source, make_state())
    new = make_state(value=-1.0)
    state, _ = take(source, new, select="^params/(?!head)")
    assert float(state["params"]["body"]["b"][1]) == 2.0
    np.testing.assert_array_equal(
        state["params"]["head"]["w"], new["params"]["head"]["w"]
    )
    without = make_state()
    del without["params"]["head"]
    assert "not used: params/head/w" in take(source, without)[1][-1]


def test_a_narrower_float_is_converted_and_an_integer_is_refused(tmp_path):
    source = save_state(tmp_path)
    state, _ = take(source, make_state(dtype=jnp.bfloat16))
    assert state["params"]["body"]["w"].dtype == jnp.bfloat16
    other = make_state()
    other["params"]["body"]["b"] = jnp.zeros(5, jnp.int32)
    with pytest.raises(
        checkpoint.CheckpointError,
        match=r"'params/body/b' is float32\[5\] in it, int32",
    ):
        take(source, other)


@pytest.mark.parametrize("group", [0, 2])
def test_one_group_of_several_is_taken(tmp_path, group):
    source = save_state(tmp_path, groups=3)
    state, _ = take(source, make_state(value=-1.0), group=group)
    wanted = make_state(groups=3, value=2.0)["params"]
    jax.tree.map(
        lambda x, w: np.testing.assert_array_equal(x, w[group]), state["params"], wanted
    )
    with pytest.raises(
        checkpoint.CheckpointError, match="--init_group=3: .* has groups 0 to 2"
    ):
        take(source, make_state(), group=3)


@pytest.mark.parametrize("stored", [0, 3])
def test_all_groups_start_from_the_same_parameters_on_their_devices(tmp_path, stored):
    source = save_state(tmp_path, groups=stored)
    place = mesh.sharding(mesh.make_mesh([[0, 1, 2, 3], [4, 5, 6, 7]]), "group")
    new = make_state(groups=2, value=-1.0)
    new["params"] = jax.device_put(new["params"], place)
    state, _ = take(source, new, group=0)
    wanted = make_state(groups=stored, value=2.0)["params"]["body"]["w"]
    wanted = wanted[0] if stored else wanted
    loaded = state["params"]["body"]["w"]
    assert loaded.sharding == place
    np.testing.assert_array_equal(loaded, np.stack([wanted, wanted]))


@pytest.mark.parametrize(
    "source,select,match",
    [
        (
            "",
            "nothing",
            "'nothing' matches none of the paths of this run, such as global_step",
        ),
        ("", "(", "is not a valid regular expression"),
        ("@7", "^params/", r"no checkpoint of step 7 in .*\[1, 2\]"),
        ("/elsewhere", "^params/", "There is no checkpoint in .*elsewhere"),
    ],
)
def test_a_missing_source_or_an_invalid_pattern_is_refused(
    tmp_path, source, select, match
):
    with pytest.raises(checkpoint.CheckpointError, match=match):
        take(save_state(tmp_path) + source, make_state(), select=select)


def write(path, state, **changes):
    """Writes the parameters of a state to a safetensors file; returns its path."""
    arrays = {
        name: np.asarray(x)
        for name, x in checkpoint.flatten(state).items()
        if name.startswith("params/")
    }
    tensors.write(
        path, {**arrays, **changes}, {"groups": str(state["global_step"].size)}
    )
    return str(path)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("groups", [0, 2])
def test_a_file_initializes_a_run_like_a_checkpoint(tmp_path, groups, dtype):
    stored = make_state(groups=groups, value=2.0, dtype=dtype)
    stored["global_step"] = stored["global_step"] if groups else jnp.zeros(0)
    file = write(tmp_path / "a.safetensors", stored)
    # The run takes one group of several, or starts all its groups from one model.
    for count in (0, 2):
        state, messages = take(
            file, make_state(groups=count, value=-1.0), group=groups // 2
        )
        wanted = stored["params"]
        if groups and not count:
            wanted = jax.tree.map(lambda x: x[1], wanted)
        elif count and not groups:
            wanted = jax.tree.map(lambda x: jnp.stack([x, x]), wanted)
        same = lambda x, y: np.testing.assert_array_equal(x, y.astype(jnp.float32))
        jax.tree.map(same, state["params"], wanted)
        assert (
            "initialized 3 arrays" in messages[-1] and "a.safetensors" in messages[-1]
        )


def test_arrays_from_a_file_take_the_sharding_of_the_state(tmp_path):
    state = make_state(value=-1.0)
    place = mesh.sharding(mesh.make_mesh(model=4), "model")
    state["params"]["body"]["w"] = jax.device_put(state["params"]["body"]["w"], place)
    file = write(
        tmp_path / "a.safetensors",
        {**make_state(value=2.0), "global_step": jnp.zeros(0)},
    )
    taken, _ = take(file, state)
    assert taken["params"]["body"]["w"].sharding == place
    wanted = make_state(value=2.0)["params"]
    jax.tree.map(np.testing.assert_array_equal, taken["params"], wanted)


RENAMES = [
    (["params/old=params/body", "params/top=params/head"], "params/{}", "old", "top"),
    (["model=params,model/top=params/head"], "model/{}", "body", "head"),
    (["=params"], "{}", "body", "head"),
    (["model.body.w=params/body/w", "a/b=params/body/b"], None, "", ""),
]


@pytest.mark.parametrize("from_file", [False, True])
@pytest.mark.parametrize(("texts", "form", "body", "head"), RENAMES)
def test_paths_are_renamed(tmp_path, from_file, texts, form, body, head):
    params = make_state(value=2.0)["params"]
    if form is None:
        stored = {
            "model.body.w": params["body"]["w"],
            "a/b": params["body"]["b"],
            "params/head/w": params["head"]["w"],
        }
    else:
        stored = {f"{form.format(body)}/{k}": x for k, x in params["body"].items()}
        stored[f"{form.format(head)}/w"] = params["head"]["w"]
    if "model/top" in texts[0]:
        stored["model/top/w"] = stored.pop("model/head/w")
        texts = ["model/top=params/head,model=params"]
    if from_file:
        place = str(tmp_path / "a.safetensors")
        tensors.write(
            tmp_path / "a.safetensors",
            {k: np.asarray(x) for k, x in stored.items()},
            {},
        )
    else:
        place = str(tmp_path)
        manager = make_manager(tmp_path)
        save(manager, 1, stored)
        manager.close()
    taken, _ = take(place, make_state(value=-1.0), rename=checkpoint.renames(texts))
    jax.tree.map(np.testing.assert_array_equal, taken["params"], params)


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (
            ["params/bodi=params/body"],
            "no path in .* begins with 'params/bodi' .near it: params/body",
        ),
        (
            ["params/body=params/bode"],
            "this run has no 'params/bode/b' .near it: .*params/body/b",
        ),
        (["params/head=params/body"], "to 'params/body/w': rename one"),
    ],
)
def test_a_rename_rule_that_does_not_fit_is_reported(tmp_path, texts, message):
    place = save_state(tmp_path)
    with pytest.raises(checkpoint.CheckpointError, match=message):
        take(place, make_state(), rename=checkpoint.renames(texts))


def test_an_invalid_rename_rule_or_file_is_refused(tmp_path):
    for text in ("params", "a=b=c", "a=a", "a=b,"):
        with pytest.raises(checkpoint.CheckpointError, match="OLD=NEW"):
            checkpoint.renames([text])
    path = tmp_path / "a.safetensors"
    with pytest.raises(errors.UserError, match="cannot be read"):
        take(str(path), make_state())
    for content in (
        b"",
        b"no such file",
        b"\xff" * 100,
        (10).to_bytes(8, "little") + b"[" * 10,
    ):
        path.write_bytes(content)
        with pytest.raises(errors.UserError, match="cannot be read"):
            take(str(path), make_state())
    write(path, {**make_state(head=4), "global_step": jnp.zeros(0)})
    with pytest.raises(
        checkpoint.CheckpointError,
        match=r"head/w' is float32\[5, 4\] in it, float32\[5, 3\]",
    ):
        take(str(path), make_state())
