"""The charts of a report: their list, their contents, and the way in which they are
drawn.
"""

import json

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import plotly.io.json
import pytest

from tests.report import samples
from xshard.pod import attempts
from xshard.report import charts, runs


def read(tmp_path, *contents, **kwargs):
    paths = [
        samples.write(tmp_path / f"run{seed}", lines, seed=seed, **kwargs)
        for seed, lines in enumerate(contents)
    ]
    return runs.read([str(path) for path in paths])


def draw(some_runs, name):
    """Returns the traces and the layout of a chart."""
    (chart,) = [chart for chart in charts.charts(some_runs) if chart.name == name]
    return checked(charts.figure(chart, some_runs))


def checked(figure):
    """Returns the traces and the layout as the page has them."""
    figure = json.loads(plotly.io.json.to_json_plotly(figure))
    # Plotly knows all properties, and it refuses wrong ones.
    go.Figure(**figure)
    return figure["data"], figure["layout"]


def losses(*values):
    return [{"step": step, "loss": value} for step, value in enumerate(values, 1)]


def test_the_columns_of_a_run_have_charts(tmp_path):
    some_runs = read(tmp_path, samples.rows(), attempts=samples.ATTEMPTS)
    assert [(chart.section, chart.name) for chart in charts.charts(some_runs)] == [
        *((charts.LEARNING, name) for name in ("loss", "accuracy")),
        *(
            (charts.UPDATES, n)
            for n in ("loss_scale", "gradient_norm", "parameter_norm", "skipped")
        ),
        *(
            (charts.SPEED, f"perf/{name}_per_second")
            for name in ("steps", "examples", "flops")
        ),
        *((charts.SPEED, f"perf/{name}") for name in ("utilisation", "goodput")),
    ]
    _, layout = draw(some_runs, "loss_scale")
    assert layout["yaxis"]["type"] == "log" and [s["x0"] for s in layout["shapes"]] == [
        200
    ]


def test_columns_of_a_named_learner_are_drawn_like_those_of_a_single_one(tmp_path):
    names = (
        "critic/global_step",
        "critic/updates_per_step",
        "epoch",
        "critic/loss_scale",
        "critic/accuracy",
        "critic/loss",
        "learning_rate",
    )
    logged = [{"step": step, **dict.fromkeys(names, float(step))} for step in (1, 2)]
    drawn = charts.charts(read(tmp_path, logged))
    assert [
        (chart.section, chart.name, chart.is_log, chart.is_smoothed) for chart in drawn
    ] == [
        (charts.LEARNING, "critic/loss", False, True),
        (charts.LEARNING, "critic/accuracy", False, True),
        (charts.UPDATES, "critic/loss_scale", True, False),
        (charts.UPDATES, "learning_rate", False, False),
    ]


def test_training_and_evaluation_of_a_metric_are_on_one_axis(tmp_path):
    job = [samples.evaluation(step, better=0.1) for step in (150, 100)]
    traces, _ = draw(read(tmp_path, samples.rows(), job=job), "accuracy")
    shown = {t["name"]: t for t in traces if t.get("showlegend") is not False}
    assert {name: (t["mode"], t["line"]["dash"]) for name, t in shown.items()} == {
        "training": ("lines", "solid"),
        "evaluation": ("lines+markers", "dash"),
        "evaluation, average": ("lines+markers", "dot"),
        "evaluation job": ("markers", "dash"),
        "evaluation job, average": ("markers", "dot"),
    }
    assert shown["evaluation job"]["x"] == [100, 150]
    assert len({t["line"]["color"] for t in shown.values()}) == 5


@pytest.mark.parametrize(
    "values", [(1.0,), (1.0, None, 2.0, 3.0), (2.0, 3.0, None, 1.0)]
)
def test_a_row_without_a_finite_neighbor_is_visible(tmp_path, values):
    traces, _ = draw(read(tmp_path, losses(*values)), "loss")
    shown = [trace for trace in traces if trace.get("marker", {}).get("symbol") != "x"]
    assert [trace["mode"] for trace in shown] == ["lines+markers"] * 2


def test_a_curve_has_the_same_color_in_all_charts(tmp_path):
    # Rows are written with their names in alphabetical order.
    content = [{"step": 1, "loss": 1.0, "accuracy": 0.1}]
    names = ("eval/accuracy", "eval/average/accuracy", "eval/average/loss", "eval/loss")
    content.append({"step": 2, **dict.fromkeys(names, 0.5)})
    some_runs = read(tmp_path, content)
    colours = [
        {trace["name"]: trace["line"]["color"] for trace in draw(some_runs, name)[0]}
        for name in ("loss", "accuracy")
    ]
    assert colours[0] == colours[1] and len(colours[0]) == 4


def test_each_group_has_a_curve(tmp_path):
    traces, _ = draw(read(tmp_path, samples.rows(groups=2)), "accuracy")
    names = [trace["name"] for trace in traces if trace.get("showlegend") is not False]
    assert names[:3] == [
        "training, group 0",
        "training, group 1",
        "evaluation, group 0",
    ]
    assert names[-1] == "evaluation, ensemble"


