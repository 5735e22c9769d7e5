"""The wing that logs how near a run comes to the peak of its devices."""

import functools

import jmp

from xshard import hooks, loop
from xshard.wings.utilisation import model_flops


class Utilisation(hooks.Wing):
    """Logs the model FLOPs per second, and their fraction of the peak."""

    name = "utilisation"

    def __init__(self, run: loop.Run):
        """Takes the run."""
        batches = run.batches
        # FLOPs are counted with the first row. By then the devices are busy, so the
        # trace delays nothing.
        self._flops = functools.cache(
            lambda: model_flops.if_known(
                run.experiment, run.mesh, batches.shapes(), run.terminal.say
            )
        )
        compute_dtype = jmp.get_policy(run.config.precision).compute_dtype
        self._peak = model_flops.peak(run.mesh, compute_dtype)

    def speed(self, step: int, steps_per_second: float) -> dict[str, float]:
        """Returns the FLOPs per second, and their fraction of the peak if it is known.

        Neither, if the FLOPs cannot be counted.
        """
        flops = self._flops()
        if flops is None:
            return {}
        rates = {"flops_per_second": steps_per_second * flops}
        if self._peak is not None:
            rates["utilisation"] = rates["flops_per_second"] / self._peak
        return rates
