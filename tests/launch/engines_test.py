"""Tests of the engines' plans: files against schemas, quoting against a shell, and
commands.

No cloud is used: `gcloud`, `srun` and `scontrol` are stand-ins that record their calls
and run what a host would.
"""

import dataclasses
import json
import os
import pathlib
import re
import subprocess
import sys

import jsonschema
import kubernetes_validate
import pytest
import yaml

from launch import __main__ as front
from launch import engine, gke, local, mpi, slurm, tpu_vm
from tests.launch import harness

stand_in, calls = harness.stand_in, harness.calls

# Without quoting, a shell, Slurm, Kubernetes or a format string would expand or execute
# parts of this text.
EVIL = "$$(A)$$$(B) $(touch evil);`touch evil` 'a\" \\ %j {x} $(HOME)\ttab"
DUMP = "import json, sys; json.dump(sys.argv[1:], open('arguments.json', 'w'))"


def job(tmp_path, *more, name="job", **fields):
    command = (
        "python",
        "-m",
        "xshard.main",
        f"--workdir={tmp_path}/run",
        f"--config.note={EVIL}",
        *more,
    )
    return engine.Job(name, command, **fields)


def test_a_plan_prints_its_files_and_commands_and_executes_them(tmp_path):
    file = tmp_path / "a" / "file"
    plan = engine.Plan(
        [["cp", str(file), str(tmp_path / "b c")], ["false"], ["touch", "d"]],
        {file: "text\n"},
    )
    assert str(plan) == f"# {file}\ntext\n\ncp {file} '{tmp_path}/b c'\nfalse\ntouch d"
    assert plan.run() == 1
    assert (tmp_path / "b c").read_text() == "text\n" and not (tmp_path / "d").exists()
    with pytest.raises(engine.LaunchError, match="no-such is not on PATH"):
        engine.Plan([["no-such"]]).run()


def test_a_plan_passes_a_token_to_its_commands_without_printing_it(tmp_path):
    secret, copies = tmp_path / "secret", [tmp_path / "1", tmp_path / "2"]
    secret.write_text("of somebody else's")
    secret.chmod(0o644)
    look = f'stat -c %a {secret}; cat {secret}; echo ":$XSHARD_LAUNCH_TOKEN"'
    commands = [["bash", "-c", f"({look}) > {copy}"] for copy in copies]
    plan = engine.Plan(commands, private={secret: f"<{engine.TOKEN}>"})
    assert f"<{engine.TOKEN}>" in str(plan)
    tokens = []
    for _ in range(2):
        # A plan with a private file does not replace this process, which has to delete
        # the file.
        assert plan.run(replace=True) == 0 and not secret.exists()
        mode, content = copies[0].read_text().split()
        assert copies[0].read_text() == copies[1].read_text()
        token = content.partition(":")[2]
        assert mode == "600" and content == f"<{token}>:{token}" and len(token) == 64
        tokens.append(token)
    assert tokens[0] != tokens[1]


def test_a_private_file_is_deleted_after_a_failure(tmp_path):
    secret = tmp_path / "secret"
    assert engine.Plan([["false"]], private={secret: engine.TOKEN}).run() == 1
    with pytest.raises(engine.LaunchError, match="no-such is not on PATH"):
        engine.Plan([["no-such"]], private={secret: engine.TOKEN}).run()
    assert not secret.exists()


@pytest.mark.parametrize(
    ("directory", "name"),
    [
        ("digits", "digits"),
        ("001", "run-001"),
        ("2024-run", "run-2024-run"),
        ("My_Run.3", "my-run-3"),
        ("--x--", "x"),
        ("x" * 33 + "-y", "x" * 33),
    ],
)
def test_a_valid_name_is_derived_from_any_work_directory(directory, name):
    assert engine.check_name(engine.derived_name(pathlib.Path(directory))) == name


