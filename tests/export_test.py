"""Tests of exported models: they need no xshard, and predict as `xshard.load` does."""

import importlib
import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xshard
from configs import digits, gan
from tests import toy, winged
from xshard import checkpoint, errors, export
from xshard import experiment as experiment_lib
from xshard.export import __main__ as program
from xshard.files import disk, tensors
from xshard.pod import exit_codes
from xshard.run import preflight

HALVES = ((0, 1, 2, 3), (4, 5, 6, 7))
ROWS = [1, 5, 8]
# A program that cannot import xshard and calls the exported function with batches of
# several sizes.
ELSEWHERE = """
import sys, numpy as np
sys.modules["xshard"] = None
from jax import export
function = export.deserialize(bytearray(open(sys.argv[1], "rb").read()))
inputs = dict(np.load(sys.argv[2]))
arguments = ()
if len(sys.argv) > 4:
    from safetensors.numpy import load_file
    arguments = (load_file(sys.argv[4]),)
outputs = {}
for rows in sys.argv[3].split(","):
    batch = {}
    for path, x in inputs.items():
        of_rows, _, name = path.partition("/")
        if of_rows == rows:
            batch[name] = x
    outputs[rows] = np.asarray(function.call(*arguments, batch))
np.savez(sys.argv[1] + ".npz", **outputs)
"""


def train(directory, code=exit_codes.DONE, **changes):
    config = toy.get_config()
    config.experiment = changes.pop("experiment", "tests.toy.Averaged")
    config.update_from_flattened_dict({"steps": 4, **changes})
    assert winged.run(config.lock(), str(directory), "") == code
    return xshard.load(str(directory))


