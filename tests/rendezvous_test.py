"""How a process finds its place: by flags, or as JAX detects it. The meeting itself is in meeting_test.py."""

import pytest

from xshard.pod import places, rendezvous


@pytest.mark.parametrize(
    "said, message",
    [
        ((None, 2, 0), "--coordinator_address must be given too"),
        (("h:1", None, None), "--num_processes and --process_id must be given too"),
        (("h", 2, 0), "must be HOST:PORT"),
        (("h:99999", 2, 0), "must be HOST:PORT"),
        (("h:1", 2, 2), "--process_id=2 must be from 0 to 1"),
    ],
)
def test_flags_that_do_not_fit(said, message):
    with pytest.raises(places.StartError, match=message):
        rendezvous.place(*said)


def test_one_process_needs_no_place():
    assert rendezvous.place(None, None, None) is None
    assert rendezvous.place(None, 1, None) is None
    assert rendezvous.place("h:1", 1, 0) is None


def test_what_slurm_says_is_detected(monkeypatch):
    step = {"JOB_ID": 7, "STEP_NODELIST": "h[0-1]", "NTASKS": 2, "PROCID": 1, "LOCALID": 0}
    for name, value in step.items():
        monkeypatch.setenv(f"SLURM_{name}", str(value))
    assert rendezvous.place(None, None, None) == places.Place("h0:61447", 2, 1, [0])
    monkeypatch.setenv("SLURM_NTASKS", "1")
    assert rendezvous.place(None, None, None) is None
