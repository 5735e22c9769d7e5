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
from xshard.dryrun import candidates, estimate, plan_search

HAS_LIBTPU = importlib.util.find_spec("libtpu") is not None
needs_libtpu = pytest.mark.skipif(
    not HAS_LIBTPU,
    reason="libtpu is not installed: python -m pip install -r requirements_dryrun_lock.txt",
)
TOY = ("--plan", "--config=tests/toy.py", "--topology=v5e:2x2")


def result(seconds, peak=1, name="memory"):
    """Returns the result of a dry run of a step that fits."""
    bounds = [
        {"name": one, "seconds": 0.0, "amount": 0} for one in ("compute", "ICI", "DCN")
    ]
    bounds.append({"name": name, "seconds": seconds, "amount": 8})
    dry_run = {
        "bounds": bounds,
        "seconds": seconds,
        "dominated_by": name,
        "estimated_cycles": 2000,
    }
    return {**dry_run, "memory": {"peak": peak, "fits": True}}


def plans_of(config, num_chips=16, **values):
    with config.unlocked():
        config.update_from_flattened_dict(values)
    return candidates.enumerate_plans(config, num_chips, has_model_axis=True)


def with_values(plans, **values):
    (found,) = (one for one in plans if one.values == {**plans[0].values, **values})
    return found


def test_all_plans_keep_the_batch_and_none_is_repeated():
    plans = plans_of(lm_pod.get_config(), 256)
    own = plans[0]
    assert own.is_own and not any(one.is_own for one in plans[1:])
    assert own.values == {
        "model_parallel": 8, "micro_batches": 32, "reduction.shard_update": True,
        "reduction.shard_params": False,
        "reduction.reduce_dtype": "float32", "model.remat": True,
    }  # fmt: skip
    assert len({tuple(one.values.values()) for one in plans}) == len(plans)
    # The model axis has 9 possible sizes. Each leaves 4 x model_parallel examples a
    # replica, so n + 3 numbers of micro-batches. There are 3 ways to shard the state, 2
    # reduce dtypes, and remat is on or off.
    assert len(plans) == sum(n + 3 for n in range(9)) * 12
    for one in plans:
        replicas = 256 // one.values["model_parallel"]
        assert 1024 % (replicas * one.values["micro_batches"]) == 0


def test_only_settings_that_apply_are_varied():
    config = digits.get_config()
    plans = candidates.enumerate_plans(config, 16, has_model_axis=False)
    assert {one.values["model_parallel"] for one in plans} == {1}
    assert {one.values["micro_batches"] for one in plans} == {1, 2, 4, 8}
    assert "reduction.slice_dtype" not in plans[0].values and len(plans) == 4 * 3 * 2
    config.slices = 2
    plans = candidates.enumerate_plans(config, 32, has_model_axis=False)
    assert {one.values["reduction.slice_dtype"] for one in plans} == {
        "float32",
        "bfloat16",
        "int8",
    }
    assert candidates.flags_of(plans[0])[:2] == [
        "--config.slices=2",
        "--config.model_parallel=1",
    ]
    # The config's own plan comes first even if its micro-batches do not divide the
    # batch: it is refused by name.
    config.micro_batches = 3
    assert (
        candidates.enumerate_plans(config, 32, has_model_axis=False)[0].values[
            "micro_batches"
        ]
        == 3
    )


def test_micro_batches_divide_a_logical_replicas_examples():
    config = digits.get_config()
    config.logical_replicas = 64
    plans = candidates.enumerate_plans(config, 16, has_model_axis=False)
    assert {one.values["micro_batches"] for one in plans} == {1, 2}


def test_plans_rank_by_bound_then_cycles_then_memory():
    plans = [candidates.Plan({}) for _ in range(4)]
    found = [result(1.0), result(0.5, 3), result(0.5, 2), result(0.5, 1)]
    found[2]["estimated_cycles"] = 3000
    for one, dry_run in zip(plans, found, strict=True):
        one.result = dry_run
    assert sorted(plans, key=lambda one: one.rank) == [plans[i] for i in (3, 1, 2, 0)]


