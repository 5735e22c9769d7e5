"""The search for a plan: the settings to choose from, the pruning, and the order in
which plans are compiled.
"""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import types

import pytest

from configs import digits, lm_pod, lm_tiny
from tests import forks, toy
from xshard import errors
from xshard.dryrun import analysis, plan_search

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="libtpu is not installed: python -m pip install -r "
    "requirements/dryrun_lock.txt",
)
TOY = ("--plan", "--config=tests/toy.py", "--topology=v5e:2x2")


def result(seconds, peak=1, name="memory"):
    """Returns the result of a dry run of a step that fits."""
    return {
        "bounds": [
            {"name": "compute", "seconds": 0.0, "amount": 0},
            {"name": "ICI", "seconds": 0.0, "amount": 0},
            {"name": "DCN", "seconds": 0.0, "amount": 0},
            {"name": name, "seconds": seconds, "amount": 8},
        ],
        "seconds": seconds,
        "dominated_by": name,
        "estimated_cycles": 2000,
        "memory": {"peak": peak, "fits": True},
    }


def plans_of(config, num_chips=16, **values):
    with config.unlocked():
        config.update_from_flattened_dict(values)
    return plan_search.enumerate_plans(config, num_chips, has_model_axis=True)


def with_values(plans, **values):
    (found,) = (one for one in plans if one.values == {**plans[0].values, **values})
    return found


def test_all_plans_keep_the_batch_and_none_is_repeated():
    plans = plans_of(lm_pod.get_config(), 256)
    assert plans[0].is_own and not any(one.is_own for one in plans[1:])
    assert plans[0].values == {
        "model_parallel": 8,
        "micro_batches": 32,
        "reduction.shard_update": True,
        "reduction.shard_params": False,
        "reduction.reduce_dtype": "float32",
        "slots_memory": "device",
        "model.remat": True,
    }
    assert len({tuple(one.values.values()) for one in plans}) == len(plans)
    # The model axis has 9 possible sizes. Each leaves 4 x model_parallel examples a
    # replica, so n + 3 numbers of micro-batches. There are 3 ways to shard the state, 2
    # reduce dtypes, 2 memories for slots, and 4 policies of remat.
    assert len(plans) == sum(n + 3 for n in range(9)) * 48
    for one in plans:
        replicas = 256 // one.values["model_parallel"]
        assert 1024 % (replicas * one.values["micro_batches"]) == 0


def test_only_settings_that_apply_are_varied():
    config = digits.get_config()
    plans = plan_search.enumerate_plans(config, 16, has_model_axis=False)
    assert {one.values["model_parallel"] for one in plans} == {1}
    assert {one.values["micro_batches"] for one in plans} == {1, 2, 4, 8}
    assert "reduction.slice_dtype" not in plans[0].values
    assert len(plans) == 4 * 3 * 2 * 2
    config.slices = 2
    plans = plan_search.enumerate_plans(config, 32, has_model_axis=False)
    dtypes = {one.values["reduction.slice_dtype"] for one in plans}
    assert dtypes == {"float32", "bfloat16", "int8"}
    flags = plans[0].flags
    assert flags[:2] == ["--config.slices=2", "--config.model_parallel=1"]
    # The config's own plan comes first even if its micro-batches do not divide the
    # batch: it is refused by name.
    config.micro_batches = 3
    plans = plan_search.enumerate_plans(config, 32, has_model_axis=False)
    assert plans[0].values["micro_batches"] == 3
    # Slices that train apart send no gradients to each other.
    plans = plans_of(digits.get_config(), slices=2, **{"outer.every_steps": 50})
    assert "reduction.slice_dtype" not in plans[0].values
    dtypes = {one.values["outer.dtype"] for one in plans}
    assert dtypes == {"float32", "bfloat16", "int8", "int4"}


def test_micro_batches_divide_a_logical_replicas_examples():
    config = digits.get_config()
    config.logical_replicas = 64
    plans = plan_search.enumerate_plans(config, 16, has_model_axis=False)
    assert {one.values["micro_batches"] for one in plans} == {1, 2}
    assert "slots_memory" not in plans[0].values


