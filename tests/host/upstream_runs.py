"""Runs solo-learn's own main_pretrain.py for many configs in one process.

``python upstream_runs.py SCRIPT JOBS [--without]``: ``JOBS`` is a JSON file, command lines by the
folder that each is run in. ``--without`` runs as if the plugin were not installed. A folder
gets ``error.txt`` where its run failed. Networks are small ones: see :func:`make_small`.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import traceback
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any


class NotInstalled(MetaPathFinder):
    """Finds neither the plugin nor its entry into Hydra."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.partition(".")[0] in ("solo_ext", "hydra_plugins"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def make_small() -> None:
    """Before solo-learn imports them: ResNet-18 gets an eighth of its channels, ViTs two blocks.

    Their 11 and 5 million weights are slow to train, and to save.
    """
    from timm.models.vision_transformer import VisionTransformer
    from torchvision import models
    from torchvision.models.resnet import BasicBlock, ResNet

    class Narrow(ResNet):
        def _make_layer(self, block: Any, planes: int, *args: Any, **kwargs: Any) -> Any:
            return super()._make_layer(block, planes // 8, *args, **kwargs)

    made = VisionTransformer.__init__

    def shallow(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **{**kwargs, "depth": 2})

    models.resnet18 = lambda **kwargs: Narrow(BasicBlock, [2, 2, 2, 2], **kwargs)
    VisionTransformer.__init__ = shallow  # type: ignore[method-assign]


def main() -> None:
    script, jobs = sys.argv[1:3]
    if "--without" in sys.argv:
        sys.meta_path.insert(0, NotInstalled())
    make_small()
    from hydra.core.global_hydra import GlobalHydra

    os.environ["HYDRA_FULL_ERROR"] = "1"
    for folder, arguments in json.loads(Path(jobs).read_text()).items():
        os.chdir(folder)
        sys.argv = [script, *arguments]
        GlobalHydra.instance().clear()
        try:
            runpy.run_path(script, run_name="__main__")
        except (Exception, SystemExit):
            Path("error.txt").write_text(traceback.format_exc())
    assert ("solo_ext" in sys.modules) != any(isinstance(f, NotInstalled) for f in sys.meta_path)


if __name__ == "__main__":
    main()
