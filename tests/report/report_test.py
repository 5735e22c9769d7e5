"""The HTML page of a report, for ordinary, damaged and hostile work directories."""

import html
import json
import os
import re
import shlex
import subprocess
import sys
import threading

import pytest

from tests import forks, toy
from tests.report import samples
from xshard import checkpoint, loop
from xshard.report import __main__ as tool
from xshard.report import page as page_lib
from xshard.report import runs

PLOTLY = re.compile(r"<script>/\*\*\n.*?</script>", re.DOTALL)


def report(tmp_path, *workdirs):
    """Writes a report; returns its HTML without plotly's own script."""
    output = tmp_path / "out" / "report.html"
    assert tool.main([*map(str, workdirs), f"--output={output}"]) == 0
    source = output.read_text()
    rest, count = PLOTLY.subn("", source)
    assert count == 1 and len(source) - len(rest) > 1e6
    return rest


def words(page):
    """Returns the visible text of a page outside its charts."""
    page = re.sub(r"<(script|style)[ >].*?</\1>", "", page, flags=re.DOTALL)
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", page)).split())


def text(source):
    """Returns the visible text of a piece of HTML."""
    return html.unescape(re.sub(r"<[^>]*>", "", source))


def rows(page, index=0):
    """Returns the rows of a table as dictionaries with the column names as keys."""
    source = re.findall(r"<table .*?</table>", page, re.DOTALL)[index]
    lines = re.findall(r"<tr[^>]*>(.*?)</tr>", source, re.DOTALL)
    cells = [
        re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", line, re.DOTALL) for line in lines
    ]
    names, *others = [[text(cell) for cell in line] for line in cells]
    return [dict(zip(names, line, strict=True)) for line in others]


def read(tmp_path, content, **kwargs):
    (run,) = runs.read([str(samples.write(tmp_path / "one", content, **kwargs))])
    return run


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """A run of 7 steps that was extended to 12, with skipped steps and a best
    checkpoint.
    """
    folder = tmp_path_factory.mktemp("runs") / "whole"
    for steps in (7, 12):
        config = toy.get_config()
        config.update(steps=steps, overflow_above=2.0)
        config.checkpoint.keep_best = 1
        assert loop.run(config.lock(), str(folder), "") == 0
    return folder


def contents(folder):
    return {
        p: (p.stat().st_mtime_ns, p.read_bytes())
        for p in folder.rglob("*")
        if p.is_file()
    }


def test_the_page_of_a_real_run(tmp_path, real):
    before = contents(real)
    page = report(tmp_path, real)
    assert contents(real) == before
    (row,) = rows(page)
    error = json.loads((real / "results.json").read_text())["eval"]["error"]
    assert row["state"] == "done" and row["step"] == "12 of 12"
    assert float(row["eval error"]) == pytest.approx(error, rel=1e-3)
    lines = [
        json.loads(line) for line in (real / "metrics.jsonl").read_text().splitlines()
    ]
    skipped = [line["skipped"] for line in lines if "skipped" in line][-1]
    assert skipped > 0 and row["skipped"] == str(skipped)
    entries = checkpoint.read_catalog(real / "checkpoints").entries
    saved = {int(row["step"]): row for row in rows(page, 1)}
    assert list(saved) == [entry.step for entry in entries] and 12 in saved
    assert {row["state"] for row in saved.values()} == {"complete"}
    (best,) = [entry.step for entry in entries if entry.best]
    assert saved[best]["kept"] == "best 1 by error" and "written with" in words(page)


def test_the_code_on_the_page_restores_the_config(tmp_path, real):
    blocks = re.findall(r"<pre>(.*?)</pre>", report(tmp_path, real), re.DOTALL)
    program, command = map(html.unescape, blocks)
    names = {}
    exec(program, names)
    _, path = shlex.split(command)[3].split(":")
    config = names["get_config"](path)
    assert "_run" not in config
    before = json.loads((real / "config.json").read_bytes())
    assert json.loads(config.to_json()) == {
        k: v for k, v in before.items() if k != "_run"
    }


