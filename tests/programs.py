"""Programs that runs of one config share. To trace them anew would take most of the
time of a short run.
"""

import contextlib
import functools

import pytest

from xshard.training import fingerprint, step
from xshard.training import state as state_lib

# These functions depend on the experiment and the mesh, and on nothing else that
# differs between runs of one config.
_MAKERS = (
    (step, "make_watched_step"),
    (step, "make_predict"),
    (step, "make_eval_step"),
    (fingerprint, "program"),
    (state_lib, "abstract_state"),
)


@contextlib.contextmanager
def shared(besides=()):
    """Makes runs of one config share their programs, so that JAX traces, lowers and
    loads each program once.

    Args:
      besides: keys of the config in which the runs may differ because only their data
        depends on these keys.
    """
    with pytest.MonkeyPatch.context() as patch:
        for module, name in _MAKERS:
            patch.setattr(module, name, _once(getattr(module, name), besides))
        yield


def _once(make, besides):
    """Wraps a function so that it is called once for each config, mesh and set of
    options.
    """
    programs = {}

    @functools.wraps(make)
    def get(experiment, mesh, *args, **options):
        config = experiment.config.to_dict().items()
        config = repr([(name, value) for name, value in config if name not in besides])
        key = (type(experiment), config, mesh, *options.items())
        if key not in programs:
            programs[key] = make(experiment, mesh, *args, **options)
        return programs[key]

    return get
