"""An actor-critic that learns to catch a ball, with its games in the state.

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

ROWS = 10
COLUMNS = 5
ACTIONS = 3
_DISCOUNT = 0.99
_VALUE_COST = 0.5


class Game(NamedTuple):
    """The positions of the ball and the paddle in games, int32 of shape (games,)."""

    ball_row: jax.Array
    ball_column: jax.Array
    paddle: jax.Array


class State(NamedTuple):
    """The agent's state, and the replica's games."""

    agent: xshard.LearnerState
    games: xshard.PerExample


class Catch(xshard.Experiment):
    """The game of catch: a ball falls through ten rows.

    The reward is 1 if the paddle in the last row catches it, else -1.
    """

    def __init__(self, config):
        super().__init__(config)
        self.agent = xshard.Learner(self._network, self._rule, self.config)

    def train_data(self):
        """Returns the numbers of the simultaneous games, which are the examples."""
        return {"game": np.arange(self.config.batch_size, dtype=np.int32)}

    def eval_data(self):
        return {"game": np.arange(self.config.eval_games, dtype=np.int32)}

    def _network(self, board):
        hidden = hk.nets.MLP(self.config.model.hidden, activate_final=True)(board)
        logits = hk.Linear(ACTIONS, name="policy")(hidden)
        value = hk.Linear(1, name="value")(hidden)[:, 0]
        return logits, value

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
            moved, reward, is_over = move(games, action)
            new_games = begin(begin_key, len(action))
            next_games = jax.tree.map(
                lambda new, old: jnp.where(is_over, new, old), new_games, moved
            )
            transition = {
                "board": board(games),
                "action": action,
                "reward": reward,
                "over": is_over,
            }
            return next_games, transition

        keys = jax.random.split(act_key, self.config.unroll)
        games, trajectory = jax.lax.scan(play, state.games.value, keys)
        # The games come first, since micro-batches split the first dimension.
        trajectory = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), trajectory)
        trajectory["last"] = board(games)
        agent, metrics = self.agent.update(
            state.agent, self._loss, trajectory, update_key
        )
        reward = reward_of_a_game(trajectory["reward"])
        new_state = State(agent, xshard.PerExample(games))
        return new_state, {"agent": metrics, "reward": reward}

    def _loss(self, state, seen, key):
        games, steps = seen["action"].shape
        boards = jnp.concatenate([seen["board"], seen["last"][:, None]], axis=1)
        flat_boards = boards.reshape(games * (steps + 1), -1)
        (logits, values), net_state = self.agent.apply(state, key, flat_boards)
        logits = logits.reshape(games, steps + 1, ACTIONS)[:, :-1]
        values = values.reshape(games, steps + 1)
        last_values = jax.lax.stop_gradient(values[:, -1])
        returns = jax.vmap(discounted)(seen["reward"], seen["over"], last_values)
        advantage = returns - values[:, :-1]
        log_probability = -optax.softmax_cross_entropy_with_integer_labels(
            logits, seen["action"]
        )
        policy_loss = -jnp.mean(log_probability * jax.lax.stop_gradient(advantage))
        value_loss = jnp.mean(advantage**2)
        entropies = jnp.sum(
            jax.nn.softmax(logits) * jax.nn.log_softmax(logits), axis=-1
        )
        entropy = -jnp.mean(entropies)
        loss = (
            policy_loss + _VALUE_COST * value_loss - self.config.entropy_cost * entropy
        )
        return loss, net_state, {"entropy": entropy}

    def eval_step(self, state, batch, key):
        """Returns the reward of each game if the agent takes the likeliest actions."""
        games = begin(key, len(batch["game"]))
        total_reward = 0.0
        for _ in range(ROWS - 1):
            (logits, _), _ = self.agent.apply(state.agent, None, board(games))
            games, reward, _ = move(games, jnp.argmax(logits, axis=-1))
            total_reward += reward
        return {"reward": total_reward}


def reward_of_a_game(reward):
    """Returns the mean reward of a game, of rewards of shape (games, steps).

    All games take as many steps, so it is a mean over steps, which does not depend on
    how the games are divided. A ratio of two sums would.
    """
    return (ROWS - 1) * jnp.mean(reward)


def begin(key, count):
    """Returns new games, with the ball in a random column."""
    return Game(
        ball_row=jnp.zeros(count, jnp.int32),
        ball_column=jax.random.randint(key, (count,), 0, COLUMNS),
        paddle=jnp.full(count, COLUMNS // 2, jnp.int32),
    )


def move(games, action):
    """Moves the paddles and lets the balls fall.

    Args:
      games: the games.
      action: 0 for left, 1 to stay, 2 for right, in each game.

    Returns:
      The games after that, the rewards, and whether each game is over.
    """
    paddle = jnp.clip(games.paddle + action.astype(jnp.int32) - 1, 0, COLUMNS - 1)
    row = games.ball_row + 1
    is_over = row == ROWS - 1
    catch_reward = jnp.where(paddle == games.ball_column, 1.0, -1.0)
    reward = jnp.where(is_over, catch_reward, 0.0)
    return Game(row, games.ball_column, paddle), reward, is_over


def board(games):
    """Returns the agent's observation: the ball and the paddle on a board.

    It is float32 of shape (games, 50).
    """
    ball = games.ball_row * COLUMNS + games.ball_column
    paddle = (ROWS - 1) * COLUMNS + games.paddle
    size = ROWS * COLUMNS
    return jax.nn.one_hot(ball, size) + jax.nn.one_hot(paddle, size)


def discounted(rewards, is_over, last_value):
    """Returns the discounted return from each step of one game.

    It is bootstrapped with the value of the last position.
    """

    def back(next_return, step):
        reward, is_over = step
        value = reward + _DISCOUNT * jnp.where(is_over, 0.0, next_return)
        return value, value

    _, returns = jax.lax.scan(back, last_value, (rewards, is_over), reverse=True)
    return returns
