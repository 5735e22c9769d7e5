"""Programs that runs of one config share, which each of them would trace anew: most of the time of a short run."""

import contextlib
import functools

import pytest

from xshard import state as state_lib
from xshard import step
from xshard.stored import fingerprint

# Functions of an experiment and a mesh, and of nothing else that differs between runs of one config.
_MAKERS = (
    (step, "make_watched_step"),
    (step, "make_predict"),
    (step, "make_eval_step"),
    (fingerprint, "program"),
    (state_lib, "abstract_state"),
)


@contextlib.contextmanager
def shared(besides=()):
    """Has runs of one config share their programs, which JAX then traces, lowers and loads once.

    Args:
      besides: keys of the config in which such runs may differ: those that only their data depend on.
    """
    with pytest.MonkeyPatch.context() as patch:
        for module, name in _MAKERS:
            patch.setattr(module, name, _once(getattr(module, name), besides))
        yield


def _once(make, besides):
    """The function, called once for each config, mesh and options."""
    made = {}

    @functools.wraps(make)
    def get(experiment, mesh, *args, **options):
        config = experiment.config.to_dict().items()
        config = repr([(name, value) for name, value in config if name not in besides])
        key = (type(experiment), config, mesh, *options.items())
        if key not in made:
            made[key] = make(experiment, mesh, *args, **options)
        return made[key]

    return get