def test_several_runs_are_shown_side_by_side(tmp_path):
    paths = [
        samples.write(
            tmp_path / x / "run",
            samples.rows(),
            seed=seed,
            results={"accuracy": 0.5},
            attempts=samples.ATTEMPTS,
        )
        for seed, x in enumerate("ab")
    ]
    page = report(tmp_path, *paths, f"{paths[0]}/", tmp_path / "b/../a/run")
    assert [(row["run"], row["seed"]) for row in rows(page)] == [
        ("a/run", "0"),
        ("b/run", "1"),
    ]
    (row, _) = rows(page)
    # The time includes the pause between the attempts.
    assert (row["time"], row["attempts"], row["eval accuracy"]) == (
        "1:23:54",
        "2",
        "0.5",
    )
    assert row["goodput"] == "0.7%"
    assert "steps" not in row and "They differ in seed." in words(page)


@pytest.mark.parametrize(
    "doing,ago,shown",
    [
        ("done", 1000, "done"),
        ("stopped", 1000, "stopped at step 10"),
        ("training", 0, "training"),
        ("evaluating", 0, "running: evaluating"),
        ("failed: no data", 1000, "failed: no data"),
        ("training", 600, "gone, or silent for 10 min; was training"),
        (None, 0, "not known: there is no status.json"),
    ],
)
def test_the_state_of_a_run_is_shown(tmp_path, doing, ago, shown):
    run = read(tmp_path, [{"step": 10, "loss": 1.0}], doing=doing, ago=ago)
    assert (run.doing, run.step) == (shown, 10)


@pytest.mark.parametrize("doing", ["failed: not finite", "done", None])
def test_a_run_with_results_that_are_not_finite_is_not_done(tmp_path, doing):
    path = samples.write(tmp_path / "one", [{"step": 400, "loss": 1.0}], doing=doing)
    results = {
        "step": 400,
        "eval": {},
        "finite": False,
        "why": "step 400: the loss is nan",
    }
    (path / "results.json").write_text(json.dumps(results))
    page = report(tmp_path, path)
    alarm = '<p class="alarm">one: not finite: step 400: the loss is nan</p>'
    assert 0 < page.index(alarm) < page.index("<table ")
    assert 'class="state failed"' in page and 'class="state done"' not in page


def test_results_from_before_a_resume_are_not_the_current_results(tmp_path):
    content = [
        {"step": 400, "eval/accuracy": 0.5},
        {"step": 500, "eval/accuracy": 0.75},
    ]
    going_on = {"results": {"accuracy": 0.5}, "doing": "training", "ago": 0}
    (row,) = rows(
        report(tmp_path, samples.write(tmp_path / "one", content, **going_on))
    )
    assert row["eval accuracy"] == "0.75 at step 500"


def test_the_losses_of_all_learners_are_compared(tmp_path):
    content = [
        {
            "step": 1,
            "actor/loss": 2.0,
            "critic/loss": 0.5,
            "actor/skipped": 1,
            "loss_scale": 8,
        }
    ]
    paths = [
        samples.write(tmp_path / "two", content),
        samples.write(tmp_path / "none", []),
    ]
    row, none = rows(report(tmp_path, *paths))
    assert (row["training actor/loss"], row["training critic/loss"]) == ("2", "0.5")
    assert (
        row["actor/skipped"] == "1" and none["training actor/loss"] == page_lib.NOTHING
    )


def test_a_run_without_metrics_yet_is_shown(tmp_path):
    page = report(
        tmp_path, samples.write(tmp_path / "one", None, doing="compiling", ago=0)
    )
    assert "no metrics yet" in words(page) and "running: compiling" in words(page)
    assert '<script type="application/json">' not in page


def test_damaged_files_and_values_that_are_not_finite_are_reported(tmp_path):
    content = [{"step": step, "loss": 1.0} for step in range(380, 401, 5)]
    content[0]["loss"] = content[-1]["loss"] = float("inf")
    path = samples.write(tmp_path / "one", content)
    with (path / "metrics.jsonl").open("a") as file:
        file.write('nonsense\n{"step": 410, "loss"')
    (path / "results.json").write_text("[1]")
    (path / "status.json").write_text(
        '[{"doing": "training", "time": "noon", "step": "a"}]'
    )
    page = report(tmp_path, path)
    assert "The last line of metrics.jsonl is incomplete" in words(page)
    assert "skipped 1 invalid line(s): 6" in words(page)
    assert "2 values are not finite: red crosses" in words(page)
    assert "results.json cannot be read: it is not an object" in words(page)
    assert "status.json was not written by a run" in words(page)
    (row,) = rows(page)
    assert row["step"] == "400 of 400" and row["training loss"] == "not finite"
    assert '<span class="failed" style="">not finite</span>' in page


