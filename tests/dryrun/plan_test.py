"""The search for a plan: what there is to choose, what is left out, in which order the rest is compiled."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import types

import pytest

from configs import digits, lm_pod, lm_tiny
from tests import toy
from xshard import errors
from xshard.dryrun import choices, estimate, plan

HAS_LIBTPU = importlib.util.find_spec("libtpu") is not None
needs_libtpu = pytest.mark.skipif(
    not HAS_LIBTPU,
    reason="libtpu is not installed: python -m pip install -r requirements_dryrun_lock.txt",
)
TOY = ("--plan", "--config=tests/toy.py", "--topology=v5e:2x2")


def result(seconds, peak=1, name="memory"):
    """What a dry run says of a step that fits."""
    bounds = [{"name": one, "seconds": 0.0, "amount": 0} for one in ("compute", "ICI", "DCN")]
    bounds.append({"name": name, "seconds": seconds, "amount": 8})
    said = {"bounds": bounds, "seconds": seconds, "dominated_by": name, "estimated_cycles": 2000}
    return {**said, "memory": {"peak": peak, "fits": True}}


def plans_of(config, num_chips=16, **values):
    with config.unlocked():
        config.update_from_flattened_dict(values)
    return choices.of(config, num_chips, has_model_axis=True)


def with_values(plans, **values):
    (found,) = (one for one in plans if one.values == {**plans[0].values, **values})
    return found


def test_all_plans_keep_the_batch_and_each_is_there_once():
    plans = plans_of(lm_pod.get_config(), 256)
    own = plans[0]
    assert own.is_own and not any(one.is_own for one in plans[1:])
    assert own.values == {
        "model_parallel": 8, "micro_batches": 32, "reduction.shard_update": True,
        "reduction.shard_params": False,
        "reduction.reduce_dtype": "float32", "model.remat": True,
    }  # fmt: skip
    assert len({tuple(one.values.values()) for one in plans}) == len(plans)
    # 9 model axes, of 4 x model_parallel examples a replica; and three switches.
    assert len(plans) == sum(n + 3 for n in range(9)) * 12
    for one in plans:
        replicas = 256 // one.values["model_parallel"]
        assert 1024 % (replicas * one.values["micro_batches"]) == 0


def test_what_cannot_be_chosen_is_not():
    config = digits.get_config()
    plans = choices.of(config, 16, has_model_axis=False)
    assert {one.values["model_parallel"] for one in plans} == {1}
    assert {one.values["micro_batches"] for one in plans} == {1, 2, 4, 8}
    assert "reduction.slice_dtype" not in plans[0].values and len(plans) == 4 * 3 * 2
    config.slices = 2
    plans = choices.of(config, 32, has_model_axis=False)
    assert {one.values["reduction.slice_dtype"] for one in plans} == {"float32", "bfloat16", "int8"}
    assert choices.flags_of(plans[0])[:2] == ["--config.slices=2", "--config.model_parallel=1"]
    # Its own comes first where it does not divide, to be refused by name.
    config.micro_batches = 3
    assert choices.of(config, 32, has_model_axis=False)[0].values["micro_batches"] == 3


def test_micro_batches_divide_what_a_logical_replica_has():
    config = digits.get_config()
    config.logical_replicas = 64
    plans = choices.of(config, 16, has_model_axis=False)
    assert {one.values["micro_batches"] for one in plans} == {1, 2}


def test_better_is_what_is_bound_less_then_of_fewer_cycles_then_what_holds_less():
    plans = [choices.Plan({}) for _ in range(4)]
    found = [result(1.0), result(0.5, 3), result(0.5, 2), result(0.5, 1)]
    found[2]["estimated_cycles"] = 3000
    for one, said in zip(plans, found, strict=True):
        one.result = said
    assert sorted(plans, key=lambda one: one.rank) == [plans[i] for i in (3, 1, 2, 0)]


def test_the_next_is_the_nearest_to_the_best():
    plans = plans_of(lm_tiny.get_config(), 4)
    assert choices.following(plans) is plans[0]
    plans[0].outcome, plans[0].result = choices.FITS, result(2.0)
    other = with_values(plans, model_parallel=4, micro_batches=16)
    other.outcome, other.result = choices.FITS, result(1.0)
    for one in plans:
        one.needs = one.values["micro_batches"]
    following = choices.following(plans)
    assert choices.distance(following.values, other.values) == 1
    # Of those that are as near what saves least memory.
    near = [one for one in plans if choices.distance(one.values, other.values) == 1]
    assert following.needs == max(one.needs for one in near) > min(one.needs for one in near)
    assert choices.distance(following.values, plans[0].values) >= 3
    # A replica of four times as many chips has four times as many rows, or as many in four times the parts.
    again = with_values(plans, model_parallel=4, micro_batches=4)
    assert choices.distance(plans[0].values, again.values) == 2
    assert choices.distance(plans[0].values, other.values) == 2 + 2


def test_each_way_to_hold_the_state_is_tried():
    plans, ways = plans_of(lm_tiny.get_config(), 4), set()
    for _ in range(3):
        one = choices.following(plans)
        one.fit(result(1.0))
        ways.add((one.values["reduction.shard_update"], one.values["reduction.shard_params"]))
    assert ways == {(False, False), (True, False), (True, True)}


@pytest.mark.parametrize("outcome", [choices.TOO_LARGE, choices.PRUNED])
def test_where_the_config_does_not_fit_the_next_is_what_needs_least(outcome):
    plans = plans_of(lm_tiny.get_config(), 4)
    plans[0].outcome = outcome
    for number, one in enumerate(plans):
        one.needs = 100 - number
    assert choices.following(plans) is plans[-1]


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
def test_what_needs_more_than_a_plan_that_does_not_fit(values, more):
    changed = {"micro_batches": 4, "model.remat": True, "reduction.shard_update": True}
    failed = plans_of(lm_tiny.get_config(), 1, **changed)[0].values
    assert choices.needs_more({**failed, **values}, failed) is more


def prepared(memory, hbm=1000):
    chip = types.SimpleNamespace(hbm=hbm)
    return estimate.Prepared(chip, None, None, None, None, {"memory": memory})


def judged(plans, config, prepare, kept=0):
    judge = plan.Judge(config, prepare)
    judge._kept = lambda one, config, step: kept
    for one in plans:
        judge(one)


def test_what_cannot_fit_is_pruned_with_its_reason():
    config = lm_tiny.get_config()
    plans, asked = plans_of(config, 4), []

    def prepare(config):
        reduction = config.reduction
        asked.append((config.model_parallel, reduction.shard_update, reduction.shard_params))
        size = 800 // config.model_parallel
        return prepared({"parameters": size, "optimizer_state": size})

    judged(plans, config, prepare, kept=1000)
    # Once for each state that a chip may hold.
    sharded = [(False, False), (True, False), (True, True)]
    assert sorted(asked) == [(n, *which) for n in (1, 2, 4) for which in sharded]
    why = lambda **values: with_values(plans, **values).reason
    assert why(model_parallel=1).startswith("state and sums of gradients need more than the 1000 B")
    assert why(model_parallel=2, micro_batches=2).startswith("state and sums of gradients need")
    assert "what a loop keeps" in why(model_parallel=2, micro_batches=1)
    one = with_values(plans, model_parallel=4, micro_batches=2)
    assert (one.outcome, one.needs) == (choices.WAITING, 3 * 200 + 1000 // 4)
    assert with_values(plans, model_parallel=4).needs == 2 * 200 + 1000 // 4


def test_what_the_framework_refuses_is_counted_with_its_reason():
    config = lm_tiny.get_config()
    plans = plans_of(config, 4, micro_batches=3)

    def prepare(config):
        if config.micro_batches == 3:
            raise errors.UserError("no 3")
        if config.reduction.shard_update:
            raise errors.UserError("no shards")
        return prepared({"parameters": 1})

    judged(plans, config, prepare)
    assert (plans[0].outcome, plans[0].reason) == (choices.REFUSED, "no 3")
    refused = [one for one in plans[1:] if one.outcome == choices.REFUSED]
    assert {one.reason for one in refused} == {"no shards"}
    # Of the plans but for its own a third is not sharded.
    assert len(refused) == (len(plans) - 1) * 2 // 3
    assert f"{len(refused)} refused: no shards\n1 refused: no 3" in plan.show(plans, "v5e:2x2")


def test_what_a_dry_run_says_becomes_of_a_plan():
    def took(code, said, err=""):
        one = choices.Plan({})
        plan.take(one, code, f"hello\n{json.dumps(said)}\n" if said else "hello\n", err)
        return one

    assert took(0, result(1.0)).result == result(1.0)
    large = took(1, {"memory": {"fits": False, "needed": 7}}, "error: too much")
    assert (large.outcome, large.needs) == (choices.TOO_LARGE, 7)
    refused = took(1, {"memory": {"fits": True}}, "error: cannot read\n(--debug shows where)\n")
    assert (refused.outcome, refused.reason) == (choices.REFUSED, "cannot read")
    crashed = took(-signal.SIGABRT, None, "Check failed\n")
    assert crashed.reason == "the compiler was ended by signal 6: Check failed"


def searched(most, seconds, is_too_large=lambda values: False):
    """The plans of a search, and the lines of those that were compiled."""
    plans, compiled = plans_of(lm_tiny.get_config(), 4), []

    def compile_plan(one):
        compiled.append(one)
        if is_too_large(one.values):
            one.outcome = choices.TOO_LARGE
        else:
            one.result = result(seconds(one.values))
            one.outcome = choices.FITS

    plan.search(plans, compile_plan, most, lambda one, done, of: None)
    return plans, compiled


def test_a_search_finds_the_best_of_many_by_few():
    def seconds(values):
        near = (values["model_parallel"] - 4) ** 2 + (values["micro_batches"] - 2) ** 2
        return 1.0 + near + values["model.remat"] + (not values["reduction.shard_update"])

    plans, compiled = searched(24, seconds)
    assert len(compiled) == 24 < len(plans) / 3
    best = min(choices.fitting(plans), key=lambda one: one.rank)
    assert best.result["seconds"] == 1.0


def test_a_search_leaves_out_what_needs_more_than_what_does_not_fit():
    too_large = lambda values: not values["model.remat"]
    plans, compiled = searched(1000, lambda values: 1.0, too_large)
    pruned = [one for one in plans if one.outcome == choices.PRUNED]
    assert pruned and all(not one.values["model.remat"] for one in pruned)
    assert len(compiled) + len(pruned) == len(plans)
    assert {one.outcome for one in plans} == {choices.FITS, choices.TOO_LARGE, choices.PRUNED}


def test_the_table_has_the_ten_best_each_with_its_flags():
    plans = plans_of(digits.get_config(), 16)
    for number, one in enumerate(plans[:12]):
        one.result, one.outcome = result(float(12 - number)), choices.FITS
    plans[12].outcome, plans[12].reason = choices.REFUSED, "no such collective"
    lines = plan.show(plans, "v5e:4x4").splitlines()
    (head,) = (i for i, line in enumerate(lines) if line.split()[:2] == ["at", "least"])
    rows = lines[head + 1 :][:20]
    assert [row.split()[0] for row in rows[::2]] == [str(n) for n in range(1, 11)]
    assert rows[0].split()[1:3] == ["1", "s"] and rows[2].split()[1:3] == ["2", "s"]
    assert rows[1].split() == choices.flags_of(plans[11])
    assert "12 fitting, 1 refused" in lines[0] and "1 refused: no such collective" in lines
    assert "The config as it is: " in lines[-3] and "at least 12 s" in lines[-3]


def test_what_a_loop_keeps_for_its_gradient_is_seen_in_the_trace():
    import jax
    import jax.numpy as jnp

    def loss(w, x):
        layer = lambda x, w: (jnp.sin(x @ w), None)
        return jnp.sum(jax.lax.scan(layer, x, w)[0])

    w, x = jnp.ones((10, 8, 8)), jnp.ones((64, 8))
    kept = estimate.stacked_bytes(jax.make_jaxpr(jax.grad(loss))(w, x))
    # At least the layer's input and the sine's for each of ten layers.
    assert 2 * 10 * 64 * 8 * 4 <= kept < 6 * 10 * 64 * 8 * 4
    assert estimate.stacked_bytes(jax.make_jaxpr(loss)(w, x)) == 0


def interrupted(plans, compile_plan, most, report):
    plans[0].result, plans[0].outcome = result(3.0), choices.FITS
    report(plans[0], 1, most)
    raise KeyboardInterrupt


def test_what_is_known_when_interrupted_is_printed(monkeypatch, capsys):
    monkeypatch.setattr(plan, "search", interrupted)
    monkeypatch.setattr(plan.Judge, "_kept", lambda *_: 0)
    stopped = []
    monkeypatch.setattr(plan.Compiler, "stop", lambda self: stopped.append(self))
    prepare = lambda config, topology: prepared({"parameters": 1})
    code = plan.run(digits.get_config(), "v5e:4x4", prepare, (), 5, as_json=False)
    out, err = capsys.readouterr()
    assert code == 130 and len(stopped) == 1
    assert "1  3 s" in out and "1 fitting, 23 not compiled" in out
    assert "1 of 5: model_parallel=1" in err and "interrupted" in err


def test_stopping_ends_what_is_being_compiled():
    compiler = plan.Compiler(())
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        compiler._running.add(child)
        compiler.stop()
        assert child.wait() == -signal.SIGKILL


def raised(config, prepare, topology="v5e:4x4"):
    with pytest.raises(errors.UserError) as e:
        plan.run(config, topology, prepare, (), 5, as_json=False)
    return str(e.value)


def test_a_plan_that_cannot_be_is_one_message(monkeypatch):
    prepare = lambda config, topology: prepared({"parameters": 1})
    config = toy.get_config()
    with config.unlocked():
        del config["reduction"]
        config.batch_size = 16
    message = raised(config, prepare)
    for part in ("nothing to choose on v5e:4x4", "sharding_rules", "Leave out --plan"):
        assert part in message
    refused = lambda config, topology: estimate.shard_bytes(errors_of("libtpu is not installed"))
    assert "none of 24 plans is possible: 24 refused: libtpu is not" in raised(
        digits.get_config(), refused
    )
    monkeypatch.setattr(plan.Judge, "_kept", lambda *_: 0)
    monkeypatch.setattr(plan, "search", lambda *_: None)
    assert "none of the compiled plans fits v5e:4x4" in raised(digits.get_config(), prepare)
    assert "no such slice" in raised(digits.get_config(), prepare, "v5e:3x3")


def errors_of(message):
    raise errors.UserError(message)


def run(*arguments):
    """The program's exit code, standard output and standard error."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    environment.pop("JAX_PLATFORMS", None)
    done = subprocess.run(
        [sys.executable, "-m", "xshard.dryrun", *arguments],
        capture_output=True, text=True, env=environment,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


def test_a_wrong_flag_is_one_message():
    code, out, err = run(*TOY, "--plan_compiles=0")
    assert (code, out) == (1, "") and err.startswith("error: ") and "Traceback" not in err
    assert "--plan_compiles=0" in err and "positive" in err


@needs_libtpu
def test_a_plan_as_a_user_meets_it():
    code, out, err = run(*TOY, "--json", "--plan_compiles=2", "--config.batch_size=8")
    assert code == 0, err
    plans = json.loads(out)["plans"]
    # Two rows a replica, in one or two micro-batches; whole, with the update or parameters in shards; two types.
    assert len(plans) == 2 * 3 * 2
    best, second, *others = plans
    assert best["outcome"] == second["outcome"] == choices.FITS
    assert {one["outcome"] for one in others} == {choices.WAITING}
    assert best["result"]["seconds"] <= second["result"]["seconds"]
    assert best["is_own"] or second["is_own"]
    for one in (best, second):
        # The estimate is from below.
        assert 0 < one["needs"] <= one["result"]["memory"]["peak"]
        assert one["result"]["estimated_cycles"] > 0
        assert f"--config.micro_batches={one['values']['micro_batches']}" in one["flags"]
    assert "2 of 2: " in err
