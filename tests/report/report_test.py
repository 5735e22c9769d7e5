"""The report as a whole: what the page says, of real runs and of odd ones, and what it never does."""

import html.parser
import io
import json
import os
import re
import subprocess
import sys
import threading
import urllib.parse

import jax
import matplotlib.image
import pytest

from tests import toy
from tests.report import samples
from xshard import checkpoint, loop
from xshard.report import __main__ as tool
from xshard.report import runs, words

VOID = {"meta", "br", "wbr", "img", "link", "input", "hr"}


class Page(html.parser.HTMLParser):
    """What is in a page; fails if it is not well formed."""

    def __init__(self, path):
        super().__init__()
        self.source = path.read_text()
        self.elements, self.open, self.texts = [], [], []
        self.tables = []
        self.feed(self.source)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" in self.open:
            return
        self.texts.append(data)
        if self.open and {"td", "th"} & set(self.open):
            self.tables[-1][-1][-1] += data

    @property
    def text(self):
        return " ".join(" ".join(self.texts).split())

    def all(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]

    def rows(self, index=0):
        """The rows of a table, by the names of its columns."""
        names, *rest = self.tables[index]
        return [dict(zip(names, row, strict=True)) for row in rest]


def report(tmp_path, *workdirs, code=0):
    """Makes a report; returns its page and its PNG files."""
    output = tmp_path / "out" / "report.html"
    assert tool.main([*map(str, workdirs), f"--output={output}"]) == code
    page = Page(output)
    pngs = {p.name: p.read_bytes() for p in (tmp_path / "out" / "report_png").iterdir()}
    return page, pngs


def check(page, pngs):
    """What every page keeps to."""
    charts = [a for a in page.all("svg") if a.get("class") == "chart"]
    figures = page.all("figure")
    links = [attributes["href"] for attributes in page.all("a")]
    assert len(charts) == len(figures) == len(pngs)
    assert sorted(links) == sorted(f"report_png/{name}" for name in pngs)
    assert all(chart["role"] == "img" and len(chart["aria-label"]) > 20 for chart in charts)
    assert not page.all("script") and not page.all("img") and not page.all("link")
    # A chart's own style sheet would be that of the whole page.
    assert len(page.all("style")) == 1
    for tag, attributes in page.elements:
        assert not any(name.startswith("on") for name in attributes)
        for name in ("src", "href", "xlink:href", "srcset", "data"):
            assert re.match(r"#|report_png/|$", attributes.get(name, "")), (tag, attributes)
    # Neither from CSS, nor from attributes that are CSS.
    assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)", page.source))
    assert "@import" not in page.source
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    # Equal definitions in one chart may repeat; none is shared between two.
    chart_ids = re.findall(r'<figure id="([^"]*)"', page.source)
    assert len(chart_ids) == len(set(chart_ids)) and set(chart_ids) <= set(ids)
    for content in pngs.values():
        picture = matplotlib.image.imread(io.BytesIO(content), format="png")
        assert picture.shape[1] >= 1000 and picture.std() > 0.01


def facts(page):
    pairs = re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", page.source)
    return {name: re.sub(r"<small>.*|<[^>]*>", "", value) for name, value in pairs}


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """A run that was stopped at step 7 and went on, with skips and a best checkpoint; and one of groups."""
    folder = tmp_path_factory.mktemp("runs")
    for name, parts, changes in (
        ("whole", (7, 12), {"overflow_above": 2.0}),
        ("groups", (12,), {"group_assignment": ((0, 1, 2, 3), (4, 5, 6, 7)), "seed": 1}),
    ):
        for steps in parts:
            config = toy.get_config()
            config.update(steps=steps, **changes)
            config.checkpoint.keep_best = 1
            assert loop.run(config.lock(), str(folder / name), "") == 0
    return folder


def contents(folder):
    return {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in folder.rglob("*") if p.is_file()}


