"""An actor-critic that learns to catch a ball, in environments that are part of the
state.

Sources: the game is `catch` of Osband et al., "Behaviour Suite for Reinforcement
Learning", 2019; the update is the advantage actor-critic of Mnih et al., "Asynchronous
Methods for Deep Reinforcement Learning", 2016.
"""

from typing import NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax

import xshard

ROWS, COLUMNS, ACTIONS = 10, 5, 3


class Game(NamedTuple):
    """The positions of the ball and the paddle in each game, int32 of shape (games,)."""

    ball_row: jax.Array
    ball_column: jax.Array
    paddle: jax.Array


class State(NamedTuple):
    """The agent's state, and the replica's games."""

    agent: xshard.LearnerState
    games: xshard.PerExample


class Catch(xshard.Experiment):
    """The game of catch: a ball falls through ten rows; the reward is 1 if the paddle
    in the last row catches it, else -1.
    """

    def __init__(self, config):
        super().__init__(config)
        self.agent = xshard.Learner(self._network, self._rule, self.config)

    def train_data(self):
        """Returns the numbers of the games: each example stands for one of the
        simultaneous games.
        """
        return {"game": np.arange(self.config.batch_size, dtype=np.int32)}

    def eval_data(self):
        return {"game": np.arange(self.config.eval_games, dtype=np.int32)}

    def _network(self, board):
        hidden = hk.nets.MLP(self.config.model.hidden, activate_final=True)(board)
        return hk.Linear(ACTIONS, name="policy")(hidden), hk.Linear(1, name="value")(
            hidden
        )[:, 0]

    def _rule(self):
        opt = xshard.OptaxOptimizer(optax.adam(**self.config.optimizer), name="adam")
        opt = xshard.CrossShardOptimizer(
            opt, slice_axis_name="slice", **self.config.reduction
        )
        return xshard.MixedPrecisionLossScaleOptimizer(opt, "dynamic")

    def init(self, key, batch):
        games = begin(key, len(batch["game"]))
        return State(self.agent.init(key, board(games)), xshard.PerExample(games))

    def train_step(self, state, batch, key):
        act_key, begin_key, update_key = jax.random.split(key, 3)

        def play(games, key):
            (logits, _), _ = self.agent.apply(state.agent, None, board(games))
            action = jax.random.categorical(key, logits)
            after, reward, is_over = move(games, action)
            new = begin(begin_key, len(action))
            after = jax.tree.map(
                lambda new, old: jnp.where(is_over, new, old), new, after
            )
            seen = {
                "board": board(games),
                "action": action,
                "reward": reward,
                "over": is_over,
            }
            return after, seen

        keys = jax.random.split(act_key, self.config.unroll)
        games, seen = jax.lax.scan(play, state.games.value, keys)
        # The games come first, since micro-batches split the first dimension.
        seen = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), {**seen})
        seen["last"] = board(games)
        agent, outcome = self.agent.update(state.agent, self._loss, seen, update_key)
        reward = reward_of_a_game(seen["reward"])
        return State(agent, xshard.PerExample(games)), {
            "agent": outcome,
            "reward": reward,
        }

    def _loss(self, state, seen, key):
        games, steps = seen["action"].shape
        boards = jnp.concatenate([seen["board"], seen["last"][:, None]], axis=1)
        flat = boards.reshape(games * (steps + 1), -1)
        (logits, values), net_state = self.agent.apply(state, key, flat)
        logits = logits.reshape(games, steps + 1, ACTIONS)[:, :-1]
        values = values.reshape(games, steps + 1)
        returns = jax.vmap(discounted, in_axes=(0, 0, 0))(
            seen["reward"], seen["over"], jax.lax.stop_gradient(values[:, -1])
        )
        advantage = returns - values[:, :-1]
        log_probability = -optax.softmax_cross_entropy_with_integer_labels(
            logits, seen["action"]
        )
        policy_loss = -jnp.mean(log_probability * jax.lax.stop_gradient(advantage))
        probabilities = jax.nn.softmax(logits)
        entropy = -jnp.mean(
            jnp.sum(probabilities * jax.nn.log_softmax(logits), axis=-1)
        )
        loss = (
            policy_loss
            + 0.5 * jnp.mean(advantage**2)
            - self.config.entropy_cost * entropy
        )
        return loss, net_state, {"entropy": entropy}

    def eval_step(self, state, batch, key):
        """Returns the reward of each game when the agent always takes the most likely
        action.
        """
        games, reward = begin(key, len(batch["game"])), 0.0
        for _ in range(ROWS - 1):
            (logits, _), _ = self.agent.apply(state.agent, None, board(games))
            games, gained, _ = move(games, jnp.argmax(logits, axis=-1))
            reward += gained
        return {"reward": reward}


def reward_of_a_game(reward):
    """Returns the mean reward of a game, of rewards of shape (games, steps).

    All games take as many steps, so it is a mean over steps, which does not depend on
    how the games are divided. A ratio of two sums would.
    """
    return (ROWS - 1) * jnp.mean(reward)


def begin(key, count):
    """Returns new games, with the ball in a random column."""
    middle = jnp.full(count, COLUMNS // 2, jnp.int32)
    return Game(
        jnp.zeros(count, jnp.int32),
        jax.random.randint(key, (count,), 0, COLUMNS),
        middle,
    )


def move(games, action):
    """Returns the games after an action (0 left, 1 stay, 2 right), the rewards, and
    whether each game is over.
    """
    paddle = jnp.clip(games.paddle + action.astype(jnp.int32) - 1, 0, COLUMNS - 1)
    row = games.ball_row + 1
    is_over = row == ROWS - 1
    reward = jnp.where(paddle == games.ball_column, 1.0, -1.0)
    return (
        Game(row, games.ball_column, paddle),
        jnp.where(is_over, reward, 0.0),
        is_over,
    )


def board(games):
    """Returns the agent's observation: the ball and the paddle on a board, float32 of
    shape (games, 50).
    """
    ball = jax.nn.one_hot(games.ball_row * COLUMNS + games.ball_column, ROWS * COLUMNS)
    return ball + jax.nn.one_hot((ROWS - 1) * COLUMNS + games.paddle, ROWS * COLUMNS)


def discounted(rewards, is_over, last_value):
    """Returns the discounted return from each step of one game, bootstrapped with the
    value of its last position.
    """

    def back(following, step):
        reward, is_over = step
        total = reward + 0.99 * jnp.where(is_over, 0.0, following)
        return total, total

    return jax.lax.scan(back, last_value, (rewards, is_over), reverse=True)[1]
