"""The wing that ends steps whose loss jumps, as if it were not finite."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from xshard import config as config_lib
from xshard import errors, hooks, loop
from xshard import mesh as mesh_lib
from xshard.base import formatting
from xshard.run import nonfinite
from xshard.training import state as state_lib
from xshard.training import step as step_lib
from xshard.wings.loss_jumps import detector


class LossJumps(hooks.Wing):
    """Checks that the losses of a run do not jump.

    All processes check the same losses, so they all make the same decision.
    """

    name = "loss_jumps"

    def __init__(self, run: loop.Run):
        """Takes the run.

        Raises:
          UserError: if the run would not roll back.
        """
        options = run.config.roll_back
        policy = run.config.on_nonfinite
        # A jump of the loss only ever causes a roll-back.
        if options.loss_factor and policy != config_lib.ROLL_BACK:
            raise errors.UserError(
                f"roll_back.loss_factor={options.loss_factor} requires "
                f"on_nonfinite='roll_back', but on_nonfinite is {policy!r}: set "
                "on_nonfinite, or leave out roll_back.loss_factor."
            )
        self._mesh = run.mesh
        self._num_groups = mesh_lib.num_groups(run.mesh)
        self._names = list(state_lib.learners(run.target))
        self._jumps = detector.JumpDetector(options.loss_factor, options.loss_steps)

    def fetch(self, chunk: step_lib.Chunk) -> nonfinite.Observed | None:
        """Starts to copy the losses of steps to the host, if they are checked."""
        if not self._jumps.factor:
            return None
        return nonfinite.fetch(self._mesh, chunk, "loss")

    def read(
        self, step: int, place: Any, fetched: nonfinite.Observed, newest: Any
    ) -> None:
        """Checks the losses of a step.

        Raises:
          NonfiniteError: if one has jumped.
        """
        del newest
        losses = nonfinite.read(fetched, "loss", place, self._names, self._num_groups)
        medians = self._jumps.add(losses)
        descriptions = []
        for learner, group in np.argwhere(np.isfinite(medians)):
            loss = formatting.number(losses[learner, group])
            median = formatting.number(medians[learner, group])
            factor = formatting.number(self._jumps.factor)
            prefix = nonfinite.whose(self._names[learner], group, self._num_groups)
            descriptions.append(
                f"{prefix}the loss is {loss}, above {factor} times the earlier median, "
                f"{median}"
            )
        if descriptions:
            text = f"step {step}: {'; '.join(descriptions)}"
            raise nonfinite.NonfiniteError(text, step)

    def restored(self, saved: Mapping[str, Any]) -> None:
        """Continues with the losses that were saved."""
        self._jumps.set_state(saved.get("losses", []))

    def get_state(self) -> dict[str, Any]:
        """Returns the losses that later ones are compared with."""
        return {"losses": self._jumps.get_state()}