def test_a_real_run(tmp_path, real, capsys):
    before = contents(real)
    page, pngs = report(tmp_path, real / "whole")
    check(page, pngs)
    assert contents(real) == before
    assert "1 run" in capsys.readouterr().out
    results = json.loads((real / "whole/results.json").read_text())
    said = facts(page)
    assert said["step"] == "12 of 12" and float(said["evaluation: error"]) == pytest.approx(
        results["eval"]["error"], rel=1e-3
    )
    rows = [json.loads(line) for line in (real / "whole/metrics.jsonl").read_text().splitlines()]
    last = [row for row in rows if "skipped" in row][-1]
    assert last["skipped"] > 0 and said["skipped updates"] == str(last["skipped"])
    assert "between which rows updates were skipped" in page.text
    by_step = {int(row["step"]): row for row in page.rows()}
    entries = checkpoint.read_catalog(real / "whole/checkpoints").entries
    assert list(by_step) == [entry.step for entry in entries] and 12 in by_step
    assert all(
        row["state"] == "complete" and row["committed"][-3:] == "UTC" for row in by_step.values()
    )
    (best,) = [entry.step for entry in entries if entry.best]
    assert by_step[best]["kept"] == "best 1 by error"
    assert f"jax {jax.__version__}" in page.text


def test_real_runs_side_by_side(tmp_path, real):
    page, pngs = report(tmp_path, real / "whole", real / "groups")
    check(page, pngs)
    whole, groups = page.rows()
    assert (whole["run"], groups["run"]) == ("whole", "groups")
    results = json.loads((real / "groups/results.json").read_text())["eval"]
    shown = [float(part) for part in groups["eval error"].split(" · ")]
    assert shown == pytest.approx(results["error"], rel=1e-3)
    assert float(groups["eval ensemble/error"]) == pytest.approx(
        results["ensemble/error"], rel=1e-3
    )
    assert (whole["seed"], groups["seed"]) == ("0", "1")
    assert {"group_assignment", "overflow_above"} <= whole.keys() and "batch_size" not in whole
    assert [row["whole"] for row in page.rows(2) if row["key"] == "seed"] == ["0"]


def test_a_run_as_the_schema_has_it(tmp_path):
    job = [samples.evaluation(100, better=0.1)]
    results = {"accuracy": 0.93125, "average/accuracy": 0.94}
    path = samples.write(tmp_path / "one", samples.rows(), job=job, results=results)
    page, pngs = report(tmp_path, path)
    check(page, pngs)
    assert len(pngs) == 12
    said = facts(page)
    assert said["state"] == "done" and said["evaluation: accuracy"] == "0.9313"
    # The two processes' 12 + 0.11 * 200 seconds each.
    assert said["time"] == "1:08" and "in 2 processes" in page.source
    assert said["model FLOP/s"].endswith(" T") and said["utilisation"].endswith("%")
    assert "evaluation job" in page.text and "another process went on" in page.text


def test_a_table_of_runs_marks_the_best_result(tmp_path):
    made = [{"step": 400, "loss": 1.0}]
    paths = [
        samples.write(tmp_path / name, made, results={"accuracy": accuracy}, seed=seed)
        for seed, (name, accuracy) in enumerate({"a": 0.5, "b": 0.75, "c": 0.75}.items())
    ]
    paths.append(samples.write(tmp_path / "d", [*made, {"step": 401, "eval/accuracy": 0.99}]))
    page, _ = report(tmp_path, *paths)
    assert [row["eval accuracy"] for row in page.rows()] == ["0.5", "0.75", "0.75", "0.99 at 401"]
    assert re.findall(r"<b>(.*?)</b>", page.source) == ["0.75", "0.75"]


@pytest.mark.parametrize(
    "doing,ago,said",
    [("done", 1000, "done"), ("stopped", 1000, "stopped at step 10"), ("training", 0, "training"),
     ("evaluating", 0, "running: evaluating"), ("failed: no data", 1000, "failed: no data"),
     ("training", 600, "gone, or silent for 10 min; was training"),
     (None, 0, "not known: there is no status.json")],
)  # fmt: skip
def test_what_a_run_is_doing(tmp_path, doing, ago, said):
    samples.write(tmp_path / "one", [{"step": 10, "loss": 1.0}], doing=doing, ago=ago)
    (run,) = runs.read([str(tmp_path / "one")])
    assert (run.doing, run.step) == (said, 10)


