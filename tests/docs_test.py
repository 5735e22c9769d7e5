"""Tests that the examples in docstrings, the Python blocks and the commands of the docs
run.
"""

import contextlib
import doctest
import importlib.util
import io
import json
import os
import pathlib
import pickle
import re
import shlex
import subprocess
import sys
import traceback
import types
from typing import NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import optax
import pytest

import xshard
from configs import digits, lm, lm_lora, ssl
from tests import forks
from xshard import cli, data
from xshard import config as config_lib
from xshard.files import identity as identity_lib

ROOT = pathlib.Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
RULES = ROOT / "docs" / "rules.md"
TUTORIAL = ROOT / "docs" / "first_experiment.md"
PAGES = [
    README,
    ROOT / "AGENTS.md",
    *sorted(ROOT.glob("docs/*.md")),
    *sorted(ROOT.glob("experiments/*/README.md")),
]
MODULES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in sorted(ROOT.joinpath("xshard").rglob("*.py"))
    if "    >>> " in path.read_text()
]
# Libraries that only tests and examples use. The last three are too large to be in the
# environment of the tests.
LIBRARIES = ("equinox", "flax", "tensorflow", "torch", "torchdata")
ENVIRONMENT = {**os.environ, "PYTHONPATH": forks.python_path(), "JAX_PLATFORMS": "cpu"}


@pytest.fixture(scope="module")
def names():
    """The names that docstring examples may use: libraries, and the experiment `line`
    of `Supervised`'s docstring.
    """
    names = {
        "hk": hk,
        "jax": jax,
        "jnp": jnp,
        "np": np,
        "optax": optax,
        "xshard": xshard,
    }
    names["ml_collections"] = ml_collections
    (example,) = doctest.DocTestFinder(recurse=False).find(
        xshard.Supervised, globs=names
    )
    assert not doctest.DocTestRunner().run(example, clear_globs=False).failed
    return {**names, "line": example.globs["line"]}


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_run(name, names):
    module = importlib.import_module(name)
    result = doctest.testmod(module, extraglobs=names)
    assert result.attempted and not result.failed


def fences(text):
    """Returns the fenced blocks of a page as pairs of language and text."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)
    assert text.count("```") == 2 * len(found)
    return found


def lacking(section):
    """Returns those libraries that a section of a page imports and that are not
    installed.
    """
    imported = rf"^(?:import|from) ({'|'.join(LIBRARIES)})\b"
    names = set(re.findall(imported, section, flags=re.MULTILINE))
    return {name for name in names if not importlib.util.find_spec(name)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_blocks_run(page, tmp_path, monkeypatch, capsys):
    """The blocks of a page share one namespace, which starts with a `config`.

    A text block shows the output of the Python block before it. A section that imports
    a library that is not installed is left out.
    """
    monkeypatch.chdir(tmp_path)
    shared = {"config": digits.get_config()}
    blocks = []
    left_out = set()
    for section in re.split(r"^(?=## )", page.read_text(), flags=re.MULTILINE):
        missing = lacking(section)
        left_out |= missing
        if not missing:
            blocks += fences(section)
    with jax.numpy_dtype_promotion("standard"):
        for (language, block), following in zip(
            blocks, [*blocks, None][1:], strict=True
        ):
            if language == "python":
                exec(compile(block, f"{page.name}: {block[:40]!r}", "exec"), shared)
                out = capsys.readouterr().out
                assert not out or following == ("text", out)
    if page == RULES:
        assert float(shared["loss"]) < 0.01
        (rules,) = [block for language, block in blocks if language == "python"]
        assert len([line for line in rules.splitlines() if line]) <= 25
    if left_out:
        pytest.skip(f"not installed: {', '.join(sorted(left_out))}; the rest ran")


class _Loader:
    """Four batches of an epoch, by the protocol of torchdata's StatefulDataLoader."""

    def __init__(self, epoch):
        self._epoch = epoch
        self._used = 0

    def __iter__(self):
        while self._used < 4:
            self._used += 1
            yield {"x": _Tensor(10 * self._epoch + self._used + np.arange(3))}

    def state_dict(self):
        return {"used": self._used}

    def load_state_dict(self, state):
        self._used = state["used"]


class _Tensor(NamedTuple):
    """Stands for a tensor of torch."""

    array: np.ndarray

    def numpy(self):
        return self.array


