"""`launch/jobset.yaml` against the fields of JobSet's API, and against the project's exit codes.

The model below describes the fields of jobset.x-k8s.io/v1alpha2 (JobSet 0.12) and Kubernetes that
the manifest uses. Any other field is an error.
"""

import copy
import re
import signal
from typing import Any

import pytest
import yaml

from tests.runs import ROOT
from train.lifecycle import exit_codes
from train.lifecycle.stop_signals import SIGNALS

MANIFEST = yaml.safe_load((ROOT / "launch" / "jobset.yaml").read_text(encoding="utf-8"))

# A model is a type, a pattern, a set of values, a list of one model, or a dict of models by field
# name, in which REQUIRED lists the fields that must be there. MAP stands for any field name.
REQUIRED = "(required)"
MAP = "(any name)"
NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")  # a DNS label
ENV = {
    "name": re.compile(r"[A-Za-z_][A-Za-z0-9_]*"),
    "value": str,
    "valueFrom": {
        "fieldRef": {"fieldPath": str, REQUIRED: ["fieldPath"]},
        "secretKeyRef": {"name": str, "key": str, REQUIRED: ["key"]},
    },
    REQUIRED: ["name"],
}
CONTAINER = {
    "name": NAME,
    "image": str,
    "command": [str],
    "args": [str],
    "env": [ENV],
    "resources": {"limits": {MAP: int}},
    "volumeMounts": [{"name": NAME, "mountPath": str, REQUIRED: ["name", "mountPath"]}],
    REQUIRED: ["name", "image"],
}
POD = {
    "restartPolicy": {"Never", "OnFailure"},
    "shareProcessNamespace": bool,
    "terminationGracePeriodSeconds": int,
    "securityContext": {"runAsNonRoot": bool, "runAsUser": int, "fsGroup": int},
    "containers": [CONTAINER],
    "volumes": [
        {
            "name": NAME,
            "persistentVolumeClaim": {"claimName": str, REQUIRED: ["claimName"]},
            "emptyDir": {"medium": {"", "Memory"}, "sizeLimit": re.compile(r"\d+(Mi|Gi)")},
            REQUIRED: ["name"],
        }
    ],
    REQUIRED: ["containers", "restartPolicy"],
}
POD_FAILURE_RULE = {
    "action": {"FailJob", "FailIndex", "Ignore", "Count"},
    "onExitCodes": {
        "containerName": NAME,
        "operator": {"In"},
        "values": [int],
        REQUIRED: ["operator", "values"],
    },
    "onPodConditions": [
        {"type": str, "status": {"True", "False", "Unknown"}, REQUIRED: ["type", "status"]}
    ],
    REQUIRED: ["action"],
}
JOB = {
    "parallelism": int,
    "completions": int,
    "completionMode": {"Indexed", "NonIndexed"},
    "backoffLimit": int,
    "podFailurePolicy": {"rules": [POD_FAILURE_RULE], REQUIRED: ["rules"]},
    "template": {"spec": POD, REQUIRED: ["spec"]},
    REQUIRED: ["template"],
}
FAILURE_RULE = {
    "name": re.compile(r"[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?"),
    "action": {"FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts"},
    "onJobFailureReasons": [
        {"BackoffLimitExceeded", "DeadlineExceeded", "FailedIndexes", "PodFailurePolicy"}
    ],
    "onJobFailureMessagePatterns": [str],
    REQUIRED: ["action", "name"],
}
JOB_SET = {
    "apiVersion": {"jobset.x-k8s.io/v1alpha2"},
    "kind": {"JobSet"},
    "metadata": {"name": NAME, REQUIRED: ["name"]},
    "spec": {
        "network": {"enableDNSHostnames": bool, "publishNotReadyAddresses": bool},
        "coordinator": {
            "replicatedJob": NAME,
            "jobIndex": int,
            "podIndex": int,
            REQUIRED: ["replicatedJob"],
        },
        "failurePolicy": {
            "maxRestarts": int,
            "restartStrategy": {"Recreate", "BlockingRecreate", "InPlaceRestart"},
            "rules": [FAILURE_RULE],
        },
        "replicatedJobs": [
            {
                "name": NAME,
                "replicas": int,
                "template": {"spec": JOB, REQUIRED: ["spec"]},
                REQUIRED: ["name", "template"],
            }
        ],
        REQUIRED: ["replicatedJobs"],
    },
    REQUIRED: ["apiVersion", "kind", "metadata", "spec"],
}