def test_plans_rank_by_bound_then_cycles_then_memory():
    plans = [plan_search.Plan({}) for _ in range(4)]
    found = [result(1.0), result(0.5, 3), result(0.5, 2), result(0.5, 1)]
    found[2]["estimated_cycles"] = 3000
    for one, dry_run in zip(plans, found, strict=True):
        one.fit(dry_run)
    assert sorted(plans, key=lambda one: one.rank) == [plans[i] for i in (3, 1, 2, 0)]


def test_the_next_plan_is_the_nearest_to_the_best():
    plans = plans_of(lm_tiny.get_config(), 4)
    assert plan_search.next_to_compile(plans) is plans[0]
    plans[0].fit(result(2.0))
    other = with_values(plans, model_parallel=4, micro_batches=16)
    other.fit(result(1.0))
    for one in plans:
        one.require(one.values["micro_batches"])
    following = plan_search.next_to_compile(plans)
    assert plan_search.distance(following.values, other.values) == 1
    # Among plans at the same distance, the one that needs the most memory is next.
    needs = [
        one.needs
        for one in plans
        if plan_search.distance(one.values, other.values) == 1
    ]
    assert following.needs == max(needs) > min(needs)
    assert plan_search.distance(following.values, plans[0].values) >= 3
    # A replica of four times as many chips has four times as many rows. Four times as
    # many micro-batches keep their size, so `rescaled` differs only in model_parallel;
    # `other` has four times as many again.
    rescaled = with_values(plans, model_parallel=4, micro_batches=4)
    assert plan_search.distance(plans[0].values, rescaled.values) == 2
    assert plan_search.distance(plans[0].values, other.values) == 2 + 2


def test_of_equally_fast_plans_that_with_least_on_the_host_is_best():
    plans = [plan_search.Plan({}) for _ in range(2)]
    for one, peak in zip(plans, (2, 1), strict=True):
        one.fit(result(1.0, peak))
    plans[1].result["bounds"].append({"name": "host", "seconds": None, "amount": 5})
    assert plan_search.fitting(plans) == plans


def test_remat_is_varied_by_the_type_of_its_key():
    config = digits.get_config()
    values = {}
    for kind, value in ((bool, True), (str, "dots_saveable")):
        config.model.remat = value
        plans = plan_search.enumerate_plans(config, 16, has_model_axis=False)
        values[kind] = {one.values["model.remat"] for one in plans}
        del config.model.remat
    assert values[bool] == {True, False}
    # A flag gives a key of this type no boolean.
    assert all(isinstance(value, str) for value in values[str])
    assert "offload_dot_with_no_batch_dims" in values[str]


def test_each_way_to_shard_the_state_is_tried():
    plans = plans_of(lm_tiny.get_config(), 4)
    ways = set()
    for _ in range(3):
        one = plan_search.next_to_compile(plans)
        one.fit(result(1.0))
        names = ("reduction.shard_update", "reduction.shard_params")
        ways.add(tuple(one.values[name] for name in names))
    assert ways == {(False, False), (True, False), (True, True)}


@pytest.mark.parametrize("outcome", [plan_search.TOO_LARGE, plan_search.PRUNED])
def test_if_the_config_does_not_fit_the_plan_that_needs_least_is_next(outcome):
    plans = plans_of(lm_tiny.get_config(), 4)
    plans[0].end(outcome)
    for number, one in enumerate(plans):
        one.require(100 - number)
    assert plan_search.next_to_compile(plans) is plans[-1]


