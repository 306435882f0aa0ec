"""The manifest of a Kubernetes job: its schema, and whether its numbers and words fit together."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch.distributed.launcher.api import LaunchConfig
from torch.distributed.run import get_args_parser

from solo_ext.config.check import check_run
from solo_ext.config.compose import compose
from solo_ext.lab.cli.main import build_parser

FILE = Path(__file__).resolve().parents[1] / "scripts" / "kubernetes" / "pretrain.yaml"
SERVICE, JOB = yaml.safe_load_all(FILE.read_text())
POD = JOB["spec"]["template"]["spec"]
(CONTAINER,) = POD["containers"]
ELASTIC = get_args_parser().parse_args([*CONTAINER["command"][1:], *CONTAINER["args"]])
GIVEN = build_parser().parse_args(CONTAINER["args"])


def check_schema(manifest: dict[str, Any]) -> None:
    """Refuses fields that Kubernetes does not have, too."""
    validator = pytest.importorskip(
        "kubernetes_validate", reason="no schema: pip install kubernetes-validate"
    )
    validator.validate(manifest, "1.34", strict=True)


def test_schema() -> None:
    check_schema(SERVICE)
    check_schema(JOB)


@pytest.mark.parametrize("wrong", [{"backofLimit": 1}, {"completions": "two"}])
def test_schema_refuses(wrong: dict[str, Any]) -> None:
    manifest = copy.deepcopy(JOB)
    manifest["spec"] |= wrong
    with pytest.raises(Exception, match=r"backofLimit|two"):
        check_schema(manifest)


def test_torchrun_and_the_run_are_told_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [ELASTIC.training_script, *ELASTIC.training_script_args] == [
        "solo-ext",
        *CONTAINER["args"],
    ]
    assert ELASTIC.no_python
    run = check_run(compose(GIVEN.config_name, overrides=GIVEN.overrides))
    nodes = JOB["spec"]["parallelism"]
    assert JOB["spec"]["completions"] == run.num_nodes == nodes
    assert ELASTIC.nnodes == str(nodes)
    gpus = CONTAINER["resources"]["limits"]["nvidia.com/gpu"]
    assert run.devices == gpus
    assert ELASTIC.nproc_per_node == str(gpus)
    given = {e["name"]: e["value"] for e in CONTAINER["env"]}
    wait = given["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]
    assert int(wait) < POD["terminationGracePeriodSeconds"]
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", wait)
    launch = LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=1)
    # An older torch has no such setting: there processes have 30 seconds.
    assert getattr(launch, "shutdown_timeout", int(wait)) == int(wait)


def test_pods_find_the_first_and_share_the_run_directory() -> None:
    name = JOB["metadata"]["name"]
    # A pod of an indexed job is called by job and index, within the service that it names.
    assert JOB["spec"]["completionMode"] == "Indexed"
    assert POD["subdomain"] == SERVICE["metadata"]["name"]
    assert SERVICE["spec"]["selector"] == {"batch.kubernetes.io/job-name": name}
    assert ELASTIC.rdzv_endpoint == f"{name}-0.{POD['subdomain']}:29500"
    mounts = {mount["mountPath"]: mount["name"] for mount in CONTAINER["volumeMounts"]}
    assert str(Path(GIVEN.run_dir).parent) in mounts
    assert set(mounts.values()) == {volume["name"] for volume in POD["volumes"]}
