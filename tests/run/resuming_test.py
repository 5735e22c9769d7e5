"""Tests of the point of a run that is saved, and from which the run resumes."""

import json

from xshard import checkpoint
from xshard.files import identity
from xshard.run import resuming

POINT = resuming.Point(
    state="the state",
    data=[{"step": 4, "iterator": None}],
    evaluated=False,
    watched={"stuck": [[1]], "losses": []},
    fingerprint={"params": "0" * 16},
    step_program=identity.LOOP,
    rows=7,
    folder="4-0",
)


def saved(metadata):
    """Returns a checkpoint with the state and the data of POINT."""
    return checkpoint.Restored(
        state=POINT.state,
        data=POINT.data,
        # As the checkpoint's description holds it.
        metadata=json.loads(json.dumps(metadata)),
        step=4,
        folder=POINT.folder,
    )


def test_a_point_is_restored_as_it_was_saved():
    metadata = {"config": {}, **POINT.metadata()}
    assert resuming.Point.restored(saved(metadata)) == POINT


def test_the_metadata_have_the_names_of_all_versions():
    names = ["evaluated", "watched", "fingerprint", "step_program", "rows"]
    assert list(POINT.metadata()) == names


def test_a_run_that_began_before_there_was_a_choice_has_the_plain_step():
    metadata = POINT.metadata()
    del metadata["step_program"]
    point = resuming.Point.restored(saved(metadata))
    assert point == POINT._replace(step_program=identity.STEP)