@pytest.mark.parametrize(
    "values, more",
    [
        ({"micro_batches": 2}, True),
        ({"micro_batches": 2, "model.remat": False}, True),
        ({"model.remat": False}, True),
        ({"micro_batches": 1}, False),
        ({"micro_batches": 8}, False),
        ({"micro_batches": 2, "reduction.shard_update": False}, False),
        ({"micro_batches": 2, "model_parallel": 2}, False),
        ({"model.remat": "dots_with_no_batch_dims_saveable"}, True),
        ({"model.remat": "offload_dot_with_no_batch_dims"}, False),
    ],
)
def test_a_plan_that_needs_more_than_a_failed_plan_is_recognized(values, more):
    changed = {"micro_batches": 4, "model.remat": True, "reduction.shard_update": True}
    failed = plans_of(lm_tiny.get_config(), 1, **changed)[0].values
    assert plan_search.needs_more({**failed, **values}, failed) is more


def prepared(memory, hbm=1000):
    chip = types.SimpleNamespace(hbm=hbm)
    return analysis.Prepared(chip, None, None, None, None, {"memory": memory})


def screened(monkeypatch, plans, config, prepare, kept=0):
    """Estimates the memory of plans, of which `prepare` and `kept` tell the parts."""
    monkeypatch.setattr(analysis, "prepare", lambda config, topology: prepare(config))
    monkeypatch.setattr(plan_search.MemoryScreen, "_kept", lambda *_: kept)
    screen = plan_search.MemoryScreen(config, "v5e:2x2")
    for one in plans:
        screen(one)


