"""Evaluations whose metrics are computed by Python, from the outputs."""

import json

import jax
import jax.numpy as jnp
import numpy as np

import xshard
from tests import toy
from xshard import loop

# No multiple of the replicas, so that the last batch is padded.
EXAMPLES = 21
FAR = 0.05


def misses(outputs, targets):
    """Counts, for each example, whether its output is far off, and the example."""
    is_far = np.abs(np.asarray(outputs) - np.asarray(targets)) > FAR
    return np.stack([is_far, np.ones_like(is_far)], axis=1).astype(np.float32)


class OnTheHost(toy.Toy):
    """Measures a ratio of counts of the host, and the median of all errors."""

    def eval_data(self):
        examples = {name: x[:EXAMPLES] for name, x in self.train_data().items()}
        return {**examples, "number": np.arange(EXAMPLES)}

    def evaluate(self, outputs, batch):
        shape = jax.ShapeDtypeStruct((len(outputs), 2), jnp.float32)
        counts = jax.pure_callback(misses, shape, outputs, batch["y"])
        is_own = batch["number"][:, None] == jnp.arange(EXAMPLES)
        errors = jnp.abs(outputs - batch["y"])[:, None]
        return {"counts": counts, "errors": jnp.where(is_own, errors, 0)}

    def summarize(self, sums, count):
        missed, seen = sums["counts"]
        median = np.median(sums["errors"])
        return {"missed": missed / max(seen, 1), "seen": seen, "median": median}


def test_python_measures_the_outputs_of_all_examples(tmp_path):
    config = toy.get_config()
    config.update({"experiment": f"{__name__}.OnTheHost", "eval_batch_size": 8})
    best = {"keep_best": 1, "best_metric": "median", "best_mode": "min"}
    config.checkpoint.update(best)
    assert loop.run(config.lock(), str(tmp_path), "") == 0
    results = json.loads((tmp_path / "results.json").read_text())["eval"]
    trained = xshard.load(tmp_path)
    examples = trained.experiment.eval_data()
    outputs = trained.predict(examples)
    errors = np.abs(outputs - examples["y"])
    # A prediction is another program than the evaluation, and rounds otherwise.
    np.testing.assert_allclose(results["median"], np.median(errors), rtol=1e-5)
    assert results["seen"] == EXAMPLES
    assert results["missed"] == np.mean(errors > FAR)
    assert 0 < results["missed"] < 1