def test_the_values_of_groups_share_a_cell():
    nan = float("nan")
    failed = '<span class="failed" style="">'
    assert page_lib.numbers([1.0, nan]) == f"{failed}1 · not finite</span>"
    assert page_lib.numbers([2.0] * 3) == "2 · 2 · 2"
    shown = page_lib.numbers([nan, 1.0, 2.0, 3.0])
    assert shown == f"{failed}1 to 3 (4 groups, 1 not finite)</span>"


EVIL = '</script><img src=x onerror="alert(1)">'


def test_text_from_files_is_escaped(tmp_path):
    content = [
        {"step": s, EVIL: 1.0, "loss": 1.0, "\ud800\x00\x1b": 1.0} for s in (1, 2)
    ]
    content.append({"step": 3, f"eval/{EVIL}": 2.0})
    changes = {"experiment": EVIL, f"key {EVIL}": EVIL, "doing": f"failed: {EVIL}"}
    paths = [
        samples.write(
            tmp_path / name, content, results={EVIL: 1.0}, seed=seed, **changes
        )
        for seed, name in enumerate(["<img>", "$x$", "名前 \udce9"])
    ]
    for chosen in (paths, paths[:1]):
        page = report(tmp_path, *chosen)
        assert (
            "<img" not in page
            and EVIL in words(page)
            and f"failed: {EVIL}" in words(page)
        )
        # The charts contain only numbers and escaped text. Text is escaped for HTML,
        # and once more for plotly.
        assert page.count("</script>") == page.count(
            "<script"
        ) and "&lt;img" not in words(page)


def test_the_page_loads_and_sends_nothing(tmp_path):
    page = report(tmp_path, samples.write(tmp_path / "one", samples.rows()))
    assert (
        not re.findall(r"<(?:link|img|iframe|form|script [^>]*src)", page)
        and "://" not in page
    )
    assert page.count("showSendToCloud: false") == page.count("Plotly.newPlot(") == 1
    assert page.count('<script type="application/json">') > 5
    assert "connect-src 'none'; form-action 'none'" in page


def error(capsys, *arguments):
    assert tool.main([*map(str, arguments)]) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ") and "Traceback" not in captured.err
    return captured.err


def test_bad_directories_are_all_named_and_nothing_is_written(tmp_path, capsys):
    good = samples.write(tmp_path / "sweep" / "000", [{"step": 1, "loss": 1.0}])
    (tmp_path / "file").write_text("")
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "config.json").write_text("{")
    out = tmp_path / "out.html"
    bad = [tmp_path / name for name in ("none", "sweep", "file", "odd")]
    message = error(capsys, good, *bad, f"--output={out}")
    for part in (
        f"{bad[0]}: there is no such directory",
        f"{bad[1]} is not a run's work directory: it has no config.json. The "
        f"directories below it are: give {bad[1]}/*/",
        f"{bad[2]} is a file; give the work directories of runs",
        f"{bad[3] / 'config.json'} cannot be read",
    ):
        assert part in message
    assert not out.exists()
    assert "a work directory is empty" in error(capsys, "", f"--output={out}")


def test_an_output_that_cannot_be_written_is_refused(tmp_path, capsys):
    path = samples.write(tmp_path / "one", None)
    (tmp_path / "file").write_text("")
    (tmp_path / "folder.html").mkdir()
    message = error(capsys, path, f"--output={tmp_path / 'file/x.html'}")
    assert f"--output={tmp_path / 'file/x.html'} cannot be written: " in message
    for output in ("report.txt", tmp_path / "folder.html"):
        assert "must be a file that ends in .html" in error(
            capsys, path, f"--output={output}"
        )


