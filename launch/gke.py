"""Launches on Google Kubernetes Engine: a JobSet of TPU slices, created by kubectl; JAX
detects the pod.
"""

import dataclasses
import math
import pathlib
from collections.abc import Sequence
from typing import Any, ClassVar

import yaml

from launch import engine
from xshard.pod import exit_codes, rendezvous

_TOKEN_KEY = "token"

# https://cloud.google.com/kubernetes-engine/docs/concepts/tpus: the node selector of
# each type of multi-host slice, and the chips of one host.
_TYPES = {
    "v4": ("tpu-v4-podslice", 4),
    "v5e": ("tpu-v5-lite-podslice", 4),
    "v5p": ("tpu-v5p-slice", 4),
    "v6e": ("tpu-v6e-slice", 4),
}

# The actions of a JobSet at exit codes that do not count as failures. A job that
# stopped early with its state saved is started again. One that was not finite is not,
# because it would not be finite again.
_RULES = (
    ("preempted", exit_codes.PREEMPTED, "RestartJobSetAndIgnoreMaxRestarts"),
    ("nonfinite", exit_codes.NONFINITE, "FailJobSet"),
)


@dataclasses.dataclass(frozen=True)
class Gke(engine.Engine):
    """The GKE engine. The cluster and the credentials come from kubectl's
    configuration.
    """

    name: ClassVar[str] = "gke"
    why_not_elastic: ClassVar[str] = engine.A_SLICE_IS_WHOLE

    tpu: str | None = engine.option(
        None, "the type and topology of a slice, as v5e:4x4"
    )
    image: str | None = engine.option(
        None, "the container image, with the code in its working directory"
    )
    slices: int = engine.option(1, "the number of slices")
    max_failures: int = engine.option(
        3, "the number of failures after which the job is not started again"
    )
    grace_seconds: int = engine.option(
        120, "how long the processes may take to save when a node is drained"
    )
    namespace: str | None = engine.option(
        None, "the namespace; by default kubectl's own"
    )

    def launch(self, jobs: Sequence[engine.Job]) -> engine.Plan:
        """Returns the plan that writes the JobSet and creates it with kubectl."""
        job = self.only_job(jobs)
        if job.processes != 1 or job.cpu_devices:
            raise engine.LaunchError(
                "--num_processes and --cpu_devices are not for gke: --tpu determines "
                "the number of hosts."
            )
        # In the current directory, because the work directory is on the cluster's
        # storage.
        path = pathlib.Path(f"{job.name}.jobset.yaml")
        content = yaml.safe_dump(self.job_set(job), sort_keys=False)
        private = pathlib.Path(f"{job.name}.token.yaml")
        commands = [
            # "apply" instead of "create", because an earlier job of this name may have
            # left its secret.
            [*self._kubectl(), "apply", "-f", str(private)],
            [*self._kubectl(), "create", "-f", str(path)],
        ]
        secret = yaml.safe_dump(_secret(job), sort_keys=False)
        return engine.Plan(commands, files={path: content}, private={private: secret})

    def running(self) -> engine.Plan:
        """Returns the plan that lists the JobSets."""
        return engine.Plan([[*self._kubectl(), "get", "jobsets"]])

    def logs(self, name: str) -> engine.Plan:
        """Returns the plan that shows the output of process 0, which reports for all
        processes.
        """
        chosen = (
            f"jobset.sigs.k8s.io/jobset-name={name},jobset.sigs.k8s.io/job-index=0,"
            "batch.kubernetes.io/job-completion-index=0"
        )
        return engine.Plan([[*self._kubectl(), "logs", "-f", f"--selector={chosen}"]])

    def kill(self, name: str) -> engine.Plan:
        """Returns the plan that deletes the JobSet; its pods get SIGTERM, and save
        within their grace period.
        """
        job = [*self._kubectl(), "delete", "jobset", name]
        secret = [
            *self._kubectl(),
            "delete",
            "secret",
            _secret_name(name),
            "--ignore-not-found",
        ]
        return engine.Plan([job, secret])

    def job_set(self, job: engine.Job) -> dict[str, Any]:
        """Returns the manifest of the JobSet, a jobset.x-k8s.io/v1alpha2."""
        hosts, selector, chips = self._slice()
        codes = sorted(code for _, code, _ in _RULES)
        on_exit_codes = {"operator": "In", "values": codes}
        rules = [{"action": "FailJob", "onExitCodes": on_exit_codes}]
        job_set_rules = []
        for name, code, action in _RULES:
            # The message of Kubernetes: "... failed with exit code 42 matching FailJob
            # rule ...".
            pattern = f"exit code {code} matching"
            job_set_rules.append(
                {
                    "name": name,
                    "action": action,
                    "onJobFailureReasons": ["PodFailurePolicy"],
                    "onJobFailureMessagePatterns": [pattern],
                }
            )
        # A slice is a node pool, and each job needs one of its own.
        exclusive = {
            "alpha.jobset.sigs.k8s.io/exclusive-topology": (
                "cloud.google.com/gke-nodepool"
            )
        }
        template = {
            "parallelism": hosts,
            "completions": hosts,
            "completionMode": "Indexed",
            # No retry of a single pod: a failed pod ends all others, and the JobSet
            # starts the whole job again.
            "backoffLimit": 0,
            "podFailurePolicy": {"rules": rules},
            "template": {"spec": self._pod(job, selector, chips)},
        }
        return {
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "metadata": {"name": job.name, "annotations": exclusive},
            "spec": {
                "failurePolicy": {
                    "maxRestarts": self.max_failures - 1,
                    "rules": job_set_rules,
                },
                "replicatedJobs": [
                    {
                        "name": "slice",
                        "replicas": self.slices,
                        "template": {"spec": template},
                    }
                ],
            },
        }

    def _pod(
        self, job: engine.Job, selector: dict[str, str], chips: int
    ) -> dict[str, Any]:
        # Kubernetes expands $(NAME) in arguments, and turns $$ into $. Values of a
        # config stay literal.
        command = [argument.replace("$", "$$") for argument in job.arguments]
        container = {
            "name": "xshard",
            "image": self.image,
            "command": command,
            "env": [{"name": "PYTHONUNBUFFERED", "value": "1"}, _token(job)],
            "ports": [{"containerPort": 8471}, {"containerPort": 8080}],
            "resources": {"limits": {"google.com/tpu": chips}},
        }
        return {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": self.grace_seconds,
            "nodeSelector": selector,
            "containers": [container],
        }

    def _slice(self) -> tuple[int, dict[str, str], int]:
        """Returns the number of hosts of a slice, the node selector, and the number of
        chips of a host.
        """
        kind, _, topology = (self.tpu or "").partition(":")
        sizes = topology.split("x")
        are_numbers = all(size.isdecimal() and int(size) for size in sizes)
        if kind not in _TYPES or not are_numbers:
            raise engine.LaunchError(
                f"--tpu={self.tpu} must be type:topology, such as v5e:4x4; the types: "
                f"{', '.join(_TYPES)}."
            )
        if not self.image:
            raise engine.LaunchError(
                "--engine=gke needs --image=IMAGE, with the code in it."
            )
        accelerator, host_chips = _TYPES[kind]
        chips = math.prod(map(int, sizes))
        if chips > host_chips and chips % host_chips:
            raise engine.LaunchError(
                f"--tpu={self.tpu} has {chips} chips, which must be a multiple of the "
                f"{host_chips} chips of a host."
            )
        selector = {
            "cloud.google.com/gke-tpu-accelerator": accelerator,
            "cloud.google.com/gke-tpu-topology": topology,
        }
        return max(chips // host_chips, 1), selector, min(chips, host_chips)

    def _kubectl(self) -> list[str]:
        if self.namespace:
            return ["kubectl", f"--namespace={self.namespace}"]
        return ["kubectl"]


def _secret_name(name: str) -> str:
    return f"{name}-launch"


def _secret(job: engine.Job) -> dict[str, Any]:
    """Returns the secret with the launch's token, because more people may read a
    manifest than a secret.
    """
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": _secret_name(job.name)},
        "stringData": {_TOKEN_KEY: engine.TOKEN},
    }


def _token(job: engine.Job) -> dict[str, Any]:
    # Optional, because the processes also recognize one another if the secret is
    # deleted and all have an empty token.
    source = {"name": _secret_name(job.name), "key": _TOKEN_KEY, "optional": True}
    return {"name": rendezvous.TOKEN_VARIABLE, "valueFrom": {"secretKeyRef": source}}