@pytest.mark.parametrize("used", range(6))
def test_batches_of_stateful_loaders_resume_at_the_batch(monkeypatch, used):
    """torch, which the page's other blocks need, is too large for this environment."""
    torch = types.SimpleNamespace(save=pickle.dump, load=pickle.load)
    loaders = types.SimpleNamespace(StatefulDataLoader=_Loader)
    module = "torchdata.stateful_dataloader"
    monkeypatch.setitem(sys.modules, "torchdata", types.SimpleNamespace())
    monkeypatch.setitem(sys.modules, module, loaders)
    page = (ROOT / "docs" / "data.md").read_text()
    (adapter,) = [block for _, block in fences(page) if "class Epochs:" in block]
    shared = {"np": np, "torch": torch}
    exec(adapter, shared)
    part = data.Part(batch_size=3, rows=(np.arange(1, 3),), seed=0)
    undisturbed = shared["Epochs"](_Loader, part)
    for _ in range(used):
        next(undisturbed)
    resumed = shared["Epochs"](_Loader, part)
    resumed.set_state(undisturbed.get_state())
    for number in range(used, used + 6):
        batch = next(resumed)["x"]
        np.testing.assert_array_equal(batch, next(undisturbed)["x"])
        epoch, position = divmod(number, 4)
        assert batch.tolist() == [10 * epoch + position + 2, 10 * epoch + position + 3]


@pytest.mark.sample(0.4)
def test_the_notebook_runs(tmp_path, monkeypatch):
    """The notebook's cells run in order, in one namespace, as in Jupyter, which the
    test does not need.
    """
    notebook = json.loads((ROOT / "docs/in_a_notebook.ipynb").read_text())
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    cells = notebook["cells"]
    assert len({cell["id"] for cell in cells}) == len(cells)
    monkeypatch.chdir(tmp_path)
    shared = {}
    with jax.numpy_dtype_promotion("standard"):
        for cell in cells:
            if cell["cell_type"] == "code":
                # The notebook is stored without outputs, which would come from another
                # machine.
                assert cell["outputs"] == [] and cell["execution_count"] is None
                exec(compile("".join(cell["source"]), cell["id"], "exec"), shared)
    assert shared["accuracy"] > 0.5
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {
        "notebook", "notebook.safetensors", "notebook.stablehlo"
    }  # fmt: skip


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_config_keys_exist(page):
    text = page.read_text()
    for link in re.findall(r"\]\(([^)#]+)", text):
        assert link.startswith("https://") or (page.parent / link).exists(), link
    configs = [file.get_config() for file in (digits, lm, lm_lora, ssl)]
    keys = [
        key
        for config in configs
        for key in config_lib.flatten(identity_lib.plain(config))
    ]
    for key in re.findall(
        r"`(?:--)?config\.(?!json|py|experiment_kwargs)([a-z_.]+)", text
    ):
        assert any(f"{known}.".startswith(f"{key.rstrip('.')}.") for known in keys), key


def commands(page):
    """Yields the arguments of `python -m` and of `run.sh` in those blocks of a page
    that name no language.
    """
    for language, block in fences(page.read_text()):
        for line in block.replace("\\\n", " ").splitlines() if not language else ():
            words = shlex.split(line, comments=True)
            if words[:1] == ["./run.sh"]:
                config = ["--config=configs/digits.py", "--workdir=runs/digits"]
                yield ["xshard.main", *config, *words[1:]]
            elif words[:1] == ["python"]:
                assert words[1] == "-m" or (ROOT / words[1]).exists()
                yield words[2:] if words[1] == "-m" else ["-c"]
                if "--" in words:
                    # The command that the launcher starts is checked too.
                    command = words[words.index("--") + 1 :]
                    assert command[1:3] == ["-m", "xshard.main"]
                    yield command[2:]


@pytest.fixture(scope="module")
def tutorial(tmp_path_factory):
    """The directory that the tutorial's first command creates, with the tutorial's
    sweep.
    """
    parent = tmp_path_factory.mktemp("tutorial")
    run(parent, *next(commands(TUTORIAL)))
    (sweep,) = [
        block for _, block in fences(TUTORIAL.read_text()) if "def get_sweep" in block
    ]
    directory = parent / "spirals"
    (directory / "sweep.py").write_text(sweep)
    return directory


def run(directory, *words, stdin=None):
    """Runs a module in a directory, as a user would, and returns its output."""
    command = [sys.executable, "-W", "ignore", "-m", *words]
    completed = subprocess.run(
        command,
        cwd=directory,
        env=ENVIRONMENT,
        input=stdin,
        capture_output=True,
        text=True,
    )
    assert completed.returncode == 0, completed.stdout + completed.stderr
    return completed.stdout