def test_a_result_of_before_a_run_went_on_is_not_its_result_now(tmp_path):
    made = [{"step": 400, "eval/accuracy": 0.5}, {"step": 500, "eval/accuracy": 0.75}]
    kwargs = {"results": {"accuracy": 0.5}, "doing": "training", "ago": 0}
    page, _ = report(tmp_path, samples.write(tmp_path / "one", made, **kwargs))
    assert facts(page)["evaluation: accuracy"] == "0.75" and "at step 500" in page.text


def test_no_metrics_yet(tmp_path):
    path = samples.write(tmp_path / "one", None, doing="compiling", ago=0)
    page, pngs = report(tmp_path, path)
    check(page, pngs)
    assert not pngs and "no metrics yet" in page.text and "running: compiling" in page.text


def test_what_is_damaged_or_not_finite_is_said(tmp_path):
    made = [{"step": step, "loss": 1.0} for step in range(380, 401, 5)]
    made[0]["loss"] = made[2]["loss"] = float("inf")
    path = samples.write(tmp_path / "one", made)
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 410, "loss"')
    (path / "results.json").write_text("[1]")
    (path / "status.json").write_text('[{"doing": "training", "time": "noon", "step": "a"}]')
    page, pngs = report(tmp_path, path)
    check(page, pngs)
    assert "The last line of metrics.jsonl is cut off" in page.text
    assert "2 values are not finite: gaps." in page.text
    assert "results.json cannot be read: it is not an object" in page.text
    assert facts(page)["step"] == "400 of 400"


@pytest.mark.parametrize("doing", ["failed: not finite", "done", None])
def test_a_run_that_has_not_ended_finite_is_not_done(tmp_path, doing):
    path = samples.write(tmp_path / "one", [{"step": 400, "loss": 1.0}], doing=doing)
    results = {"step": 400, "eval": {}, "finite": False, "why": "step 400: the loss is nan"}
    (path / "results.json").write_text(json.dumps(results))
    page, _ = report(tmp_path, path)
    assert facts(page)["state"] == "not finite: step 400: the loss is nan"
    assert 'class="state failed"' in page.source and 'class="state done"' not in page.source


def test_numbers_of_groups():
    nan = float("nan")
    assert words.numbers([1.0, nan]) == "1 · \N{EN DASH}"
    assert words.numbers([nan, 1.0, 2.0, 3.0]) == "1 to 3 (4 groups, 1 not finite)"
    assert words.numbers([1.0, nan, 1.0, 1.0]) == "1 (all 4 groups, 1 not finite)"
    assert words.numbers([nan] * 4) == "\N{EN DASH} (4 groups, 4 not finite)"
    assert words.numbers([2.0] * 5) == "2 (all 5 groups)"


def test_links_of_a_page_with_an_odd_name(tmp_path):
    path = samples.write(tmp_path / "one", [{"step": 1, "loss": 1.0}])
    output = tmp_path / 'a"><b>#1%.html'
    assert tool.main([str(path), f"--output={output}"]) == 0
    page = Page(output)
    (link,) = {attributes["href"].rsplit("/", 1)[0] for attributes in page.all("a")}
    assert urllib.parse.unquote(link) == f"{output.stem}_png" and not page.all("b")
    assert (tmp_path / urllib.parse.unquote(link) / "loss.png").exists()


def test_a_result_without_a_step(tmp_path):
    path = samples.write(tmp_path / "one", [{"step": 1, "loss": 1.0}], doing=None)
    (path / "results.json").write_text('{"step": "a", "eval": {"error": 1}}')
    page, _ = report(tmp_path, path)
    assert facts(page)["state"] == "done"


EVIL = "<script>alert(1)<"


