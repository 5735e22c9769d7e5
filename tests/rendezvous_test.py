"""Tests of how a process gets its place: from flags, or as JAX detects it. meeting_test.py tests the meeting."""

import pytest

from xshard.pod import places, rendezvous


@pytest.mark.parametrize(
    "flags, message",
    [
        ((None, 2, 0), "--coordinator_address must be given too"),
        (("h:1", None, None), "--num_processes and --process_id must be given too"),
        (("h", 2, 0), "must be HOST:PORT"),
        (("h:99999", 2, 0), "must be HOST:PORT"),
        (("h:1", 2, 2), "--process_id=2 must be from 0 to 1"),
    ],
)
def test_flags_that_do_not_fit_are_refused(flags, message):
    with pytest.raises(places.StartError, match=message):
        rendezvous.place(*flags)


def test_a_single_process_has_no_place():
    assert rendezvous.place(None, None, None) is None
    assert rendezvous.place(None, 1, None) is None
    assert rendezvous.place("h:1", 1, 0) is None


def test_a_place_is_detected_under_slurm(monkeypatch):
    step = {"JOB_ID": 7, "STEP_NODELIST": "h[0-1]", "NTASKS": 2, "PROCID": 1, "LOCALID": 0}
    for name, value in step.items():
        monkeypatch.setenv(f"SLURM_{name}", str(value))
    assert rendezvous.place(None, None, None) == places.Place("h0:61447", 2, 1, [0])
    monkeypatch.setenv("SLURM_NTASKS", "1")
    assert rendezvous.place(None, None, None) is None
