"""Tests of how a process learns its place: from flags, or as JAX detects it."""

import pytest

from xshard.pod import rendezvous, startup


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
    with pytest.raises(rendezvous.StartError, match=message):
        startup.resolve_process(*flags)


def test_a_single_process_has_no_place():
    assert startup.resolve_process(None, None, None) is None
    assert startup.resolve_process(None, 1, None) is None
    assert startup.resolve_process("h:1", 1, 0) is None


def test_a_place_is_detected_under_slurm(monkeypatch):
    step = {
        "JOB_ID": 7,
        "STEP_NODELIST": "h[0-1]",
        "NTASKS": 2,
        "PROCID": 1,
        "LOCALID": 0,
    }
    for name, value in step.items():
        monkeypatch.setenv(f"SLURM_{name}", str(value))
    assert startup.resolve_process(None, None, None) == rendezvous.ProcessSpec(
        "h0:61447", 2, 1, [0]
    )
    # What is given is not detected.
    place = startup.resolve_process("h0:1234", None, None)
    assert place == rendezvous.ProcessSpec("h0:1234", 2, 1, [0])
    monkeypatch.setenv("JAX_COORDINATOR_PORT", "4321")
    assert startup.resolve_process(None, None, None).address == "h0:4321"
    monkeypatch.setenv("JAX_COORDINATOR_PORT", "abc")
    with pytest.raises(rendezvous.StartError, match="abc"):
        startup.resolve_process(None, None, None)
    monkeypatch.delenv("JAX_COORDINATOR_PORT")
    monkeypatch.setenv("SLURM_NTASKS", "1")
    assert startup.resolve_process(None, None, None) is None