def test_the_next_plan_is_the_nearest_to_the_best():
    plans = plans_of(lm_tiny.get_config(), 4)
    assert candidates.next_to_compile(plans) is plans[0]
    plans[0].outcome, plans[0].result = candidates.FITS, result(2.0)
    other = with_values(plans, model_parallel=4, micro_batches=16)
    other.outcome, other.result = candidates.FITS, result(1.0)
    for one in plans:
        one.needs = one.values["micro_batches"]
    following = candidates.next_to_compile(plans)
    assert candidates.distance(following.values, other.values) == 1
    # Among plans at the same distance, the one that needs the most memory is next.
    near = [one for one in plans if candidates.distance(one.values, other.values) == 1]
    assert (
        following.needs
        == max(one.needs for one in near)
        > min(one.needs for one in near)
    )
    assert candidates.distance(following.values, plans[0].values) >= 3
    # A replica of four times as many chips has four times as many rows. Four times as
    # many micro-batches keep their size, so `rescaled` differs only in model_parallel;
    # `other` has four times as many again.
    rescaled = with_values(plans, model_parallel=4, micro_batches=4)
    assert candidates.distance(plans[0].values, rescaled.values) == 2
    assert candidates.distance(plans[0].values, other.values) == 2 + 2


def test_each_way_to_shard_the_state_is_tried():
    plans, ways = plans_of(lm_tiny.get_config(), 4), set()
    for _ in range(3):
        one = candidates.next_to_compile(plans)
        one.fit(result(1.0))
        ways.add(
            (one.values["reduction.shard_update"], one.values["reduction.shard_params"])
        )
    assert ways == {(False, False), (True, False), (True, True)}


@pytest.mark.parametrize("outcome", [candidates.TOO_LARGE, candidates.PRUNED])
def test_if_the_config_does_not_fit_the_plan_that_needs_least_is_next(outcome):
    plans = plans_of(lm_tiny.get_config(), 4)
    plans[0].outcome = outcome
    for number, one in enumerate(plans):
        one.needs = 100 - number
    assert candidates.next_to_compile(plans) is plans[-1]


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
    ],
)
def test_a_plan_that_needs_more_than_a_failed_plan_is_recognized(values, more):
    changed = {"micro_batches": 4, "model.remat": True, "reduction.shard_update": True}
    failed = plans_of(lm_tiny.get_config(), 1, **changed)[0].values
    assert candidates.needs_more({**failed, **values}, failed) is more


def prepared(memory, hbm=1000):
    chip = types.SimpleNamespace(hbm=hbm)
    return estimate.Prepared(chip, None, None, None, None, {"memory": memory})


def judged(plans, config, prepare, kept=0):
    judge = plan_search.MemoryScreen(config, prepare)
    judge._kept = lambda one, config, step: kept
    for one in plans:
        judge(one)