def test_texts_from_files_are_only_texts(tmp_path):
    tag = '"><img src=x onerror=alert(1)>'
    names = (f"a {tag}", "$\\frac$ &lt;", "perf/<b>x", "\ud800\x00\x1b")
    rows = [{"step": 1, **dict.fromkeys(names, 1.0)}, {"step": 2, f"eval/{tag}": 2.0}]
    changes = {"experiment": tag, f"key {tag}": EVIL}
    paths = [
        samples.write(tmp_path / name, rows, doing=f"failed: {tag}", results={tag: 1.0}, **changes)
        for name in (EVIL, "_$hidden$", "名前 \udce9")
    ]
    for chosen in (paths, paths[:1]):
        page, pngs = report(tmp_path, *chosen)
        check(page, pngs)
        assert EVIL in page.text and tag in page.text
        assert not page.all("b") and "Training: $\\frac$ &lt;" in page.text
        assert len(chosen) == 1 or "_$hidden$" in page.text


def test_two_runs_of_one_name(tmp_path):
    paths = [samples.write(tmp_path / x / "run", [{"step": 1, "loss": 1.0}]) for x in ("a", "b")]
    page, _ = report(tmp_path, *paths, f"{paths[0]}/", tmp_path / "b/../a/run")
    assert [row["run"] for row in page.rows()] == ["a/run", "b/run"]


def error(capsys, *arguments):
    assert tool.main([*map(str, arguments)]) == 1
    captured = capsys.readouterr()
    assert (
        captured.err.startswith("error: ") and "Traceback" not in captured.err and not captured.out
    )
    return captured.err


def test_a_bad_directory_among_good_ones_stops_all_before_anything_is_written(tmp_path, capsys):
    good = samples.write(tmp_path / "sweep" / "000", [{"step": 1, "loss": 1.0}])
    (tmp_path / "sweep" / "sweep.json").write_text("[]")
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "config.json").write_text("{")
    out = tmp_path / "out.html"
    bad = [tmp_path / "none", tmp_path / "sweep", tmp_path / "sweep/sweep.json", tmp_path / "odd"]
    said = error(capsys, good, *bad, f"--output={out}")
    for part in (
        f"{bad[0]}: there is no such directory",
        f"{bad[1]} is no run's work directory: it has no config.json. Those below it are: give {bad[1]}/*/",
        f"{bad[2]} is a file; give the work directories of runs",
        f"{bad[3] / 'config.json'} cannot be read",
    ):
        assert part in said
    assert not out.exists() and not (tmp_path / "out_png").exists()
    assert "a work directory is empty" in error(capsys, "", f"--output={out}")


def test_no_arguments(capsys):
    with pytest.raises(SystemExit) as raised:
        tool.main([])
    assert raised.value.code == 2 and "WORKDIR" in capsys.readouterr().err


def test_an_output_that_cannot_be_written(tmp_path, capsys):
    path = samples.write(tmp_path / "one", None)
    (tmp_path / "file").write_text("")
    (tmp_path / "folder.html").mkdir()
    said = error(capsys, path, f"--output={tmp_path / 'file/x.html'}")
    assert f"--output={tmp_path / 'file/x.html'} cannot be written: " in said
    for output in ("report.txt", tmp_path / "folder.html"):
        assert "must be a file that ends in .html" in error(capsys, path, f"--output={output}")


def test_a_missing_matplotlib_is_named_with_the_command(tmp_path, capsys, monkeypatch):
    path = samples.write(tmp_path / "one", None)
    monkeypatch.setattr(tool.importlib.util, "find_spec", lambda name: None)
    assert "pip install '.[report]'" in error(capsys, path, f"--output={tmp_path / 'x.html'}")


def test_a_second_report_takes_the_place_of_the_first_and_leaves_others_files(tmp_path):
    first = samples.write(tmp_path / "a", [{"step": 1, "loss": 1.0, "old": 1.0}])
    second = samples.write(tmp_path / "b", [{"step": 1, "loss": 1.0, "new": 1.0}])
    _, pngs = report(tmp_path, first)
    assert pngs.keys() == {"loss.png", "old.png"}
    (tmp_path / "out/report_png/mine.png").write_bytes(b"")
    _, pngs = report(tmp_path, second)
    assert pngs.keys() == {"loss.png", "new.png", "mine.png"}