def test_work_directories_without_usable_letters_get_distinct_names():
    names = {engine.derived_name(pathlib.Path(d)) for d in ("日本", "中国", "/", "..")}
    assert len(names) == 4 and all(name.startswith("run-") for name in names)
    assert {engine.check_name(name) for name in names} == names


@pytest.mark.parametrize(
    "flags",
    [
        ["--workdir=a"],
        ["--workdir", "a"],
        ["--workdir=b", "--workdir", "a", "--steps=3"],
    ],
)
def test_a_work_directory_is_given_in_one_word_or_two(flags):
    assert engine.Job("x", ("python", *flags)).workdir == pathlib.Path("a").absolute()


def test_a_job_without_a_work_directory_is_refused():
    with pytest.raises(engine.LaunchError, match="has no --workdir=DIR"):
        _ = engine.Job("x", ("python", "--workdir=")).workdir


# Slurm.


def script(plan):
    ((path, content),) = plan.files.items()
    assert plan.commands == [["sbatch", str(path)]]
    return content


def test_the_slurm_script_sets_its_options_and_runs_the_exact_command(tmp_path):
    (tmp_path / "run").mkdir()
    content = script(
        slurm.Slurm("1:00:00", ("--partition=tpu",), 90).launch(
            [job(tmp_path, processes=4)]
        )
    )
    options = re.findall("^#SBATCH (.*)$", content, re.MULTILINE)
    assert {
        "--requeue",
        "--job-name=job",
        "--ntasks=4",
        "--signal=TERM@90",
        "--time=1:00:00",
        "--partition=tpu",
        f"--output={tmp_path}/run/slurm-%j.log",
    } <= set(options)
    (tmp_path / "job.sh").write_text(content)
    keep = (
        f"open({str(tmp_path / 'tokens')!r}, 'a').write("
        "os.environ['XSHARD_LAUNCH_TOKEN'] + chr(10))"
    )
    path = stand_in(tmp_path, "srun", keep)
    for _ in range(2):
        ended = subprocess.run(
            ["bash", "-u", tmp_path / "job.sh"],
            env={**os.environ, "PATH": path},
            cwd=tmp_path,
        )
        assert ended.returncode == 0
    # Each start creates a new token, so the script cannot contain it.
    tokens = (tmp_path / "tokens").read_text().split()
    assert len(set(tokens)) == 2 and all(
        re.fullmatch("[0-9a-f]{64}", t) for t in tokens
    )
    call = calls(tmp_path)[0]
    at = call.index("--")
    assert call[at + 1 :] == list(job(tmp_path).command)
    assert f"--output={tmp_path}/run/launch.log" in call[:at]
    assert not list(pathlib.Path().glob("evil")) and not (tmp_path / "evil").exists()


@pytest.mark.parametrize(
    "code, stop, requeued",
    [(42, False, True), (143, False, True), (42, True, False), (1, False, False)],
)
def test_slurm_requeues_a_run_that_stopped_early(tmp_path, code, stop, requeued):
    (tmp_path / "run").mkdir()
    if stop:
        (tmp_path / "run" / "STOP").touch()
    (tmp_path / "job.sh").write_text(script(slurm.Slurm().launch([job(tmp_path)])))
    stand_in(tmp_path, "scontrol", "")
    path = stand_in(tmp_path, "srun", f"sys.exit({code})")
    env = {**os.environ, "PATH": path, "SLURM_JOB_ID": "7"}
    ended = subprocess.run(["bash", tmp_path / "job.sh"], env=env)
    assert ended.returncode == (0 if requeued else code)
    assert (["scontrol", "requeue", "7"] in calls(tmp_path)) == requeued


@pytest.mark.parametrize("reached, requeued", [("{}", False), ('{"step": 5}', True)])
def test_slurm_requeues_only_a_run_that_comes_further(tmp_path, reached, requeued):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "reached.json").write_text(reached)
    (tmp_path / "run" / "requeued").write_text("{}\n")
    assert end_of_slurm_job(tmp_path, "", "sys.exit(42)") == (0 if requeued else 42)
    log = tmp_path / "run" / "launch.log"
    assert (log.exists() and "no checkpoint is newer" in log.read_text()) != requeued


