"""Tests of the detection of losses that jump."""

import json

import numpy as np

from xshard.wings.loss_jumps import detector


def test_jumps_are_detected_for_each_learner_and_group():
    watching = detector.JumpDetector(2.0, 3)
    losses = [
        [1.0, -1.0],
        [3.0, -1.0],
        [2.0, -1.0],
        [np.nan, 9.0],
        [4.0, 9.0],
        [6.1, 9.0],
    ]
    seen = [watching.add(np.array([row])) for row in losses]
    # A negative median detects no jump, and a step that is not finite does not enter
    # the median.
    assert [np.isfinite(x).any() for x in seen] == [False] * 5 + [True]
    assert seen[-1].tolist()[0][0] == 3.0 and np.isnan(seen[-1][0, 1])
    other = detector.JumpDetector(2.0, 3)
    other.set_state(json.loads(json.dumps(watching.get_state())))
    np.testing.assert_array_equal(
        other.add(np.array([[9.0, 9.0]])), watching.add(np.array([[9.0, 9.0]]))
    )