@pytest.mark.parametrize("missing", ["pandas", "plotly"])
def test_a_missing_library_is_reported_with_the_install_command(
    tmp_path, capsys, monkeypatch, missing
):
    path = samples.write(tmp_path / "one", None)
    known = lambda name: None if name == missing else name
    monkeypatch.setattr(tool.importlib.util, "find_spec", known)
    message = error(capsys, path, f"--output={tmp_path / 'x.html'}")
    assert f"{missing} is not installed" in message
    assert "pip install '.[report]'" in message


def test_checkpoints_in_other_directories_are_shown(tmp_path, real):
    places = [str(real / "checkpoints"), str(tmp_path / "nowhere"), "ftp://bucket/x"]
    paths = [
        samples.write(tmp_path / name, None, checkpoint={"directory": place})
        for name, place in zip("abc", places, strict=True)
    ]
    page = report(tmp_path, *paths)
    assert {row["run"] for row in rows(page, 1)} == {"a"}
    assert f"b: {places[1]}: cannot be read: {places[1]} is not a directory" in words(
        page
    )
    assert (
        f"c: {places[2]}: cannot be read: '{places[2]}' is not a valid place"
        in words(page)
    )


def test_checkpoint_storage_that_does_not_answer_does_not_block(tmp_path, monkeypatch):
    silent = threading.Event()
    monkeypatch.setattr(checkpoint, "read_catalog", lambda place: silent.wait())
    path = samples.write(
        tmp_path / "one", None, checkpoint={"directory": "gs://bucket/x"}
    )
    (run,) = runs.read([str(path)], checkpoint_seconds=0.05)
    silent.set()
    assert run.checkpoints.problem == "the storage did not answer in time"
    assert not run.checkpoints.catalog.entries


def test_a_report_uses_no_device(tmp_path, real):
    # A run on this machine may hold all devices. With this platform JAX fails as soon
    # as it looks for devices.
    paths = {"PYTHONPATH": forks.python_path(), "JAX_PLATFORMS": "none_such"}
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "xshard.report",
            str(real),
            f"--output={tmp_path / 'x.html'}",
        ],
        env={**os.environ, **paths},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{tmp_path / 'x.html'}: 1 run\n"
    assert "best 1 by error" in (tmp_path / "x.html").read_text()


def test_the_largest_and_smallest_numbers_are_shown(tmp_path):
    ends = [1e308, -1e308, 5e-324, 0, 10**400, None]
    names = ("loss", "loss_scale", "perf/seconds", "perf/time", "perf/steps_per_second")
    content = [
        {"step": step, **dict.fromkeys(names, end)} for step, end in enumerate(ends)
    ]
    content.append({"step": 2**63 - 1, "loss": 1e308, "eval/loss": [1e308, None]})
    paths = [
        samples.write(tmp_path / str(seed), content, seed=seed) for seed in range(2)
    ]
    assert "values are not finite" in words(report(tmp_path, *paths))


def batch_sizes(page, name):
    """Returns the values of a curve."""
    values = set()
    for source in re.findall(r'<script type="application/json">(.*?)</script>', page):
        for trace in json.loads(source)["data"]:
            if trace["name"] == name:
                values |= set(trace["y"])
    return values


def test_the_noise_scale_is_shown_beside_the_batch_size(tmp_path):
    noisy = samples.rows(steps=100)
    for row in noisy:
        if "loss" in row:
            row["noise_scale"] = 1234.0
    noisy[-1]["noise_scale"] = None
    folder = samples.write(tmp_path / "one", noisy)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "batch_size": 96}))
    page = report(tmp_path, folder)
    assert "Batches above 1200 examples bring little" in words(page)
    assert "1 values are unknown, as the mean gradient is too small" in words(page)
    assert batch_sizes(page, "batch size") == {96}
    # A slice that trains on its own has a gradient of its part of the batch.
    for row in noisy:
        if "noise_scale" in row:
            row["noise_scale"] = [100.0, 200.0]
    apart = samples.write(tmp_path / "apart", noisy)
    config = {**config, "batch_size": 96, "outer": {"every_steps": 10}}
    (apart / "config.json").write_text(json.dumps(config))
    page = report(tmp_path, apart)
    assert "Batches above 200 examples bring little" in words(page)
    assert batch_sizes(page, "batch size of a slice") == {48}
