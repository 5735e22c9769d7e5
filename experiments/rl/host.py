"""The same agent with its games in NumPy on the host.

Most environments cannot run on a device.
"""

import numpy as np

import xshard
from experiments.rl import experiment
from experiments.rl.experiment import ACTIONS, COLUMNS, ROWS


class HostCatch(experiment.Catch):
    """Catch, with training data from games that the agent plays on the host.

    It plays before some of the steps.
    """

    def __init__(self, config):
        super().__init__(config)
        if config.group_assignment:
            raise xshard.UserError(
                "This experiment's games belong to one agent: leave group_assignment "
                "empty."
            )

    def train_batches(self, part):
        return Player(self.config, part)

    def init(self, key, batch):
        return experiment.State(self.agent.init(key, batch["last"]), games=None)

    def train_step(self, state, batch, key):
        agent, metrics = self.agent.update(state.agent, self._loss, dict(batch), key)
        reward = experiment.reward_of_a_game(batch["reward"])
        return state._replace(agent=agent), {"agent": metrics, "reward": reward}

    def predict(self, state, batch):
        """Returns the logits of the actions, of shape (games, 3)."""
        (logits, _), _ = self.agent.apply(state.agent, None, batch["board"])
        return logits


class Player:
    """An iterator that plays many batches at a time and serves them one by one.

    Every process plays all games, with the same random draws, and takes its own rows of
    each batch. So the state is the same on all processes, and a run can resume on
    another number of them.
    """

    state_is_shared = True

    def __init__(self, config, part):
        self.acts_every_steps = config.acts_every_steps
        self._games = part.batch_size
        self._unroll = config.unroll
        self._rows = part.rows[0]
        self._random = np.random.default_rng(part.seed)
        self._ball_row = np.zeros(self._games, np.int32)
        self._ball_column = np.zeros(self._games, np.int32)
        self._paddle = np.zeros(self._games, np.int32)
        self._begin(np.ones(self._games, bool))
        # The batches of the last `act`, and the number already served; zeros before the
        # first `act`.
        batches = (self.acts_every_steps, self._games)
        steps = (*batches, self._unroll)
        self._played = {
            "board": np.zeros((*steps, ROWS * COLUMNS), np.float32),
            "action": np.zeros(steps, np.int32),
            "reward": np.zeros(steps, np.float32),
            "over": np.zeros(steps, bool),
            "last": np.zeros((*batches, ROWS * COLUMNS), np.float32),
        }
        self._given = 0

    def act(self, step, predict):
        """Plays one batch for each step until the next call."""
        for batch in range(self.acts_every_steps):
            for time in range(self._unroll):
                self._move(predict, batch, time)
            self._played["last"][batch] = self._board()
        self._given = 0

    def _move(self, predict, batch, time):
        board = self._board()
        logits = np.asarray(predict({"board": board}), np.float32)
        # The Gumbel-max trick: the argmax of logits plus Gumbel noise is a sample from
        # their distribution.
        noise = self._random.gumbel(size=(self._games, ACTIONS))
        action = np.argmax(logits + noise, axis=-1)
        paddle = self._paddle + action.astype(np.int32) - 1
        self._paddle = np.clip(paddle, 0, COLUMNS - 1)
        self._ball_row = self._ball_row + 1
        over = self._ball_row == ROWS - 1
        reward = np.where(self._paddle == self._ball_column, 1.0, -1.0) * over
        self._begin(over)
        seen = {"board": board, "action": action, "reward": reward, "over": over}
        for name, value in seen.items():
            self._played[name][batch, :, time] = value

    def _begin(self, which):
        """Restarts the selected games, with the ball in a random column."""
        columns = self._random.integers(COLUMNS, size=self._games, dtype=np.int32)
        self._ball_row = np.where(which, 0, self._ball_row).astype(np.int32)
        self._ball_column = np.where(which, columns, self._ball_column)
        self._paddle = np.where(which, COLUMNS // 2, self._paddle).astype(np.int32)

    def _board(self):
        boards = np.zeros((self._games, ROWS, COLUMNS), np.float32)
        every = np.arange(self._games)
        np.add.at(boards, (every, self._ball_row, self._ball_column), 1.0)
        np.add.at(boards, (every, ROWS - 1, self._paddle), 1.0)
        return boards.reshape(self._games, -1)

    def __next__(self):
        # Before the first `act`, a run calls this only for shapes, so zeros will do.
        batch = {}
        for name, batches in self._played.items():
            batch[name] = batches[self._given][self._rows]
        self._given += 1
        return batch

    def get_state(self):
        return {
            "games": (self._ball_row, self._ball_column, self._paddle),
            "random": self._random.bit_generator.state,
            "played": self._played,
            "given": self._given,
        }

    def set_state(self, state):
        self._ball_row, self._ball_column, self._paddle = state["games"]
        self._random.bit_generator.state = state["random"]
        # Copied, since the next `act` writes into the arrays.
        self._played = {
            name: np.array(array) for name, array in state["played"].items()
        }
        self._given = state["given"]