def test_a_requeue_that_fails_is_reported(tmp_path):
    assert end_of_slurm_job(tmp_path, "sys.exit(1)", "sys.exit(42)") == 42
    said = (tmp_path / "run" / "launch.log").read_text()
    assert "not requeued: 'scontrol requeue' failed. The state is saved" in said


@pytest.mark.parametrize(
    "reason, requeued", [("TimeLimit", True), ("None", False), ("", False)]
)
def test_a_run_that_saves_too_late_is_requeued_at_the_time_limit(
    tmp_path, reason, requeued
):
    # At the limit and at scancel, the script receives a signal while the run goes on.
    stand_in(tmp_path, "squeue", f"print({reason!r})")
    late = f"""
import signal
os.kill(os.getppid(), signal.SIGTERM)
while "squeue" not in open({str(tmp_path / "calls")!r}).read():
    pass
"""
    assert end_of_slurm_job(tmp_path, "", late) == (0 if requeued else 143)
    assert (["scontrol", "requeue", "7"] in calls(tmp_path)) == requeued


def test_a_slurm_step_asks_for_its_processors_and_variables(tmp_path):
    end_of_slurm_job(tmp_path, "", "sys.exit()", SLURM_CPUS_PER_TASK="6")
    (call,) = calls(tmp_path)
    assert call[1:3] == ["--export=ALL", "--cpus-per-task=6"]


def end_of_slurm_job(tmp_path, scontrol, srun, **variables):
    """Runs a job's script with stand-ins for Slurm; returns its exit code."""
    (tmp_path / "job.sh").write_text(script(slurm.Slurm().launch([job(tmp_path)])))
    stand_in(tmp_path, "scontrol", scontrol)
    path = stand_in(tmp_path, "srun", srun)
    env = {**os.environ, "PATH": path, "SLURM_JOB_ID": "7", **variables}
    return subprocess.run(["bash", tmp_path / "job.sh"], env=env).returncode


@pytest.mark.parametrize(
    "time, seconds",
    [("2", 120), ("1:30", 90), ("1:00:30", 3630), ("1-2", 93600), ("1-2:03:04", 93784)],
)
def test_a_grace_within_a_minute_of_the_time_limit_is_refused(tmp_path, time, seconds):
    with pytest.raises(engine.LaunchError, match=f"--slurm_time={time} leaves no time"):
        slurm.Slurm(time, grace_seconds=seconds - 60).launch([job(tmp_path)])
    slurm.Slurm(time, grace_seconds=seconds - 61).launch([job(tmp_path)])
    for unlimited in ("0", "UNLIMITED"):
        slurm.Slurm(unlimited, grace_seconds=seconds).launch([job(tmp_path)])


def test_a_slurm_array_has_a_command_for_each_task(tmp_path):
    jobs = [
        engine.Job(
            f"job-00{i}",
            ("python", f"--workdir={tmp_path}/run/00{i}", f"--config.note={EVIL}{i}"),
        )
        for i in range(3)
    ]
    content = script(slurm.Slurm(parallel=2).launch(jobs))
    assert "#SBATCH --array=0-2%2\n" in content and "--job-name=job\n" in content
    (tmp_path / "job.sh").write_text(content)
    env = {
        **os.environ,
        "PATH": stand_in(tmp_path, "srun", ""),
        "SLURM_ARRAY_TASK_ID": "1",
    }
    assert subprocess.run(["bash", tmp_path / "job.sh"], env=env).returncode == 0
    assert calls(tmp_path)[0][-3:] == list(jobs[1].command)


@pytest.mark.parametrize(
    "option", ["--comment=a b", "--x='y'", "partition", "--a=b\n#SBATCH --c"]
)
def test_slurm_refuses_malformed_options(tmp_path, option):
    with pytest.raises(engine.LaunchError, match="cannot be an option of sbatch"):
        slurm.Slurm(sbatch=(option,)).launch([job(tmp_path)])