def test_smoothing_changes_the_averages_and_never_the_rows(tmp_path):
    values = [1.0, 3.0, None, 5.0]
    traces, _ = draw(read(tmp_path, losses(*values)), "loss")
    rows, average, cross = traces
    assert rows["y"] == values and rows["x"] == [1, 2, 3, 4]
    assert rows["legendgroup"] == average["legendgroup"] == cross["legendgroup"]
    for w, smoothed in zip(charts.WEIGHTS, average["meta"], strict=True):
        # An average is the weighted sum of the values so far, divided by the sum of
        # their weights.
        expected = [1, (w + 3) / (w + 1), None, (w * w + 3 * w + 5) / (w * w + w + 1)]
        assert smoothed[2] is None
        assert smoothed[:2] + smoothed[3:] == pytest.approx(expected[:2] + expected[3:])
    assert average["meta"][charts.FIRST_WEIGHT] == average["y"]
    traces, _ = draw(read(tmp_path / "more", samples.rows()), "loss_scale")
    assert not any("meta" in trace for trace in traces)


def test_values_that_are_not_finite_are_marked(tmp_path):
    *_, cross = draw(
        read(tmp_path, losses(None, 2.0, float("nan"), 3.0, None)), "loss"
    )[0]
    assert (cross["x"], cross["y"]) == ([1, 3, 5], [2.0, 2.0, 3.0])
    assert cross["marker"]["symbol"] == "x" and cross["hovertemplate"] == "not finite"
    *_, cross = draw(read(tmp_path / "none", losses(None, None)), "loss")[0]
    assert cross["x"] == [1, 2]


def test_runs_that_differ_only_in_seed_have_a_mean_with_a_band(tmp_path):
    some_runs = read(tmp_path, losses(1.0, 2.0, 6.0, 0.5), losses(3.0, None, 2.0))
    other = samples.write(tmp_path / "other", losses(9.0, 9.0), steps=7)
    some_runs += runs.read([str(other)])
    assert charts.seeds(some_runs) == [0, 0, 1]
    traces, _ = draw(some_runs, "loss")
    band, mean, average, cross, *_ = traces
    # The mean covers the steps that all seeds have. It has a gap where a value is not
    # finite.
    assert (mean["x"], mean["y"]) == ([1, 2, 3], [2.0, None, 4.0])
    assert (cross["x"], average["line"]["width"]) == ([2], 2.5)
    assert (band["x"], band["y"]) == (
        [1, 1, None, 3, 3, None],
        [1.0, 3.0, None, 2.0, 6.0, None],
    )
    assert band["fill"] == "toself" and band["legendgroup"] == average["legendgroup"]
    assert average["name"] == "mean of 2 runs (run0, …): training"
    by_name = {trace["name"]: trace for trace in traces}
    assert by_name["run0: training"]["y"] == [1.0, 2.0, 6.0, 0.5]
    colours = [
        by_name[f"{name}: training"]["line"]["color"]
        for name in ("run0", "run1", "other")
    ]
    assert colours[0] == colours[1] == average["line"]["color"] != colours[2]


def test_a_long_curve_is_thinned_but_keeps_peaks_and_crosses(tmp_path):
    lines = losses(*[1.0 + s % 2 for s in range(50_000)])
    lines[7777]["loss"], lines[7780]["loss"] = 2.0**40, None
    traces, _ = draw(read(tmp_path, lines), "loss")
    rows, average, cross = traces
    assert len(rows["x"]) == len(average["x"]) <= 4002
    assert (7778, 2.0**40) in zip(rows["x"], rows["y"], strict=True) and cross["x"] == [
        7781
    ]


def test_no_peak_is_lost_where_rows_are_thinned():
    values = pd.Series([1.0, 2.0, 3.0, np.nan, np.nan, np.nan, 4.0, 5.0, 6.0])
    # A part without a finite value stays a gap.
    assert charts.thin(values, 3).index.tolist() == [0, 2, 3, 6, 8]
    assert charts.thin(values, 5) is values
    rng = np.random.default_rng(0)
    for count in (201, 1000, 1003):
        values = pd.Series(rng.normal(size=count))
        values[300:340] = np.nan
        kept = charts.thin(values, 100)
        assert len(kept) <= 202 and {0, count - 1} <= set(kept.index)
        length = -(-count // 100)
        for first in range(0, count, length):
            part = values[first : first + length]
            if part.notna().any():
                assert {part.idxmin(), part.idxmax()} <= set(kept.index)
            else:
                assert first in kept.index


def test_the_shares_of_the_time_add_up_to_one(tmp_path):
    some_runs = read(tmp_path, *[losses(1.0)] * 2, attempts=samples.ATTEMPTS)
    traces, _ = checked(charts.bars(some_runs))
    assert [trace["name"] for trace in traces] == [
        *attempts.TIME_CATEGORIES,
        attempts.DOWN,
    ]
    # Of the first attempt's 230 steps 200 count, and all 200 of the second attempt's.
    expected = 0.09 * 400 / (5000 + 12 + 0.11 * 200)
    assert traces[0]["x"][0] == pytest.approx(expected)
    totals = sum(np.array(trace["x"]) for trace in traces)
    assert totals == pytest.approx([1.0, 1.0])
    assert charts.bars(read(tmp_path / "more", losses(1.0))) is None


def test_names_are_escaped_for_plotly(tmp_path):
    traces, _ = draw(read(tmp_path / "<b>", *[losses(1.0)] * 2), "loss")
    assert all("<" not in trace["name"] for trace in traces)
    (path,) = [samples.write(tmp_path / "<i>x", losses(1.0))]
    some_runs = runs.read([str(path), str(tmp_path / "<b>/run0")])
    assert any(
        trace["name"] == "&lt;i&gt;x: training" for trace in draw(some_runs, "loss")[0]
    )


def test_colors_are_all_different():
    assert len({charts.color(number) for number in range(60)}) == 60
