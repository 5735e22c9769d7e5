"""A model in NumPy of a step of small networks, for the sweep of numerics.

It computes what the papers and the documentation of TensorFlow and optax say, and uses
nothing of xshard. All of it is in float64, from inputs and parameters in the types of
the run.

Sources: the rules are those of optax's documentation; batch normalization is Ioffe and
Szegedy, https://arxiv.org/abs/1502.03167, with Haiku's averages; low-rank matrices are
Hu et al., https://arxiv.org/abs/2106.09685; the exchange of slices is Douillard et al.,
https://arxiv.org/abs/2311.08105 and https://arxiv.org/abs/2501.18512; the noise scale
is McCandlish et al., https://arxiv.org/abs/1812.06162.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

RATE = 0.05
MOMENTUM = 0.9
DECAY = 0.9
NORM_DECAY = 0.8
NORM_EPSILON = 1e-5
LORA_SCALE = 2.0
CLIP = 0.3
OUTER_RATE = 0.7
OUTER_MOMENTUM = 0.9
NOISE_EVERY = 8
NOISE_STEPS = 16

# The unit roundoff of each type. The integers are codes for a block, whose largest
# magnitude is 127 of them.
EPSILON = {
    "float32": 2.0**-23,
    "float16": 2.0**-10,
    "bfloat16": 2.0**-7,
    "int8": 1 / 127,
}
_TYPES = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
}

# What is in the names of leaves that are computed from parameters.
_OF_STORED = ("/average/", "/exchanged/", "/OuterOptimizer/~/outer")

State = dict[str, np.ndarray]


def cast(x: Any, dtype: str) -> np.ndarray:
    """Returns an array as a type represents it, in float64."""
    return np.asarray(x).astype(_TYPES[dtype]).astype(np.float64)


@dataclasses.dataclass
class Part:
    """What a micro-batch of a replica has.

    Attributes:
      loss: the loss.
      grads: the gradients, by path.
      net_state: the network's new state.
      magnification: by how much the errors of rounding grow.
    """

    loss: Any
    grads: dict[str, np.ndarray]
    net_state: State
    magnification: float


@dataclasses.dataclass
class Differentiated:
    """What a group has before its update.

    Attributes:
      grads: the sums or means over the replicas, by path.
      error: by how much each of them may differ from what a narrow type computes.
      loss: the mean loss.
      net_state: the mean of the network's state.
      small: the mean squared norm of the gradients of small batches, of a noise scale.
      large: the squared norm of the gradient of the large one.
      estimated: the estimated statistics of the parameters that are evaluated.
    """

    grads: dict[str, np.ndarray]
    error: float
    loss: float
    net_state: State
    small: float
    large: float
    estimated: State


@dataclasses.dataclass
class Predicted:
    """The result of a step of a group.

    Attributes:
      leaves: the value of each leaf of the state, by path.
      tolerances: by how much it may differ.
      skipped: whether the step is skipped.
      finite: whether all gradients are finite.
      exchanged: whether the slices take over or exchange parameters.
      loss: the loss.
      loss_tolerance: by how much it may differ.
      grad_norm: the norm of the gradients.
      norm_tolerance: by how much it may differ.
      verdict: what the run is told.
    """

    leaves: State
    tolerances: dict[str, np.ndarray]
    skipped: bool
    finite: bool
    exchanged: bool
    loss: float
    loss_tolerance: float
    grad_norm: float
    norm_tolerance: float
    verdict: int


class Model:
    """The steps of one program of the sweep."""

    def __init__(self, choice: Mapping[str, Any], rows: int, replicas: int):
        """Stores what was drawn.

        Args:
          choice: the value of each key.
          rows: the number of rows of a replica.
          replicas: the number of replicas of a group, in all its slices.
        """
        self.choice = choice
        self.rows = rows
        self.replicas = replicas

    # The network.

    def part(self, state: State, batch: Mapping[str, np.ndarray]) -> Part:
        """Differentiates the loss of one micro-batch."""
        choice = self.choice
        compute = choice["compute"]
        params = {}
        for name, x in state.items():
            if name.startswith("params/"):
                params[name.removeprefix("params/")] = cast(x, compute)
        x = cast(batch["x"], compute)
        net_state = self._seen(state, x)
        grads: dict[str, np.ndarray] = {}
        magnification = 1.0
        if choice["network"] == "linear":
            hidden = x
        else:
            weight = params["a/w"]
            if choice["lora"]:
                low = params["a/w_lora_a"]
                high = params["a/w_lora_b"]
                weight = weight + LORA_SCALE * low @ high
            before = x @ weight
            if choice["network"] == "norm":
                normed, inverse = self._norm(state, before, net_state)
                activated = normed * params["norm/scale"] + params["norm/offset"]
                # The inverse of a small deviation magnifies what it multiplies.
                magnification += _finite_max(inverse)
            else:
                activated = before + params["a/b"]
            hidden = np.tanh(activated)
        outputs = hidden @ params["b/w"] + params["b/b"]
        error = outputs - batch["y"].astype(np.float64)
        loss = np.mean(error**2) + np.mean(batch["extra"].astype(np.float64))

        back = 2 * error / error.size
        grads["b/w"] = hidden.T @ back
        grads["b/b"] = back.sum(axis=0)
        if choice["network"] != "linear":
            back = (back @ params["b/w"].T) * (1 - hidden**2)
            if choice["network"] == "norm":
                grads["norm/scale"] = (back * normed).sum(axis=0, keepdims=True)
                grads["norm/offset"] = back.sum(axis=0, keepdims=True)
                back = back * params["norm/scale"]
                mean = back.mean(axis=0)
                along = (back * normed).mean(axis=0)
                back = inverse * (back - mean - normed * along)
            else:
                grads["a/b"] = back.sum(axis=0)
            grads["a/w"] = x.T @ back
            if choice["lora"]:
                grads["a/w_lora_a"] = LORA_SCALE * grads["a/w"] @ high.T
                grads["a/w_lora_b"] = LORA_SCALE * low.T @ grads["a/w"]
        trained = {path: g for path, g in grads.items() if self.trains(path)}
        if batch["overflows"].any():
            trained = {path: np.full_like(g, np.nan) for path, g in trained.items()}
        return Part(loss, trained, net_state, magnification)

    def trains(self, path: str) -> bool:
        """Returns whether a parameter is trained."""
        if self.choice["lora"]:
            return "_lora_" in path
        if self.choice["frozen"]:
            return not path.startswith(self.choice["frozen"])
        return True

    def _seen(self, state: State, x: np.ndarray) -> State:
        """Returns the state that any network has, if the draw gives it one."""
        new = {}
        if "net_state/~/seen" in state:
            old = state["net_state/~/seen"].astype(np.float64)
            new["net_state/~/seen"] = old + 0.1 * (np.mean(x) - old)
            new["net_state/~/count"] = state["net_state/~/count"] + 1
            new["net_state/~/table"] = state["net_state/~/table"]
        return new

    def _norm(
        self, state: State, x: np.ndarray, net_state: State
    ) -> tuple[np.ndarray, np.ndarray]:
        """Normalizes a batch, and adds the averages to the network's state."""
        mean = x.mean(axis=0, keepdims=True)
        centred = x - mean
        variance = (centred**2).mean(axis=0, keepdims=True)
        for name, value in (("mean_ema", mean), ("var_ema", variance)):
            prefix = f"net_state/norm/~/{name}"
            count = state[f"{prefix}/counter"] + 1
            hidden = state[f"{prefix}/hidden"].astype(np.float64)
            hidden = hidden * NORM_DECAY + value * (1 - NORM_DECAY)
            net_state[f"{prefix}/counter"] = count
            net_state[f"{prefix}/hidden"] = hidden
            net_state[f"{prefix}/average"] = hidden / (1 - NORM_DECAY**count)
        inverse = 1 / np.sqrt(variance + NORM_EPSILON)
        return centred * inverse, inverse

    # The gradients of a group.

    def differentiate(
        self, state: State, batch: Mapping[str, np.ndarray]
    ) -> Differentiated:
        """Differentiates the loss of a group.

        Args:
          state: the group's state.
          batch: its arrays, of shape (replicas, micro-batches, rows, ...).
        """
        choice = self.choice
        micro = choice["micro_batches"]
        estimated = self._estimate(state, batch)
        replicas = self.replicas
        divisor = replicas if choice["reduction"] == "mean" else 1
        mean_mass = batch["mass"].sum(axis=(1, 2), dtype=np.float64).mean() / micro
        if choice["cross_replica"]:
            # They have one batch together, whose loss is the mean of theirs.
            batch = {name: _merged(x) for name, x in batch.items()}
            divisor /= replicas
            replicas = 1
        parts = []
        of_replicas = []
        for replica in range(replicas):
            own = []
            for number in range(micro):
                rows = {name: x[replica, number] for name, x in batch.items()}
                part = self.part(state, rows)
                if choice["weighted"]:
                    factor = rows["mass"].sum(dtype=np.float64) / mean_mass
                    part.loss = part.loss * factor
                    part.grads = {path: g * factor for path, g in part.grads.items()}
                own.append(part)
            parts += own
            mean = lambda path, own=own: sum(p.grads[path] for p in own) / micro
            of_replicas.append({path: mean(path) for path in own[0].grads})
        largest = _largest([part.grads for part in parts])
        paths = list(of_replicas[0])
        summands = []
        for grads in of_replicas:
            summands.append(self._clip({path: grads[path] / divisor for path in paths}))
        total = {path: sum(x[path] for x in summands) for path in paths}
        # The sum has an error of each of its summands.
        magnification = max(part.magnification for part in parts)
        error = self._gradient_epsilon() * largest * replicas / divisor * magnification

        if self.replicas > 1:
            small = np.mean([_sq_norm(x) for x in summands]) * self.replicas**2
            large = _sq_norm(total)
        else:
            small = np.mean([_sq_norm(part.grads) for part in parts])
            large = _sq_norm(of_replicas[0])
        net_state = {}
        for name, last in parts[-1].net_state.items():
            if np.issubdtype(last.dtype, np.integer) or name.endswith("/table"):
                net_state[name] = last
            else:
                net_state[name] = sum(p.net_state[name] for p in parts) / len(parts)
        loss = sum(part.loss for part in parts) / len(parts)
        return Differentiated(total, error, loss, net_state, small, large, estimated)

    def _clip(self, grads: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        kind = self.choice["clip"]
        if kind == "value":
            return {path: np.clip(g, -CLIP, CLIP) for path, g in grads.items()}
        if kind == "norm":
            norm = np.sqrt(_sq_norm(grads))
            factor = np.minimum(1, CLIP / np.maximum(norm, 1e-6))
            return {path: g * factor for path, g in grads.items()}
        return grads

    def _gradient_epsilon(self) -> float:
        """Returns the relative error of a gradient, in units of the largest element.

        Some tens of roundings are on the way of each.
        """
        choice = self.choice
        types = [choice["compute"], choice["params"], choice["reduce_dtype"]]
        types.append(choice["slice_dtype"])
        epsilon = max(EPSILON[x] for x in types)
        if choice["arithmetic"] == "exact":
            # Sums of integers of 32 bits, which hold some replicas beside each other.
            epsilon = max(epsilon, 2.0**-20)
        return 8 * epsilon

    # The update of a group.

    def step(
        self, states: list[State], batches: list[Mapping[str, np.ndarray]]
    ) -> list[Predicted]:
        """Returns what a step makes of the state of each group, or slice."""
        found = [self.differentiate(s, b) for s, b in zip(states, batches, strict=True)]
        finite = [_all_finite(x.grads) for x in found]
        skipped = [self.skips and not x for x in finite]
        exchanged = False
        # The update as it is, and with gradients that are off by the error both ways:
        # the differences bound those of a narrow type, also where a rule divides by
        # a norm of the gradient or takes its sign.
        variants = []
        for sign in (0, 1, -1):
            new = []
            for state, grads, skip in zip(states, found, skipped, strict=True):
                new.append(self._apply(state, grads, skip, sign))
            if self.choice["outer"]:
                exchanged = self._exchange(states, new, sign)
            variants.append(new)
        results = []
        for group, state in enumerate(states):
            leaves = variants[0][group]
            tolerances = {}
            for name, x in leaves.items():
                differences = [np.abs(v[group][name] - x) for v in variants[1:]]
                tolerance = 2 * np.maximum(*differences)
                tolerances[name] = tolerance + self._rounding(name, state[name], x)
            scale = self._scale(state)
            lowered = scale is not None and leaves[scale] < state[scale]
            has_nonfinite = not finite[group] or not np.isfinite(found[group].loss)
            verdict = 2 if has_nonfinite else 0
            if skipped[group]:
                verdict = 0 if lowered else 1
            compute = EPSILON[self.choice["compute"]]
            count = sum(g.size for g in found[group].grads.values())
            norm = np.sqrt(_sq_norm(found[group].grads))
            results.append(
                Predicted(
                    leaves=leaves,
                    tolerances=tolerances,
                    skipped=skipped[group],
                    finite=finite[group],
                    exchanged=exchanged,
                    loss=found[group].loss,
                    loss_tolerance=32 * compute * (1 + abs(found[group].loss)),
                    grad_norm=norm,
                    norm_tolerance=2 * found[group].error * np.sqrt(count)
                    + 1e-5 * norm,
                    verdict=verdict,
                )
            )
        return results

    @property
    def skips(self) -> bool:
        """Whether steps that are not finite are skipped."""
        scale = self.choice["loss_scale"]
        return scale == "dynamic" or self.choice["on_nonfinite"] == "skip"

    def _rounding(self, name: str, old: np.ndarray, new: np.ndarray) -> Any:
        """Returns by how much a leaf differs because of its type."""
        if str(old.dtype) not in EPSILON or name.endswith("/table"):
            return 0.0
        epsilon = EPSILON[str(old.dtype)]
        if name.startswith("net_state/") or "/statistics/" in name:
            epsilon = max(epsilon, EPSILON[self.choice["compute"]])
            # The mean of elements that cancel.
            return 32 * epsilon * (1 + np.abs(new))
        if name.startswith("gradient_noise/"):
            error = 2e-3
            if "slices" in self.choice["layout"]:
                # Squares of what slices send have twice its error.
                error = max(error, EPSILON[self.choice["slice_dtype"]])
            return error * (_finite_max(new) + self._noise_size)
        if any(word in name for word in _OF_STORED):
            # They follow parameters as these are stored.
            epsilon = max(epsilon, EPSILON[self.choice["params"]])
        # An element may be the difference of others as large as the largest.
        largest = max(_finite_max(new), _finite_max(old), RATE)
        tolerance = 2 * epsilon * (np.abs(new) + np.abs(old)) + 2.0**-21 * largest
        if self.choice["rule"] in ("adam", "adamw"):
            # In float32, 1 - 0.999 is off by some 1e-5 of itself.
            tolerance = tolerance + 2e-5 * RATE
        return tolerance

    def _scale(self, state: State) -> str | None:
        for name in state:
            if name.endswith("/current_loss_scale"):
                return name
        return None

    def _apply(
        self, state: State, found: Differentiated, skipped: bool, sign: int
    ) -> State:
        """Returns the state of a group after its own update."""
        new = {name: x.astype(np.float64) for name, x in state.items()}
        self._move_scale(state, new, _all_finite(found.grads))
        if skipped:
            return new
        new |= {name: np.asarray(x, np.float64) for name, x in found.net_state.items()}
        new["global_step"] = new["global_step"] + 1
        for name in state:
            if name.startswith("opt_state/rule/") and name.endswith("/count"):
                new[name] = new[name] + 1
        if self.choice["rule"] == "schedule_free_sgd":
            self._move_weights(new)
        if self.choice["rule"] != "another":
            for path, grad in found.grads.items():
                self._move(state, new, path, grad + sign * found.error)
        self._average(state, new, found)
        if "gradient_noise/variance" in state:
            self._move_noise(state, new, found)
        return new

    def _move_scale(self, old: State, new: State, finite: bool) -> None:
        name = self._scale(old)
        if name is None:
            return
        count = name.replace("current_loss_scale", "good_steps")
        if not finite:
            new[name] = np.maximum(old[name] / 2, 1.0)
            new[count] = np.asarray(0.0)
            return
        good = old[count] + 1
        is_due = good >= self.choice["increment_period"]
        new[name] = np.asarray(old[name] * (2.0 if is_due else 1.0))
        new[count] = np.asarray(0.0 if is_due else good)

    def _rate(self, state: State) -> float:
        rate: float = self.choice["rate"]
        if self.choice["schedule"] == "constant":
            return rate
        return rate / (1 + 0.5 * float(state["global_step"]))

    def _move_weights(self, new: State) -> None:
        """Moves the scalars of a schedule-free rule, whose rate is constant."""
        largest = _only(new, "/max_lr")
        new[largest] = np.maximum(new[largest], self.choice["rate"])
        total = _only(new, "/weight_sum")
        new[total] = new[total] + new[largest] ** 2
        count = _only(new, "/step_count")
        new[count] = new[count] + 1

    def _move(self, old: State, new: State, path: str, grad: np.ndarray) -> None:
        """Moves a parameter and its slots by a gradient."""
        kind = self.choice["rule"]
        name = f"params/{path}"
        param = old[name].astype(np.float64)
        rate = self._rate(old)
        slot = lambda word: _only(old, f"/{word}/{path}", "opt_state/rule/")
        read = lambda word: old[slot(word)].astype(np.float64)
        if kind == "sgd":
            move = grad
        elif kind in ("momentum", "nesterov"):
            move = grad + MOMENTUM * read("trace")
            new[slot("trace")] = move
            if kind == "nesterov":
                move = grad + MOMENTUM * move
        elif kind in ("adam", "adamw"):
            first = 0.9 * read("mu") + 0.1 * grad
            second = 0.999 * read("nu") + 0.001 * grad**2
            new[slot("mu")] = first
            new[slot("nu")] = second
            count = float(old["global_step"]) + 1
            unbiased = first / (1 - 0.9**count)
            move = unbiased / (np.sqrt(second / (1 - 0.999**count)) + 1e-8)
            if kind == "adamw":
                move = move + 1e-2 * param
        elif kind == "rmsprop":
            second = 0.9 * read("nu") + 0.1 * grad**2
            new[slot("nu")] = second
            move = grad / np.sqrt(second + 1e-8)
        elif kind == "adagrad":
            total = read("sum_of_squares") + grad**2
            new[slot("sum_of_squares")] = total
            move = grad / np.sqrt(total + 1e-7)
        elif kind == "lion":
            first = read("mu")
            new[slot("mu")] = 0.99 * first + 0.01 * grad
            move = np.sign(0.1 * grad + 0.9 * first) + 1e-2 * param
        else:
            assert kind == "schedule_free_sgd"
            z = read("z")
            x = (param - 0.1 * z) / 0.9
            new[slot("z")] = z - rate * grad
            share = new[_only(new, "/max_lr")] ** 2 / new[_only(new, "/weight_sum")]
            x = (1 - share) * x + share * new[slot("z")]
            new[name] = cast(0.9 * x + 0.1 * new[slot("z")], str(old[name].dtype))
            return
        factor = 1.0
        if self.choice["backs_off"]:
            factor = float(old[_only(old, "/hyperparams/update_scale")])
        dtype = str(old[name].dtype)
        new[name] = cast(param - factor * rate * move, dtype)

    def _average(self, old: State, new: State, found: Differentiated) -> None:
        """Moves the averages of the parameters, and of the network's state."""
        kind = self.choice["average"]
        if kind != "none":
            rate = 1 - DECAY
            if kind == "count":
                count = _only(new, "/num_updates")
                new[count] = new[count] + 1
                rate = 1 - min(DECAY, (1 + new[count]) / (10 + new[count]))
            for path in found.grads:
                name = _only(old, f"/average/{path}")
                new[name] = old[name] - rate * (old[name] - new[f"params/{path}"])
        if self.choice["estimate_statistics"]:
            new |= found.estimated
            return
        if kind != "none":
            for path, x in found.net_state.items():
                for name in old:
                    if name.endswith(f"/statistics/{path.removeprefix('net_state/')}"):
                        new[name] = old[name] - rate * (old[name] - x)

    def evaluated(self, state: State) -> State:
        """Returns the parameters and the network's state to evaluate."""
        new = dict(state)
        for name in state:
            if not name.startswith("params/"):
                continue
            path = name.removeprefix("params/")
            if self.choice["rule"] == "schedule_free_sgd" and self.trains(path):
                z = state[_only(state, f"/z/{path}")].astype(np.float64)
                new[name] = (state[name].astype(np.float64) - 0.1 * z) / 0.9
            for other in state:
                endings = (f"/average/{path}", f"/exchanged/{path}")
                if other.startswith("opt_state/") and other.endswith(endings):
                    new[name] = state[other]
        for name in state:
            if "/statistics/" in name:
                new[f"net_state/{name.partition('/statistics/')[2]}"] = state[name]
        return new

    def _estimate(self, state: State, batch: Mapping[str, np.ndarray]) -> State:
        """Returns the statistics that a group estimates in a step."""
        estimated: State = {}
        if not self.choice["estimate_statistics"]:
            return estimated
        evaluated = self.evaluated(state)
        parts = []
        if self.choice["cross_replica"]:
            batch = {name: _merged(x) for name, x in batch.items()}
        for replica in range(len(batch["x"])):
            rows = {name: x[replica, 0] for name, x in batch.items()}
            parts.append(self.part(evaluated, rows))
        for name in state:
            if "/statistics/" in name:
                path = f"net_state/{name.partition('/statistics/')[2]}"
                values = [np.asarray(p.net_state[path], np.float64) for p in parts]
                estimated[name] = sum(values) / len(values)
        return estimated

    def _move_noise(self, old: State, new: State, found: Differentiated) -> None:
        size = found.small * self.rows * self.replicas
        if np.isfinite(size):
            # That of another group may be what a fault left.
            self._noise_size = size
        if int(old["global_step"]) % NOISE_EVERY:
            return
        parts = self.replicas if self.replicas > 1 else self.choice["micro_batches"]
        large = self.rows * self.replicas
        small = large // parts
        difference = large - small
        sq_norm = (large * found.large - small * found.small) / difference
        variance = (found.small - found.large) * small * large / difference
        if not (np.isfinite(sq_norm) and np.isfinite(variance)):
            return
        weight = min(NOISE_EVERY / NOISE_STEPS, 1.0)
        for name, x in (("variance", variance), ("sq_norm", sq_norm)):
            path = f"gradient_noise/{name}"
            new[path] = old[path] + weight * (x - old[path])

    # The exchange between slices.

    def _exchange(self, before: list[State], after: list[State], sign: int) -> bool:
        """Exchanges parameters between slices; returns whether any were."""
        choice = self.choice
        every = choice["outer"]
        delay = choice["delay_steps"]
        fragments = self.fragments(before[0])
        step = int(before[0][_only(before[0], "/OuterOptimizer/steps")]) + 1
        any_exchange = False
        for new in after:
            new[_only(new, "/OuterOptimizer/steps")] = np.asarray(float(step))
        source = before if delay else after
        sent_after = step - 1 if delay else step
        for index, paths in enumerate(fragments):
            offset = index * every // len(fragments)
            if sent_after > 0 and (sent_after - offset) % every == 0:
                self._send(index, paths, source, after, sign)
                any_exchange = True
            taken = step - delay
            if taken > 0 and (taken - offset) % every == 0:
                any_exchange = True
                kept = 0.5 if delay else 0.0
                for new in after:
                    for path in paths:
                        name = f"params/{path}"
                        exchanged = new[_only(new, f"/exchanged/{path}")]
                        new[name] = kept * new[name] + (1 - kept) * exchanged
        return any_exchange

    def _send(
        self,
        index: int,
        paths: list[str],
        source: list[State],
        after: list[State],
        sign: int,
    ) -> None:
        """Moves the parameters of the last exchange by the outer rule."""
        differences = {}
        largest = 0.0
        for path in paths:
            total: Any = 0.0
            for state, new in zip(source, after, strict=True):
                exchanged = new[_only(new, f"/exchanged/{path}")]
                # What is sent is the parameter as it is stored.
                param = np.asarray(state[f"params/{path}"], np.float64)
                sent = exchanged - param
                for name in new:
                    if name.endswith(f"/residual/{path}"):
                        sent = sent + new[name]
                largest = max(largest, _finite_max(sent))
                total = total + sent
            differences[path] = total / len(after)
        epsilon = EPSILON[self.choice["outer_dtype"]]
        error = epsilon * largest
        # Parameters may be rounded the other way.
        stored = max(_finite_max(source[0][f"params/{path}"]) for path in paths)
        error += EPSILON[self.choice["params"]] * stored
        for path, difference in differences.items():
            off = difference + sign * error
            for new in after:
                name = _only(new, f"/exchanged/{path}")
                trace = _only(new, f"/trace/{path}", "opt_state/OuterOptimizer/~/outer")
                new[trace] = off + OUTER_MOMENTUM * new[trace]
                move = off + OUTER_MOMENTUM * new[trace]
                new[name] = new[name] - OUTER_RATE * move

    def fragments(self, state: State) -> list[list[str]]:
        """Returns the paths of each fragment: the largest first, to the smallest."""
        marker = "/OuterOptimizer/exchanged/"
        sizes = {}
        for name, x in state.items():
            if marker in name:
                sizes[name.partition(marker)[2]] = x.size
        fragments: list[list[str]] = [[] for _ in range(self.choice["fragments"])]
        totals = [0] * len(fragments)
        for path in sorted(sizes, key=lambda path: (-sizes[path], path)):
            smallest = totals.index(min(totals))
            fragments[smallest].append(path)
            totals[smallest] += sizes[path]
        return fragments

    _noise_size = 0.0


def _only(state: Mapping[str, Any], ending: str, prefix: str = "opt_state/") -> str:
    """Returns the name of the one leaf with an ending."""
    (name,) = [x for x in state if x.startswith(prefix) and x.endswith(ending)]
    return name


def _merged(x: np.ndarray) -> np.ndarray:
    """Returns the rows of all replicas as those of one."""
    rows = np.moveaxis(x, 0, 1)
    return rows.reshape(1, len(rows), -1, *rows.shape[3:])


def _sq_norm(grads: Mapping[str, np.ndarray]) -> float:
    return float(sum(np.sum(np.square(g)) for g in grads.values()))


def _largest(trees: list[dict[str, np.ndarray]]) -> float:
    return max(_finite_max(g) for grads in trees for g in grads.values())


def _finite_max(x: Any) -> float:
    magnitudes = np.abs(np.asarray(x, np.float64))
    return float(np.max(np.where(np.isfinite(magnitudes), magnitudes, 0), initial=0))


def _all_finite(grads: Mapping[str, np.ndarray]) -> bool:
    return all(bool(np.all(np.isfinite(g))) for g in grads.values())