# MPI.


def test_mpirun_receives_the_exact_command(tmp_path):
    plan = mpi.Mpi(("--hostfile 'my hosts'", "--oversubscribe")).launch(
        [job(tmp_path, processes=4, cpu_devices=2)]
    )
    (command,) = plan.commands
    assert command[:6] == [
        "mpirun",
        "-n",
        "4",
        "--hostfile",
        "my hosts",
        "--oversubscribe",
    ]
    assert command[6:8] == ["-x", "XSHARD_LAUNCH_TOKEN"]
    assert command[8:] == [*job(tmp_path).command, "--cpu_devices=2"]


# TPU VM.


def test_tpu_vm_starts_shows_and_stops_a_job(tmp_path, monkeypatch):
    host = tmp_path / "host"
    (host / "my code").mkdir(parents=True)
    run = (
        "if 'scp' in sys.argv:\n"
        "    subprocess.run(['cp', sys.argv[5], os.path.expanduser('~')], check=True)\n"
        "for a in sys.argv:\n"
        "    if a.startswith('--command='):\n"
        "        os.environ.pop('XSHARD_LAUNCH_TOKEN', None)\n"
        "        subprocess.run(['bash', '-c', a.partition('=')[2]], check=True)"
    )
    monkeypatch.setenv("PATH", stand_in(tmp_path, "gcloud", run))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    monkeypatch.chdir(host)
    tpu_engine = tpu_vm.TpuVm("pod", "my code", "us-x", None)
    show = "import os; open('token', 'w').write(os.environ['XSHARD_LAUNCH_TOKEN'])"
    program = (sys.executable, "-c", f"{show}; {DUMP}; import time; time.sleep(600)")
    started = engine.Job("job", (*program, EVIL, "--workdir=x"))
    assert tpu_engine.launch([started]).run() == 0
    log = host / "my code" / "job.log"
    harness.wait_until((host / "my code" / "arguments.json").exists)
    harness.wait_until((host / "my code" / "arguments.json").read_text)
    assert json.loads((host / "my code" / "arguments.json").read_text()) == [
        EVIL,
        "--workdir=x",
    ]
    assert log.exists() and not list(host.rglob("evil"))
    token = (host / "my code" / "token").read_text()
    assert len(token) == 64 and token not in (tmp_path / "calls").read_text()
    assert not list(host.glob("*.token")) and not list((tmp_path / "home").iterdir())
    # A job that is running on the chips is not started a second time.
    assert tpu_engine.launch([started]).run() != 0
    pid = int((host / "my code" / "job.pid").read_text())
    assert tpu_engine.kill("job").run() == 0
    harness.wait_until(lambda: harness.process_state(pid) == "Z")
    send, start, *_ = calls(tmp_path)
    assert send[4:] == [
        "scp",
        "job.token",
        "pod:job.token",
        "--worker=all",
        "--zone=us-x",
    ]
    assert start[:9] == [
        "gcloud",
        "compute",
        "tpus",
        "tpu-vm",
        "ssh",
        "pod",
        "--worker=all",
        "--zone=us-x",
        start[8],
    ]
    assert tpu_engine.running().commands == [
        ["gcloud", "compute", "tpus", "tpu-vm", "list", "--zone=us-x"]
    ]
    assert tpu_engine.logs("job").commands[0][6] == "--worker=0"
    assert "tail -n 100 -f 'my code'/job.log" in tpu_engine.logs("job").commands[0][-1]


@pytest.mark.parametrize(
    "fields, settings, message",
    [
        ({"processes": 2}, {"tpu": "x"}, "one process per host"),
        ({}, {"tpu": None}, "needs --tpu=NAME"),
        ({}, {"tpu": "--evil"}, "needs --tpu=NAME"),
    ],
)
def test_tpu_vm_refuses_wrong_options(tmp_path, fields, settings, message):
    with pytest.raises(engine.LaunchError, match=message):
        tpu_vm.TpuVm(**settings).launch([job(tmp_path, **fields)])


