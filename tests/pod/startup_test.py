"""Tests of how a process learns its place: from flags, or as JAX detects it."""

import socket

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


@pytest.fixture
def step(monkeypatch):
    """The environment of process 1 of 2 in a step of Slurm."""
    step = {
        "JOB_ID": 7,
        "STEP_NODELIST": "h[0-1]",
        "NTASKS": 2,
        "PROCID": 1,
        "LOCALID": 0,
    }
    for name, value in step.items():
        monkeypatch.setenv(f"SLURM_{name}", str(value))


def test_a_place_is_detected_under_slurm(monkeypatch, step):
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


def test_a_step_of_one_task_is_one_process_whatever_the_allocation(monkeypatch, step):
    """As in the shell of `salloc --ntasks=2`."""
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "1")
    monkeypatch.setenv("SLURM_PROCID", "0")
    assert startup.resolve_process(None, None, None) is None
    # By flags it is a part of a larger run.
    place = startup.resolve_process("h0:1234", 2, 1)
    assert place == rendezvous.ProcessSpec("h0:1234", 2, 1)
    monkeypatch.setenv("OMPI_MCA_orte_hnp_uri", "4096.0;tcp://10.0.0.1:1")
    for name, value in (("SIZE", "2"), ("RANK", "1"), ("LOCAL_RANK", "1")):
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", value)
    place = startup.resolve_process(None, None, None)
    assert (place.num_processes, place.process_id) == (2, 1)
    monkeypatch.delenv("OMPI_MCA_orte_hnp_uri")
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    assert startup.resolve_process(None, None, None).num_processes == 2


def test_a_name_that_does_not_resolve_gives_way_to_the_number_of_the_node(
    monkeypatch, step
):
    monkeypatch.setenv("SLURM_STEP_NODELIST", "no-such-host.invalid")
    for number, host in (("10.0.0.1", "10.0.0.1"), ("fd77::1", "[fd77::1]")):
        monkeypatch.setenv("SLURM_LAUNCH_NODE_IPADDR", number)
        place = startup.resolve_process(None, None, None)
        assert place.address == f"{host}:61447"
    # What is given, and what resolves, stays.
    place = startup.resolve_process("other.invalid:1", None, None)
    assert place.address == "other.invalid:1"
    monkeypatch.setenv("SLURM_STEP_NODELIST", "localhost")
    place = startup.resolve_process(None, None, None)
    assert place.address == "localhost:61447"


# What Slurm 22.05 sets for each of these options, on nodes of 8 GPUs.
@pytest.mark.parametrize(
    "hosts, local, visible, on_node, devices",
    [
        # --gpus-per-node=8: alone on a node, two or eight processes on it.
        (["h0", "h1"], 0, "0,1,2,3,4,5,6,7", 8, None),
        (["h0", "h0"], 0, "0,1,2,3,4,5,6,7", 8, [0, 1, 2, 3]),
        (["h0", "h0"], 1, "0,1,2,3,4,5,6,7", 8, [4, 5, 6, 7]),
        (["h0"] * 8, 5, "0,1,2,3,4,5,6,7", 8, [5]),
        # --gpus-per-task=1 or 4, with and without cgroups.
        (["h0", "h0"], 1, "1", 2, None),
        (["h0", "h0"], 1, "0", 2, None),
        (["h0", "h0"], 1, "4,5,6,7", 8, None),
        # --gpu-bind=none, or nodes without GPUs in Slurm's configuration.
        (["h0", "h0"], 1, None, 2, [1]),
        (["h0", "h0"], 1, None, None, [1]),
        (["h0", "h0"], 1, "0,1", None, [1]),
        # Fewer GPUs than processes, which JAX refuses.
        (["h0", "h0"], 1, "0", 1, [1]),
    ],
)
def test_each_process_uses_its_own_devices(
    monkeypatch, hosts, local, visible, on_node, devices
):
    variables = {"CUDA_VISIBLE_DEVICES": visible, "SLURM_GPUS_ON_NODE": on_node}
    for name, value in variables.items():
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, str(value))
    place = rendezvous.ProcessSpec("h0:1", len(hosts), local, [local])
    if hosts == ["h0", "h1"]:
        place = place._replace(process_id=1)
    chosen = startup._devices(place, hosts)
    assert (chosen and list(chosen)) == devices
    # Without a cluster, JAX uses all.
    assert startup._devices(place._replace(local_device_ids=None), hosts) is None


@pytest.mark.parametrize(
    "own, chosen",
    [
        (OSError, "127.0.0.1"),
        (["127.0.1.1"], "127.0.0.1"),
        (["127.0.1.1", "10.0.0.5"], None),
    ],
)
def test_collectives_of_cpus_listen_where_others_reach_them(monkeypatch, own, chosen):
    resolve = socket.getaddrinfo

    def stand_in(host, *arguments, **options):
        if host != socket.gethostname():
            return resolve(host, *arguments, **options)
        if own is OSError:
            raise socket.gaierror
        return [(socket.AF_INET, 0, 0, "", (ip, 0)) for ip in own]

    monkeypatch.setattr(startup.socket, "getaddrinfo", stand_in)
    addresses = []
    monkeypatch.setattr(startup.runtime, "listen_at", addresses.append)
    startup._choose_interface("127.0.0.1:1")
    assert addresses == [chosen] * (chosen is not None)