def test_checkpoints_elsewhere(tmp_path, real):
    place = str(real / "whole/checkpoints")
    rows = [{"step": 1, "loss": 1.0}]
    there = samples.write(tmp_path / "there", rows, checkpoint={"directory": place})
    gone = samples.write(
        tmp_path / "gone", rows, checkpoint={"directory": str(tmp_path / "nowhere")}
    )
    odd = samples.write(tmp_path / "odd", rows, checkpoint={"directory": "ftp://bucket/x"})
    page, pngs = report(tmp_path, there, gone, odd)
    check(page, pngs)
    shown = [row for row in page.rows(1) if row["run"] == "there"]
    assert [int(row["step"]) for row in shown] == [
        e.step for e in checkpoint.read_catalog(place).entries
    ]
    assert (
        f"gone: {tmp_path / 'nowhere'}: cannot be read: {tmp_path / 'nowhere'} is no directory"
        in page.text
    )
    assert (
        "odd: ftp://bucket/x: cannot be read: 'ftp://bucket/x' is no place for checkpoints"
        in page.text
    )


def test_a_place_of_checkpoints_that_does_not_answer_holds_nothing_up(tmp_path, monkeypatch):
    silent = threading.Event()
    monkeypatch.setattr(runs.checkpoint, "read_catalog", lambda place: silent.wait())
    path = samples.write(tmp_path / "one", None, checkpoint={"directory": "gs://bucket/x"})
    (run,) = runs.read([str(path)], checkpoint_seconds=0.05)
    silent.set()
    assert run.checkpoints.problem == "it has not answered in time" and not run.checkpoints.entries


def test_no_device_is_touched(tmp_path, real):
    # A run on this machine may have them all. With such a platform JAX fails at its first look at devices.
    paths = {"PYTHONPATH": os.pathsep.join(sys.path), "JAX_PLATFORMS": "none_such"}
    done = subprocess.run(
        [sys.executable, "-m", "xshard.report", str(real / "whole"), f"--output={tmp_path / 'x.html'}"],
        env={**os.environ, **paths}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert re.fullmatch(r".*/x\.html: 1 run, \d+ charts; as PNG files in .*/x_png/\n", done.stdout)
    assert "best 1 by error" in (tmp_path / "x.html").read_text()


def test_processes_are_told_apart_also_where_the_first_row_comes_late(tmp_path):
    # Of the second process the first row is of a later second than the last one of the first.
    times = [
        (10, 100.0, 10.0),
        (20, 110.0, 20.0),
        (30, 150.0, 30.0),
        (40, 160.0, 40.0),
        (50, 300.0, 5.0),
    ]
    made = [{"step": s, "loss": 1.0, "perf/time": t, "perf/seconds": p} for s, t, p in times]
    made.append({"step": 60, "loss": 1.0, "perf/time": None, "perf/seconds": 9.0})
    (run,) = runs.read([str(samples.write(tmp_path / "one", made))])
    assert [(start.first, start.last, start.seconds) for start in run.starts] == [
        (10, 20, 20.0), (30, 40, 40.0), (50, 60, 9.0),
    ]  # fmt: skip
    assert run.seconds == 69.0 and run.restarts == [30, 50] and not run.starts[0].parts


def test_the_result_is_the_last_evaluation_also_where_no_row_says_so(tmp_path):
    made = [{"step": 300, "eval/a": 1.0, "eval/b": 1.0}, {"step": 400, "eval/b": 2.0}]
    path = samples.write(tmp_path / "one", made, results={"a": 3.0, "b": 2.0, "c": [4.0, 5.0]})
    (run,) = runs.read([str(path)])
    shown = {name: (c.steps.tolist(), c.values.tolist()) for name, c in run.evaluation.items()}
    assert shown == {
        "a": ([300, 400], [[1.0], [3.0]]), "b": ([300, 400], [[1.0], [2.0]]), "c": ([400], [[4.0, 5.0]]),
    }  # fmt: skip