# GKE.


def job_set(tmp_path, **fields):
    """Returns the JobSet manifest of a plan, after checks of the plan's commands and
    its Secret.
    """
    plan = gke.Gke(**{"tpu": "v5e:4x4", "image": "registry/xshard:1", **fields}).launch(
        [job(tmp_path)]
    )
    ((path, content),) = plan.files.items()
    ((secret_path, secret),) = plan.private.items()
    assert plan.commands[0][-3:] == ["apply", "-f", str(secret_path)]
    assert plan.commands[1][-3:] == ["create", "-f", str(path)]
    kubernetes_validate.validate(yaml.safe_load(secret), "1.31", strict=True)
    manifest = yaml.safe_load(content)
    assert engine.TOKEN in secret and engine.TOKEN not in content
    (container,) = manifest["spec"]["replicatedJobs"][0]["template"]["spec"][
        "template"
    ]["spec"]["containers"]
    source = container["env"][-1]["valueFrom"]["secretKeyRef"]
    assert yaml.safe_load(secret)["metadata"]["name"] == source["name"]
    assert source["key"] in yaml.safe_load(secret)["stringData"]
    return manifest


def forbid_others(schema):
    """Returns the schema, with all properties forbidden that it does not name."""
    if isinstance(schema, dict):
        closed = {key: forbid_others(value) for key, value in schema.items()}
        if "properties" in schema and "additionalProperties" not in schema:
            closed["additionalProperties"] = False
        return closed
    return (
        [forbid_others(item) for item in schema] if isinstance(schema, list) else schema
    )


@pytest.mark.parametrize(
    "fields", [{}, {"slices": 4, "tpu": "v5p:8x8x16"}, {"tpu": "v6e:2x2"}]
)
def test_the_job_set_passes_strict_validation(tmp_path, fields):
    manifest = job_set(tmp_path, **fields)
    path = pathlib.Path(__file__).parent / "jobset_schema.json"
    schema = forbid_others(json.loads(path.read_text()))
    # The schema must accept any Job and metadata. The Job is validated below, and
    # Kubernetes defines the metadata.
    schema["properties"]["metadata"] = {"type": "object"}
    template = schema["properties"]["spec"]["properties"]["replicatedJobs"]["items"][
        "properties"
    ]["template"]
    template["properties"]["spec"] = {"type": "object"}
    jsonschema.validate(manifest, schema)
    (replicated,) = manifest["spec"]["replicatedJobs"]
    whole = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": "job"},
        **replicated["template"],
    }
    kubernetes_validate.validate(whole, "1.31", strict=True)
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "pod"},
        "spec": whole["spec"]["template"]["spec"],
    }
    kubernetes_validate.validate(pod, "1.31", strict=True)
    assert replicated["replicas"] == fields.get("slices", 1)


def test_the_validation_refuses_an_unknown_field(tmp_path):
    manifest = job_set(tmp_path)
    manifest["spec"]["failurePolicy"]["maxRestart"] = 1
    schema = forbid_others(
        json.loads((pathlib.Path(__file__).parent / "jobset_schema.json").read_text())
    )
    with pytest.raises(jsonschema.ValidationError, match="maxRestart"):
        jsonschema.validate(
            manifest["spec"]["failurePolicy"],
            schema["properties"]["spec"]["properties"]["failurePolicy"],
        )


