"""The example of a third party's package, installed and trained."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import forks

SOURCE = Path(__file__).parents[1] / "docs" / "example_package"
UV = os.environ.get("UV") or shutil.which("uv")
pytestmark = pytest.mark.skipif(UV is None, reason="uv, which installs the package, is not there")
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Runs Python in an environment that the package is installed in."""
    assert UV is not None
    folder = tmp_path_factory.mktemp("installed")
    shutil.copytree(SOURCE, folder / "source")
    command = ["pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--offline"]
    target = folder / "site"
    subprocess.run(
        [UV, *command, "--python", sys.executable, "--target", target, folder / "source"],
        check=True,
    )
    return partial(forks.run, cwd=folder, env={**os.environ, "COLUMNS": "80"}, path=[target])


LISTED = """
from solo_ext.lab.cli.main import main
main(["methods"])
main(["losses"])
import solo_ext
solo_ext.register()
import solo.losses, solo.methods
from solo_ext.losses import LOSSES
from solo_ext.methods import METHODS
print(METHODS["align_uniform"].origin, LOSSES["align_uniform_loss_func"].origin)
print(solo.methods.METHODS["align_uniform"].__module__)
print(solo.losses.align_uniform_loss_func.__module__)
print(solo.losses.__all__.count("align_uniform_loss_func"))
"""


@pytest.mark.slow
def test_their_names_are_listed_whole_and_in_solo_learn(run: Run) -> None:
    *printed, origins, method, loss, exported = run("-c", LISTED).stdout.splitlines()
    assert "align_uniform_loss_func" in "".join(printed)
    assert "align-uniform" in "".join(printed)
    assert "soft_nearest_neighbor_loss_func" in "".join(printed), "80 columns do not cut a name"
    assert origins == "align-uniform align-uniform"
    assert (method, loss, exported) == ("align_uniform", "align_uniform", "1")


@pytest.mark.slow
def test_their_method_trains_and_is_checked(run: Run, make_config: Any, tmp_path: Path) -> None:
    config = make_config("align_uniform", method_kwargs={"weight": 1.0})
    config["method_kwargs"].pop("proj_hidden_dim")
    (tmp_path / "theirs.yaml").write_text(yaml.safe_dump(config))
    command = (
        "import sys; from solo_ext.lab.cli.main import main; sys.exit(main(['pretrain', "
        f"'--config-path', {str(tmp_path)!r}, '--config-name', 'theirs', '--run-dir', 'run', "
        "*sys.argv[1:]]))"
    )
    refused = run("-c", command, "method_kwargs.wieght=0.3", cwd=tmp_path)
    assert refused.returncode == 2
    assert "method_kwargs.wieght=0.3: unknown key; did you mean 'weight'?" in refused.stderr
    done = run("-c", command, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").open()]
    assert any("train_align_uniform_loss_epoch" in line for line in lines)


@pytest.mark.upstream
@pytest.mark.skipif("SOLO_LEARN_ROOT" not in os.environ, reason="no checkout of main")
def test_upstreams_script_checks_their_kwargs(run: Run, tmp_path: Path) -> None:
    script = Path(os.environ["SOLO_LEARN_ROOT"]) / "main_pretrain.py"
    arguments = ("--config-name", "solo_ext/digits/debiased", "method=align_uniform")
    kwargs = "~method_kwargs", "+method_kwargs={weight: 0.3, wieght: 0.3}"
    limits = "+limit_train_batches=2", "data.val_path=null", "optimizer.batch_size=20"
    network = "backbone.name=timm/resnet10t", "+backbone.kwargs.stem_width=8"
    settings = ("accelerator=cpu", "max_epochs=1", *limits, *network)
    refused = run(str(script), *arguments, *kwargs, *settings, cwd=tmp_path)
    assert refused.returncode != 0
    assert "method_kwargs.wieght=0.3: unknown key; did you mean 'weight'?" in refused.stderr
    done = run(str(script), *arguments, kwargs[0], *settings, "+method_kwargs={}", cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