def violations(value: Any, model: Any, path: str = "") -> list[str]:
    """Return the differences from the model, with the path of each value."""
    match model:
        case dict():
            if not isinstance(value, dict):
                return [f"{path} is not an object"]
            lost = [
                f"{path} has no {name}" for name in model.get(REQUIRED, []) if name not in value
            ]
            for name, each in value.items():
                field = model.get(name, model.get(MAP))
                place = f"{path}.{name}"
                lost += violations(each, field, place) if field else [f"{place} is no field"]
            return lost
        case [each]:
            if not isinstance(value, list) or not value:
                return [f"{path} is not a list with elements"]
            numbered = enumerate(value)
            return [text for i, item in numbered for text in violations(item, each, f"{path}[{i}]")]
        case set():
            return [] if value in model else [f"{path}={value!r} is not one of {model}"]
        case re.Pattern():
            fits = isinstance(value, str) and model.fullmatch(value)
            return [] if fits else [f"{path}={value!r} does not match {model.pattern}"]
    return [] if type(value) is model else [f"{path}={value!r} is no {model.__name__}"]


def test_manifest_fits_the_api():
    assert violations(MANIFEST, JOB_SET) == []


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("spec", "coordinator", "podindex"), 0, ".spec.coordinator.podindex is no field"),
        (("spec", "failurePolicy", "maxRestarts"), "10", "maxRestarts='10' is no int"),
        (("spec", "failurePolicy", "rules", 0, "action"), "Restart", "'Restart' is not one of"),
        (("spec", "failurePolicy", "rules", 0), {"name": "a"}, "rules[0] has no action"),
        (("metadata", "name"), "Taibai_1", "'Taibai_1' does not match"),
    ],
)
def test_violations_are_found(path, value, message):
    manifest = copy.deepcopy(MANIFEST)
    place = manifest
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    (violation,) = violations(manifest, JOB_SET)
    assert message in violation


def _job() -> dict[str, Any]:
    (job,) = MANIFEST["spec"]["replicatedJobs"]
    return job["template"]["spec"]


def _container() -> dict[str, Any]:
    (container,) = _job()["template"]["spec"]["containers"]
    return container


def _action(code: int) -> str:
    """Return the action that JobSet's controller takes after a pod has ended with an exit code."""
    reason = "BackoffLimitExceeded"
    message = "Job has reached the specified backoff limit"
    for index, rule in enumerate(_job()["podFailurePolicy"]["rules"]):
        if code in rule.get("onExitCodes", {}).get("values", ()):
            reason = "PodFailurePolicy"
            message = (
                f"Container train for pod default/taibai-workers-0-0-x failed with exit code {code}"
                f" matching {rule['action']} rule at index {index}"
            )
            break
    for rule in MANIFEST["spec"]["failurePolicy"]["rules"]:
        patterns = rule.get("onJobFailureMessagePatterns", [""])
        matches = any(re.search(pattern, message) for pattern in patterns)
        if matches and reason in rule["onJobFailureReasons"]:
            return rule["action"]
    return "RestartJobSet"


def test_exit_codes_have_the_actions_of_the_other_launchers():
    final = {code for code in range(1, 256) if _action(code) == "FailJobSet"}
    assert final == {*exit_codes.FINAL} - {exit_codes.FINISHED}
    uncounted = {c for c in range(1, 256) if _action(c) == "RestartJobSetAndIgnoreMaxRestarts"}
    assert uncounted == {exit_codes.STOPPED, *(128 + name for name in SIGNALS)}
    assert _action(exit_codes.HUNG) == _action(128 + signal.SIGKILL) == "RestartJobSet"


def test_number_of_hosts_is_the_same_everywhere():
    env = {each["name"]: each.get("value") for each in _container()["env"]}
    counts = (_job()["parallelism"], _job()["completions"], int(env["TAIBAI_NUM_PROCESSES"]))
    assert len({*counts}) == 1


def test_names_refer_to_each_other():
    pod = _job()["template"]["spec"]
    mounts = {each["name"] for each in _container()["volumeMounts"]}
    assert mounts == {each["name"] for each in pod["volumes"]}
    assert MANIFEST["spec"]["coordinator"]["replicatedJob"] == "workers"
    assert _container()["name"] == "train"
    for rule in _job()["podFailurePolicy"]["rules"]:
        assert rule.get("onExitCodes", {"containerName": "train"})["containerName"] == "train"
    names = [each["name"] for each in _container()["env"]]
    # Kubernetes replaces $(NAME) only by variables that were defined before.
    assert names.index("COORDINATOR_HOST") < names.index("TAIBAI_COORDINATOR")
    dockerfile = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    assert f"USER {pod['securityContext']['runAsUser']}" in dockerfile.splitlines()