@pytest.mark.parametrize(
    "tpu, hosts, chips",
    [("v5e:1x1", 1, 1), ("v5e:4x4", 4, 4), ("v5p:8x8x16", 256, 4), ("v4:2x2x1", 1, 4)],
)
def test_gke_counts_hosts_and_chips(tmp_path, tpu, hosts, chips):
    spec = job_set(tmp_path, tpu=tpu)["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert (spec["parallelism"], spec["completions"]) == (hosts, hosts)
    (container,) = spec["template"]["spec"]["containers"]
    assert container["resources"]["limits"] == {"google.com/tpu": chips}


@pytest.mark.parametrize(
    ("code", "action"),
    [(42, "RestartJobSetAndIgnoreMaxRestarts"), (3, "FailJobSet"), (4, None)],
)
def test_gke_does_not_count_restarts_after_42_and_never_restarts_after_3(
    tmp_path, code, action
):
    spec = job_set(tmp_path, max_failures=5)["spec"]
    assert spec["failurePolicy"]["maxRestarts"] == 4
    (pod_rule,) = spec["replicatedJobs"][0]["template"]["spec"]["podFailurePolicy"][
        "rules"
    ]
    assert pod_rule["action"] == "FailJob"
    assert (code in pod_rule["onExitCodes"]["values"]) == (action is not None)
    # The message in the Job's condition, as Kubernetes' job controller writes it.
    message = (
        "Container xshard for pod default/job-slice-0-0-abcde failed with exit code "
        f"{code} matching FailJob rule at index 0"
    )
    rules = spec["failurePolicy"]["rules"]
    assert all(rule["onJobFailureReasons"] == ["PodFailurePolicy"] for rule in rules)
    matching = [
        rule["action"]
        for rule in rules
        if any(
            re.search(pattern, message)
            for pattern in rule["onJobFailureMessagePatterns"]
        )
    ]
    assert matching == ([action] if action else [])


def test_gke_does_not_expand_arguments(tmp_path):
    (container,) = job_set(tmp_path)["spec"]["replicatedJobs"][0]["template"]["spec"][
        "template"
    ]["spec"]["containers"]
    # The kubelet replaces $$ with $. No other $ is left for it to expand.
    assert [a.replace("$$", "$") for a in container["command"]] == list(
        job(tmp_path).command
    )
    assert "$" not in "".join(container["command"]).replace("$$", "")


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"tpu": "v9:4x4"}, "the types: v4, v5e"),
        ({"tpu": "v5e:4xx"}, "must be type:topology"),
        ({"tpu": None}, "must be type:topology"),
        ({"image": None}, "needs --image"),
        ({"tpu": "v5e:3x3"}, "9 chips"),
    ],
)
def test_gke_refuses_wrong_options(tmp_path, settings, message):
    with pytest.raises(engine.LaunchError, match=message):
        job_set(tmp_path, **settings)


# The command line.