def test_plans_that_cannot_fit_are_pruned_with_a_reason(monkeypatch):
    config = lm_tiny.get_config()
    plans = plans_of(config, 4)
    asked = []

    def prepare(config):
        reduction = config.reduction
        sharding = reduction.shard_update, reduction.shard_params
        asked.append((config.model_parallel, *sharding))
        size = 800 // config.model_parallel
        return prepared({"parameters": size, "optimizer_state": size})

    screened(monkeypatch, plans, config, prepare, kept=1000)
    # Each layout of the state on a chip is prepared once.
    shardings = [(False, False), (True, False), (True, True)]
    # Once with its slots on the device, and once with them on the host.
    assert sorted(asked) == [
        (n, *sharding) for n in (1, 2, 4) for sharding in shardings for _ in range(2)
    ]
    why = lambda **values: with_values(plans, **values).reason
    state = "state and sums of gradients need more than the 1000 B"
    assert why(model_parallel=1).startswith(state)
    assert why(model_parallel=2, micro_batches=2).startswith(state)
    assert "what a loop keeps" in why(model_parallel=2, micro_batches=1)
    one = with_values(plans, model_parallel=4, micro_batches=2)
    assert (one.outcome, one.needs) == (plan_search.WAITING, 3 * 200 + 1000 // 4)
    assert with_values(plans, model_parallel=4).needs == 2 * 200 + 1000 // 4


def test_refused_plans_are_counted_with_their_reasons(monkeypatch):
    config = lm_tiny.get_config()
    plans = plans_of(config, 4, micro_batches=3)

    def prepare(config):
        if config.micro_batches == 3:
            raise errors.UserError("no 3")
        if config.reduction.shard_update:
            raise errors.UserError("no shards")
        return prepared({"parameters": 1})

    screened(monkeypatch, plans, config, prepare)
    assert (plans[0].outcome, plans[0].reason) == (plan_search.REFUSED, "no 3")
    refused = [one for one in plans[1:] if one.outcome == plan_search.REFUSED]
    assert {one.reason for one in refused} == {"no shards"}
    # A third of the plans other than the config's own do not shard the update.
    assert len(refused) == (len(plans) - 1) * 2 // 3
    reasons = f"{len(refused)} refused: no shards\n1 refused: no 3"
    assert reasons in plan_search.show(plans, "v5e:2x2")


def test_a_dry_runs_output_sets_the_outcome_of_its_plan():
    def recorded(code, dry_run, err=""):
        out = "hello\n"
        if dry_run:
            out += f"{json.dumps(dry_run)}\n"
        one = plan_search.Plan({})
        plan_search.record_outcome(one, code, out, err)
        return one

    assert recorded(0, result(1.0)).result == result(1.0)
    large = recorded(1, {"memory": {"fits": False, "needed": 7}}, "error: too much")
    assert (large.outcome, large.needs) == (plan_search.TOO_LARGE, 7)
    err = "error: cannot read\n(--debug shows where)\n"
    refused = recorded(1, {"memory": {"fits": True}}, err)
    assert (refused.outcome, refused.reason) == (plan_search.REFUSED, "cannot read")
    crashed = recorded(-signal.SIGABRT, None, "Check failed\n")
    assert crashed.reason == "the compiler was ended by signal 6: Check failed"


def searched(most, seconds, is_too_large=lambda values: False):
    """Returns the plans of a search, and those that it compiled."""
    plans = plans_of(lm_tiny.get_config(), 4)
    compiled = []

    def compile_plan(one):
        compiled.append(one)
        if is_too_large(one.values):
            one.end(plan_search.TOO_LARGE)
        else:
            one.fit(result(seconds(one.values)))

    plan_search.search(plans, compile_plan, most, lambda one, done, of: None)
    return plans, compiled


def test_a_search_finds_the_best_plan_with_few_compilations():
    def seconds(values):
        models = (values["model_parallel"] - 4) ** 2
        micros = (values["micro_batches"] - 2) ** 2
        switches = (values["model.remat"] is not False) + (
            not values["reduction.shard_update"]
        )
        return 1.0 + models + micros + switches

    plans, compiled = searched(24, seconds)
    assert len(compiled) == 24 < len(plans) / 3
    assert plan_search.fitting(plans)[0].result["seconds"] == 1.0


def test_a_search_prunes_plans_that_need_more_than_a_failed_one():
    too_large = lambda values: not values["model.remat"]
    plans, compiled = searched(1000, lambda values: 1.0, too_large)
    pruned = [one for one in plans if one.outcome == plan_search.PRUNED]
    assert pruned and all(not one.values["model.remat"] for one in pruned)
    assert len(compiled) + len(pruned) == len(plans)
    outcomes = {one.outcome for one in plans}
    assert outcomes == {plan_search.FITS, plan_search.TOO_LARGE, plan_search.PRUNED}


def test_the_table_shows_the_ten_best_plans_with_their_flags():
    plans = plans_of(digits.get_config(), 16)
    for number, one in enumerate(plans[:12]):
        one.fit(result(float(12 - number)))
    plans[12].end(plan_search.REFUSED, "no such collective")
    lines = plan_search.show(plans, "v5e:4x4").splitlines()
    (head,) = (i for i, line in enumerate(lines) if line.split()[:2] == ["at", "least"])
    rows = lines[head + 1 :][:20]
    assert [row.split()[0] for row in rows[::2]] == [str(n) for n in range(1, 11)]
    assert rows[0].split()[1:3] == ["1", "s"] and rows[2].split()[1:3] == ["2", "s"]
    assert rows[1].split() == plans[11].flags
    assert (
        "12 fitting, 1 refused" in lines[0] and "1 refused: no such collective" in lines
    )
    assert "The config as it is: " in lines[-3] and "at least 12 s" in lines[-3]


def test_stacked_bytes_count_what_a_loop_keeps_for_its_gradient():
    import jax
    import jax.numpy as jnp

    def loss(w, x):
        layer = lambda x, w: (jnp.sin(x @ w), None)
        return jnp.sum(jax.lax.scan(layer, x, w)[0])

    w, x = jnp.ones((10, 8, 8)), jnp.ones((64, 8))
    kept = plan_search.stacked_bytes(jax.make_jaxpr(jax.grad(loss))(w, x))
    # The loop keeps at least the layer's input and the sine's input for each of ten
    # layers.
    assert 2 * 10 * 64 * 8 * 4 <= kept < 6 * 10 * 64 * 8 * 4
    assert plan_search.stacked_bytes(jax.make_jaxpr(loss)(w, x)) == 0


def interrupted(plans, compile_plan, most, report):
    plans[0].fit(result(3.0))
    report(plans[0], 1, most)
    raise KeyboardInterrupt


def test_an_interrupted_search_prints_its_results_so_far(monkeypatch, capsys):
    monkeypatch.setattr(analysis, "prepare", lambda *_: prepared({"parameters": 1}))
    monkeypatch.setattr(plan_search, "search", interrupted)
    monkeypatch.setattr(plan_search.MemoryScreen, "_kept", lambda *_: 0)
    stopped = []
    monkeypatch.setattr(plan_search.Compiler, "stop", lambda self: stopped.append(self))
    code = plan_search.run(digits.get_config(), "v5e:4x4", (), 5, as_json=False)
    out, err = capsys.readouterr()
    assert code == 130 and len(stopped) == 1
    assert "1  3 s" in out and "1 fitting, 47 not compiled" in out
    assert "1 of 5: model_parallel=1" in err and "interrupted" in err


def test_stopping_the_compiler_kills_running_compilations():
    compiler = plan_search.Compiler(())
    with subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE
    ) as child:
        compiler._running.add(child)
        compiler.stop()
        assert child.wait() == -signal.SIGKILL