def test_plans_that_cannot_fit_are_pruned_with_a_reason():
    config = lm_tiny.get_config()
    plans, asked = plans_of(config, 4), []

    def prepare(config):
        reduction = config.reduction
        asked.append(
            (config.model_parallel, reduction.shard_update, reduction.shard_params)
        )
        size = 800 // config.model_parallel
        return prepared({"parameters": size, "optimizer_state": size})

    judged(plans, config, prepare, kept=1000)
    # The judge prepares each layout of the state on a chip once.
    sharded = [(False, False), (True, False), (True, True)]
    assert sorted(asked) == [(n, *which) for n in (1, 2, 4) for which in sharded]
    why = lambda **values: with_values(plans, **values).reason
    assert why(model_parallel=1).startswith(
        "state and sums of gradients need more than the 1000 B"
    )
    assert why(model_parallel=2, micro_batches=2).startswith(
        "state and sums of gradients need"
    )
    assert "what a loop keeps" in why(model_parallel=2, micro_batches=1)
    one = with_values(plans, model_parallel=4, micro_batches=2)
    assert (one.outcome, one.needs) == (candidates.WAITING, 3 * 200 + 1000 // 4)
    assert with_values(plans, model_parallel=4).needs == 2 * 200 + 1000 // 4


def test_refused_plans_are_counted_with_their_reasons():
    config = lm_tiny.get_config()
    plans = plans_of(config, 4, micro_batches=3)

    def prepare(config):
        if config.micro_batches == 3:
            raise errors.UserError("no 3")
        if config.reduction.shard_update:
            raise errors.UserError("no shards")
        return prepared({"parameters": 1})

    judged(plans, config, prepare)
    assert (plans[0].outcome, plans[0].reason) == (candidates.REFUSED, "no 3")
    refused = [one for one in plans[1:] if one.outcome == candidates.REFUSED]
    assert {one.reason for one in refused} == {"no shards"}
    # A third of the plans other than the config's own do not shard the update.
    assert len(refused) == (len(plans) - 1) * 2 // 3
    assert f"{len(refused)} refused: no shards\n1 refused: no 3" in plan_search.show(
        plans, "v5e:2x2"
    )


def test_a_dry_runs_output_sets_the_outcome_of_its_plan():
    def outcome_of(code, dry_run, err=""):
        one = candidates.Plan({})
        plan_search.record_outcome(
            one, code, f"hello\n{json.dumps(dry_run)}\n" if dry_run else "hello\n", err
        )
        return one

    assert outcome_of(0, result(1.0)).result == result(1.0)
    large = outcome_of(1, {"memory": {"fits": False, "needed": 7}}, "error: too much")
    assert (large.outcome, large.needs) == (candidates.TOO_LARGE, 7)
    refused = outcome_of(
        1, {"memory": {"fits": True}}, "error: cannot read\n(--debug shows where)\n"
    )
    assert (refused.outcome, refused.reason) == (candidates.REFUSED, "cannot read")
    crashed = outcome_of(-signal.SIGABRT, None, "Check failed\n")
    assert crashed.reason == "the compiler was ended by signal 6: Check failed"


def searched(most, seconds, is_too_large=lambda values: False):
    """Returns the plans of a search, and those that it compiled."""
    plans, compiled = plans_of(lm_tiny.get_config(), 4), []

    def compile_plan(one):
        compiled.append(one)
        if is_too_large(one.values):
            one.outcome = candidates.TOO_LARGE
        else:
            one.result = result(seconds(one.values))
            one.outcome = candidates.FITS

    plan_search.search(plans, compile_plan, most, lambda one, done, of: None)
    return plans, compiled


def test_a_search_finds_the_best_plan_with_few_compilations():
    def seconds(values):
        near = (values["model_parallel"] - 4) ** 2 + (values["micro_batches"] - 2) ** 2
        return (
            1.0 + near + values["model.remat"] + (not values["reduction.shard_update"])
        )

    plans, compiled = searched(24, seconds)
    assert len(compiled) == 24 < len(plans) / 3
    best = min(candidates.fitting(plans), key=lambda one: one.rank)
    assert best.result["seconds"] == 1.0


def test_a_search_prunes_plans_that_need_more_than_a_failed_one():
    too_large = lambda values: not values["model.remat"]
    plans, compiled = searched(1000, lambda values: 1.0, too_large)
    pruned = [one for one in plans if one.outcome == candidates.PRUNED]
    assert pruned and all(not one.values["model.remat"] for one in pruned)
    assert len(compiled) + len(pruned) == len(plans)
    assert {one.outcome for one in plans} == {
        candidates.FITS,
        candidates.TOO_LARGE,
        candidates.PRUNED,
    }


def test_the_table_shows_the_ten_best_plans_with_their_flags():
    plans = plans_of(digits.get_config(), 16)
    for number, one in enumerate(plans[:12]):
        one.result, one.outcome = result(float(12 - number)), candidates.FITS
    plans[12].outcome, plans[12].reason = candidates.REFUSED, "no such collective"
    lines = plan_search.show(plans, "v5e:4x4").splitlines()
    (head,) = (i for i, line in enumerate(lines) if line.split()[:2] == ["at", "least"])
    rows = lines[head + 1 :][:20]
    assert [row.split()[0] for row in rows[::2]] == [str(n) for n in range(1, 11)]
    assert rows[0].split()[1:3] == ["1", "s"] and rows[2].split()[1:3] == ["2", "s"]
    assert rows[1].split() == candidates.flags_of(plans[11])
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
    kept = estimate.stacked_bytes(jax.make_jaxpr(jax.grad(loss))(w, x))
    # The loop keeps at least the layer's input and the sine's input for each of ten
    # layers.
    assert 2 * 10 * 64 * 8 * 4 <= kept < 6 * 10 * 64 * 8 * 4
    assert estimate.stacked_bytes(jax.make_jaxpr(loss)(w, x)) == 0


def interrupted(plans, compile_plan, most, report):
    plans[0].result, plans[0].outcome = result(3.0), candidates.FITS
    report(plans[0], 1, most)
    raise KeyboardInterrupt


def test_an_interrupted_search_prints_its_results_so_far(monkeypatch, capsys):
    monkeypatch.setattr(plan_search, "search", interrupted)
    monkeypatch.setattr(plan_search.MemoryScreen, "_kept", lambda *_: 0)
    stopped = []
    monkeypatch.setattr(plan_search.Compiler, "stop", lambda self: stopped.append(self))
    prepare = lambda config, topology: prepared({"parameters": 1})
    code = plan_search.run(
        digits.get_config(), "v5e:4x4", prepare, (), 5, as_json=False
    )
    out, err = capsys.readouterr()
    assert code == 130 and len(stopped) == 1
    assert "1  3 s" in out and "1 fitting, 23 not compiled" in out
    assert "1 of 5: model_parallel=1" in err and "interrupted" in err


def test_stopping_the_compiler_kills_running_compilations():
    compiler = plan_search.Compiler(())
    with subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE
    ) as child:
        compiler._running.add(child)
        compiler.stop()
        assert child.wait() == -signal.SIGKILL