def test_the_tutorial_runs(tutorial):
    """The tutorial's first commands run in order, exactly as written."""
    _, tests, train, more, *_ = commands(TUTORIAL)
    assert [tests[0], train[-1], more[-1]] == [
        "pytest",
        "--workdir=runs/first",
        "--config.steps=1200",
    ]
    assert "2 passed" in run(tutorial, *tests)
    for command, steps in ((train, 1000), (more, 1200)):
        out = run(tutorial, *command)
        results = json.loads((tutorial / "runs/first/results.json").read_text())
        # The accuracy was 100 % on one machine; rounding on another may cost a
        # percentage point or two.
        assert results["step"] == steps and results["eval"]["accuracy"] > 0.97
    assert "steps: 1000 -> 1200" in out


def test_commands_are_accepted(tutorial):
    """The programs accept the flags, config files, keys and types of values in all
    commands of the docs.
    """
    todo = [
        (str(tutorial if page == TUTORIAL else ROOT), words)
        for page in PAGES
        for words in commands(page)
    ]
    assert len(todo) > 30
    assert json.loads(run(ROOT, "tests.docs_test", stdin=json.dumps(todo))) == []


BAD = [
    ["xshard.main", "--config=configs/digits.py", "--workdir=x", "--config.stepz=3"],
    ["xshard.main", "--config=configs/digits.py", "--workdir=x", "--config.steps=many"],
    ["xshard.main", "--config=configs/no.py", "--workdir=x"],
    ["xshard.main", "--config=configs/digits.py", "--work=x"],
    ["xshard.dryrun", "--config=configs/digits.py", "--topologie=v5e:16x16"],
    ["xshard.checkpoint", "list", "runs"],
    ["xshard.new"],
    ["xshard.export", "runs/digits"],
    ["xshard.replay", "runs/digits", "--step=many"],
    ["xshard.replay", "runs/digits", "--config.stepz=3"],
    ["xshard.replay", "--verify_resume=8", "--config=configs/no.py"],
    ["xshard.nothing"],
    ["launch", "--engin=slurm", "--", "python", "-m", "xshard.main", "--workdir=x"],
    [
        "launch",
        "--sweep=configs/no.py",
        "--",
        "python",
        "-m",
        "xshard.main",
        "--workdir=x",
    ],
    ["launch", "halt", "x"],
]


def test_wrong_commands_are_detected():
    todo = [(str(ROOT), words) for words in BAD]
    bad = json.loads(run(ROOT, "tests.docs_test", stdin=json.dumps(todo)))
    assert [words for words, _ in bad] == BAD


def check(module, *arguments):
    """Raises an error unless a program accepts its arguments; it does not run."""
    sys.argv = [module, *arguments]
    if module == "xshard.main":
        from xshard import main as program

        assert cli.parse()[1:] == [] and program._CONFIG.value.is_locked
    elif module == "xshard.dryrun":
        from xshard.dryrun import __main__ as program

        assert cli.parse(program._FLAGS)[1:] == []
        assert program._CONFIG.value.is_locked
    elif module == "launch":
        from launch import __main__ as launch

        if arguments[0] == "status":
            assert len(arguments) == 2
        else:
            launch.main([module, "--dry_run", *arguments])
    elif module == "xshard.checkpoint":
        from xshard.checkpoint import __main__ as tool

        tool._parser().parse_args(arguments)
    elif module == "xshard.export":
        from xshard.export import __main__ as program

        program._parser().parse_args(arguments)
    elif module == "xshard.replay":
        from xshard.replay import __main__ as program

        options, rest = program.parse(arguments)
        if options.verify_resume is not None:
            check("xshard.main", *rest)
        elif rest:
            cli.override(config_lib.default(), rest)
    elif module == "xshard.new":
        assert len(arguments) == 1
    elif module != "-c":
        assert importlib.util.find_spec(module)


def serve():
    """Checks each command in a separate process, since several programs define flags of
    the same name.
    """
    from xshard import loop

    del loop  # Imported once, before the forks, to save time.
    bad = []
    for directory, words in json.load(sys.stdin):
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            os.chdir(directory)
            sys.path.insert(0, directory)
            output = io.StringIO()
            with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
                try:
                    check(*words)
                    output = io.StringIO()
                except (Exception, SystemExit):
                    traceback.print_exc()
            os.write(writing, output.getvalue().encode()[-2000:])
            os._exit(0)
        os.close(writing)
        with open(reading) as answer:
            text = answer.read()
        os.waitpid(child, 0)
        bad += [(words, text)] if text else []
    print(json.dumps(bad))


if __name__ == "__main__":
    serve()