@pytest.mark.parametrize(
    "name, options",
    [
        ("slurm", ["--sbatch=--partition=p"]),
        ("mpi", []),
        ("tpu_vm", ["--tpu=pod", "--project=secret-project", "--zone=secret-zone"]),
        ("gke", ["--tpu=v5e:4x4", "--image=i"]),
        ("local", []),
    ],
)
def test_a_dry_run_changes_nothing_and_prints_no_secret(tmp_path, name, options):
    arguments = [f"--engine={name}", "--dry_run", *options]
    command = [
        "python",
        "-m",
        "xshard.main",
        f"--workdir={tmp_path}/run",
        "--config=configs/digits.py",
    ]
    code, output = harness.finish(
        harness.launch(*arguments, command=command, cwd=harness.ROOT)
    )
    assert code == 0 and "--config=configs/digits.py" in output, output
    assert list(tmp_path.iterdir()) == []
    if name != "tpu_vm":
        assert "secret-" not in output
    assert not re.search("[0-9a-f]{32}", output)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--engine=nowhere"], "--engine"),
        (["--no_such_flag"], "no_such_flag"),
        ([], "nothing to start"),
        (["frobnicate"], "use 'status DIR'"),
        (["logs"], "use 'status DIR'"),
        (["kill", "x;y", "--engine=slurm"], "lower case letters"),
        (["list"], "there is no 'list' for this engine"),
        (["status", "no/such/dir"], "is not the work directory of a run"),
        (["status"], "give one work directory"),
        (["status", "a", "b", "c"], "give one work directory, or two"),
        (["status", "no/such/dir", "other"], "no/such/dir holds no config.json"),
        (["--", "true"], "has no --workdir=DIR"),
        (["status", "--", "true"], "the command begins after"),
        (["--name=001", "--", "true", "--workdir=x"], "--name=001 must be"),
        (["--name=", "--", "true", "--workdir=x"], "--name= must be"),
        (["--name=Bad_Name", "--", "true", "--workdir=x"], "--name=Bad_Name must be"),
        (
            [
                "--engine=mpi",
                "--sweep=configs/digits_sweep.py",
                "--",
                "true",
                "--workdir={tmp}",
            ],
            "not with mpi",
        ),
        (["--elastic=2", "--", "true", "--workdir=x"], "--elastic=2 must be MIN:MAX"),
        (["--elastic=", "--", "true", "--workdir=x"], "--elastic= must be MIN:MAX"),
        (
            ["--elastic=1:2", "--num_processes=1", "--", "true", "--workdir=x"],
            "both say how many processes",
        ),
        (
            ["--elastic=1:2", "--engine=tpu_vm", "--", "true", "--workdir=x"],
            "not for tpu_vm: a TPU",
        ),
        (
            ["--elastic=1:2", "--engine=gke", "--", "true", "--workdir=x"],
            "not for gke: a TPU slice",
        ),
        (
            ["--elastic=1:2", "--engine=mpi", "--", "true", "--workdir=x"],
            "not for mpi: mpirun",
        ),
        (["--sweep=none.py", "--", "true", "--workdir=x"], "there is no such file"),
        (
            ["--engine=slurm", "--tpu=pod", "--", "true", "--workdir=x"],
            "--tpu is for --engine=tpu_vm and gke, not for slurm: leave it out",
        ),
        (["list", "--slurm_time=1"], "--slurm_time is for --engine=slurm, not for"),
    ],
)
def test_wrong_arguments_are_refused(tmp_path, capsys, monkeypatch, arguments, message):
    monkeypatch.setattr(
        sys, "argv", ["launch", *(a.replace("{tmp}", str(tmp_path)) for a in arguments)]
    )
    assert front.run() == 1
    assert message in capsys.readouterr().err


def test_help_lists_the_flags(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["launch", "--help"])
    assert front.run() == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "--engine" in shown
    for kind in (local.Local, slurm.Slurm, mpi.Mpi, tpu_vm.TpuVm, gke.Gke):
        for field in dataclasses.fields(kind):
            assert f"--{field.name}:" in shown
            assert field.metadata["help"] in shown, field.name


def test_engines_agree_on_the_default_of_a_flag_that_several_read():
    defaults = {}
    for kind in (local.Local, slurm.Slurm, mpi.Mpi, tpu_vm.TpuVm, gke.Gke):
        for field in dataclasses.fields(kind):
            defaults.setdefault(field.name, set()).add(field.default)
    assert {name for name, values in defaults.items() if len(values) > 1} == set()
    assert len(defaults["grace_seconds"]) == 1


@pytest.mark.parametrize(
    "arguments, made",
    [
        ([], local.Local()),
        (["--grace_seconds=7", "--parallel=2"], local.Local(3, 7, 2)),
        (
            ["--engine=slurm", "--sbatch=--a=b", "--sbatch=--c", "--slurm_time=9"],
            slurm.Slurm("9", ("--a=b", "--c"), 120, 1),
        ),
        (["--engine=mpi", "--mpirun=--x y"], mpi.Mpi(("--x y",))),
        (["--engine=tpu_vm", "--tpu=pod", "--zone=z"], tpu_vm.TpuVm("pod", zone="z")),
        (["--engine=gke", "--slices=2"], gke.Gke(slices=2)),
    ],
)
def test_an_engine_has_the_options_that_its_flags_give(arguments, made):
    values = front.make_flags()
    values(["launch", *arguments])
    assert front.make_engine(values) == made