def error_message(config, topology="v5e:4x4"):
    with pytest.raises(errors.UserError) as e:
        plan_search.run(config, topology, (), 5, as_json=False)
    return str(e.value)


def test_a_search_without_a_choice_is_one_message():
    config = toy.get_config()
    with config.unlocked():
        del config["reduction"]
        config.batch_size = 16
    message = error_message(config)
    for part in ("nothing to choose on v5e:4x4", "sharding_rules", "Leave out --plan"):
        assert part in message
    assert "no such slice" in error_message(digits.get_config(), "v5e:3x3")


def test_a_search_without_a_possible_plan_is_one_message(monkeypatch):
    def refuse(config, topology):
        raise errors.UserError("libtpu is not installed")

    monkeypatch.setattr(analysis, "prepare", refuse)
    message = error_message(digits.get_config())
    assert "none of 48 plans is possible: 48 refused: libtpu is not" in message
    monkeypatch.setattr(analysis, "prepare", lambda *_: prepared({"parameters": 1}))
    monkeypatch.setattr(plan_search.MemoryScreen, "_kept", lambda *_: 0)
    monkeypatch.setattr(plan_search, "search", lambda *_: None)
    message = error_message(digits.get_config())
    assert "none of the compiled plans fits v5e:4x4" in message


def run(*arguments):
    """Runs the dry-run program; returns its exit code, standard output and standard
    error.
    """
    environment = {**os.environ, "PYTHONPATH": forks.python_path()}
    environment.pop("JAX_PLATFORMS", None)
    done = subprocess.run(
        [sys.executable, "-m", "xshard.dryrun", *arguments],
        capture_output=True,
        text=True,
        env=environment,
    )
    return done.returncode, done.stdout, done.stderr


def test_a_wrong_flag_is_one_message():
    code, out, err = run(*TOY, "--plan_compiles=0")
    assert (code, out) == (1, "")
    assert err.startswith("error: ") and "Traceback" not in err
    assert "--plan_compiles=0" in err and "positive" in err


@needs_libtpu
def test_the_plan_command_prints_the_plans_with_the_best_first():
    code, out, err = run(*TOY, "--json", "--plan_compiles=2", "--config.batch_size=8")
    assert code == 0, err
    plans = json.loads(out)["plans"]
    # A replica has two rows, so one or two micro-batches. There are 3 ways to shard the
    # state, 2 reduce dtypes, and 2 memories for slots.
    assert len(plans) == 2 * 3 * 2 * 2
    best, second, *others = plans
    assert best["outcome"] == second["outcome"] == plan_search.FITS
    assert {one["outcome"] for one in others} == {plan_search.WAITING}
    assert best["result"]["seconds"] <= second["result"]["seconds"]
    assert best["is_own"] or second["is_own"]
    for one in (best, second):
        # The estimated need is a lower bound.
        assert 0 < one["needs"] <= one["result"]["memory"]["peak"]
        assert one["result"]["estimated_cycles"] > 0
        micro_batches = one["values"]["micro_batches"]
        assert f"--config.micro_batches={micro_batches}" in one["flags"]
    assert "2 of 2: " in err