def elsewhere(directory, path, batches, *more):
    """Returns the outputs by number of rows, of a process that cannot import xshard."""
    arrays = {
        f"{rows}/{k}": x for rows, batch in batches.items() for k, x in batch.items()
    }
    np.savez(directory / "batches.npz", **arrays)
    rows = ",".join(map(str, batches))
    command = [
        sys.executable,
        "-c",
        ELSEWHERE,
        str(path),
        str(directory / "batches.npz"),
        rows,
    ]
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    completed = subprocess.run(
        [*command, *map(str, more)],
        cwd=directory,
        env={**environment, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert completed.returncode == 0, completed.stderr
    return dict(np.load(f"{path}.npz"))


def batches(rows=ROWS):
    generator = np.random.default_rng(0)
    return {n: {"x": generator.normal(size=(n, 3)).astype(np.float32)} for n in rows}


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "changes",
    [{}, {"group_assignment": HALVES, "reduction.shard_update": True, "hidden": 20}],
    ids=str,
)
@pytest.mark.parametrize("arguments", [False, True])
def test_a_prediction_without_the_package(tmp_path, changes, arguments):
    trained = train(tmp_path / "run", **changes)
    path = tmp_path / "toy.stablehlo"
    text = export.write(trained, path, arguments=arguments)
    assert "x float32[batch,3] -> float32[batch], for cpu, cuda, tpu" in text
    more = []
    if arguments:
        more = [tmp_path / "toy.safetensors"]
        export.write(trained, more[0])
    outputs = elsewhere(tmp_path, path, batches(), *more)
    for rows, batch in batches().items():
        expected = trained.predict({**batch, "y": np.zeros(rows, np.float32)})
        # The float32 sums of at most 20 products are computed in another order.
        np.testing.assert_allclose(outputs[str(rows)], expected, rtol=1e-5, atol=1e-6)


class Fixed(toy.Averaged):
    """Has a network that depends on the number of rows in its batch."""

    def forward(self, batch, *, is_training):
        outputs = super().forward(batch, is_training=is_training)
        return outputs if int(batch["x"].shape[0]) % 2 else outputs + 1


def test_a_network_that_depends_on_the_number_of_rows(tmp_path):
    trained = train(tmp_path / "run", experiment="tests.export_test.Fixed")
    path = tmp_path / "toy.stablehlo"
    with pytest.raises(
        errors.UserError, match=r"(?s)batches of any size: .*--batch_size=1"
    ):
        export.write(trained, path)
    assert not path.exists()
    assert "float32[4,3]" in export.write(trained, path, batch_size=4)
    outputs = elsewhere(tmp_path, path, batches([4]))
    expected = trained.predict({**batches([4])[4], "y": np.zeros(4, np.float32)})
    np.testing.assert_allclose(outputs["4"], expected, rtol=1e-5, atol=1e-6)


class Spectral(toy.Averaged):
    """Computes eigenvalues, which JAX does not lower for TPUs."""

    def forward(self, batch, *, is_training):
        outputs = super().forward(batch, is_training=is_training)
        if is_training:
            return outputs
        roots = jnp.linalg.eigvals(jnp.full((2, 2), batch["x"][0, 0]))
        return outputs + jnp.max(jnp.real(roots)).astype(outputs.dtype)


def test_platforms_without_a_lowering_are_left_out(tmp_path):
    trained = train(tmp_path / "run", experiment="tests.export_test.Spectral")
    text = export.write(trained, tmp_path / "toy.stablehlo")
    assert "for cpu" in text and "tpu" not in text
    outputs = elsewhere(tmp_path, tmp_path / "toy.stablehlo", batches([5]))
    expected = trained.predict({**batches([5])[5], "y": np.zeros(5, np.float32)})
    np.testing.assert_allclose(outputs["5"], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["gan", "digits"])
def test_experiments_are_exported(tmp_path, name):
    config = {"gan": gan, "digits": digits}[name].get_config()
    config.update({"steps": 2, "eval_every_steps": 2, "writers": ("jsonl",)})
    with jax.numpy_dtype_promotion("standard"):
        assert winged.run(config.lock(), str(tmp_path / "run"), "") == 0
        trained = xshard.load(tmp_path / "run")
        export.write(trained, tmp_path / "a.stablehlo")
        export.write(trained, tmp_path / "a.safetensors")
        example = experiment_lib.example(trained.experiment)
        batch_of_samples = preflight.samples_batch(trained.experiment) or example
        name_in, shape = (
            ("noise", batch_of_samples["noise"].shape)
            if name == "gan"
            else ("image", (3, 8, 8, 1))
        )
        batch = {
            name_in: np.random.default_rng(0).normal(size=shape).astype(np.float32)
        }
        rows = len(batch[name_in])
        outputs = elsewhere(tmp_path, tmp_path / "a.stablehlo", {rows: batch})
        unread = {
            k: np.zeros((rows, *x.shape[1:]), x.dtype) for k, x in example.items()
        }
        expected = trained.predict({**unread, **batch})
        (output,) = outputs.values()
        # The network computes in half precision, which has three digits.
        np.testing.assert_allclose(output, np.asarray(expected), rtol=2e-2, atol=2e-2)
    file = tensors.File(str(tmp_path / "a.safetensors"))
    prefix = (
        ("generator/params/", "discriminator/params/")
        if name == "gan"
        else ("params/",)
    )
    assert all(any(path.startswith(p) for path in file.shapes) for p in prefix)


def test_another_run_restores_exported_arrays(tmp_path):
    trained = train(tmp_path / "run", group_assignment=HALVES)
    path = tmp_path / "a.safetensors"
    convert = checkpoint.Conversion(dict, dict)
    with pytest.raises(errors.UserError, match="one model, and this run has 2 groups"):
        export.write(trained, path, convert=convert)
    assert "4 arrays" in export.write(trained, path)
    restored = checkpoint.init_from(checkpoint.Source(str(path)), trained.state, print)
    jax.tree.map(
        np.testing.assert_array_equal, restored.experiment.params, trained.params
    )
    # A custom pattern selects the moving averages of the parameters.
    export.write(trained, tmp_path / "b.safetensors", select="opt_state/.*average/")
    names = tensors.File(str(tmp_path / "b.safetensors")).shapes
    assert len(names) == 4 and all("/average/mlp" in name for name in names)


def test_an_export_names_its_step_and_arrays_that_are_not_finite(tmp_path):
    trained = train(tmp_path / "run")
    assert "a.safetensors: step 4, 4 arrays" in export.write(
        trained, tmp_path / "a.safetensors"
    )
    change = {
        "experiment": "tests.toy.Overflowing",
        "overflow_at": 4,
        "on_nonfinite": "warn",
    }
    trained = train(tmp_path / "warned", exit_codes.NONFINITE, **change)
    text = export.write(trained, tmp_path / "b.stablehlo")
    assert "step 4, NOT FINITE (params/linear/b, params/linear/w), predict of x" in text


def test_a_failed_export_is_explained_and_writes_nothing(tmp_path, monkeypatch):
    trained = train(tmp_path / "run")
    path = tmp_path / "a.safetensors"
    for target, message in (
        ("a.onnx", "must end in .safetensors"),
        ("no/a.safetensors", "no directory"),
        (".safetensors/", "must end in"),
    ):
        with pytest.raises(errors.UserError, match=message):
            export.write(trained, tmp_path / target)
    with pytest.raises(errors.UserError, match="--to=s3://b/a.safetensors is a URL"):
        export.write(trained, "s3://b/a.safetensors")
    with pytest.raises(errors.UserError, match="matches none"):
        export.write(trained, path, select="^weights/")
    with pytest.raises(errors.UserError, match="a JAX random key"):
        export.write(trained, path, select="rng")
    convert = checkpoint.Conversion(dict, dict)
    with pytest.raises(errors.UserError, match="--convert is for a .safetensors file"):
        export.write(trained, tmp_path / "a.stablehlo", convert=convert)
    lossy = checkpoint.Conversion(dict, lambda arrays: {})
    with pytest.raises(errors.UserError, match="'params/.*/w' is left over"):
        export.write(trained, path, convert=lossy)
    path.write_bytes(b"mine")
    with pytest.raises(errors.UserError, match="already exists.*--overwrite"):
        export.write(trained, path)

    def full(*args):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(disk.os, "fsync", full)
        with pytest.raises(
            errors.UserError, match="No space left.*Nothing was exported"
        ):
            export.write(trained, path, overwrite=True)
    assert path.read_bytes() == b"mine"
    # What was written so far would take the room that is left.
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.safetensors", "run"]
    export.write(trained, path, overwrite=True)
    assert len(tensors.File(str(path)).shapes) == 4
    for library in ("safetensors", "flatbuffers"):
        find = importlib.util.find_spec
        absent = lambda name, library=library: None if name == library else find(name)
        monkeypatch.setattr(importlib.util, "find_spec", absent)
        kind = "safetensors" if library == "safetensors" else "stablehlo"
        with pytest.raises(
            errors.UserError, match=f"{library} is not installed.*export"
        ):
            export.write(trained, tmp_path / f"new.{kind}")
        assert not (tmp_path / f"new.{kind}").exists()


def test_the_command(tmp_path, capsys):
    train(tmp_path / "run")
    path = tmp_path / "a.safetensors"
    assert program.main([f"{tmp_path}/run@4", f"--to={path}"]) == 0
    assert f"{path}: step 4, 4 arrays" in capsys.readouterr().out
    assert program.main([f"{tmp_path}/run", f"--to={path}"]) == 1
    assert "already exists" in capsys.readouterr().err
    assert program.main([f"{tmp_path}/run", f"--to={path}", "--overwrite"]) == 0
    assert program.main([f"{tmp_path}/run", "--to=a.stablehlo", "--batch_size=0"]) == 1
    header = path.read_bytes()
    size = int.from_bytes(header[:8], "little")
    assert json.loads(header[8 : 8 + size])["params/mlp/~/linear_0/w"]["dtype"] == "F32"