def error_message(config, prepare, topology="v5e:4x4"):
    with pytest.raises(errors.UserError) as e:
        plan_search.run(config, topology, prepare, (), 5, as_json=False)
    return str(e.value)


def test_a_search_without_a_possible_plan_is_one_message(monkeypatch):
    prepare = lambda config, topology: prepared({"parameters": 1})
    config = toy.get_config()
    with config.unlocked():
        del config["reduction"]
        config.batch_size = 16
    message = error_message(config, prepare)
    for part in ("nothing to choose on v5e:4x4", "sharding_rules", "Leave out --plan"):
        assert part in message
    refused = lambda config, topology: estimate.shard_bytes(
        errors_of("libtpu is not installed")
    )
    assert "none of 24 plans is possible: 24 refused: libtpu is not" in error_message(
        digits.get_config(), refused
    )
    monkeypatch.setattr(plan_search.MemoryScreen, "_kept", lambda *_: 0)
    monkeypatch.setattr(plan_search, "search", lambda *_: None)
    assert "none of the compiled plans fits v5e:4x4" in error_message(
        digits.get_config(), prepare
    )
    assert "no such slice" in error_message(digits.get_config(), prepare, "v5e:3x3")


def errors_of(message):
    raise errors.UserError(message)


def run(*arguments):
    """Runs the dry-run program; returns its exit code, standard output and standard
    error.
    """
    environment = {**os.environ, "PYTHONPATH": forks.python_path()}
    environment.pop("JAX_PLATFORMS", None)
    done = subprocess.run(
        [sys.executable, "-m", "xshard.dryrun", *arguments],
        capture_output=True, text=True, env=environment,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


def test_a_wrong_flag_is_one_message():
    code, out, err = run(*TOY, "--plan_compiles=0")
    assert (
        (code, out) == (1, "") and err.startswith("error: ") and "Traceback" not in err
    )
    assert "--plan_compiles=0" in err and "positive" in err


@needs_libtpu
def test_the_plan_command_prints_the_plans_with_the_best_first():
    code, out, err = run(*TOY, "--json", "--plan_compiles=2", "--config.batch_size=8")
    assert code == 0, err
    plans = json.loads(out)["plans"]
    # A replica has two rows, so one or two micro-batches. There are 3 ways to shard the
    # state, and 2 reduce dtypes.
    assert len(plans) == 2 * 3 * 2
    best, second, *others = plans
    assert best["outcome"] == second["outcome"] == candidates.FITS
    assert {one["outcome"] for one in others} == {candidates.WAITING}
    assert best["result"]["seconds"] <= second["result"]["seconds"]
    assert best["is_own"] or second["is_own"]
    for one in (best, second):
        # The estimated need is a lower bound.
        assert 0 < one["needs"] <= one["result"]["memory"]["peak"]
        assert one["result"]["estimated_cycles"] > 0
        assert (
            f"--config.micro_batches={one['values']['micro_batches']}" in one["flags"]
        )
    assert "2 of 2: " in err
