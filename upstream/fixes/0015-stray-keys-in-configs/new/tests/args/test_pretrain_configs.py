import inspect
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from solo.methods import METHODS
from solo.methods.base import BaseMomentumMethod

SCRIPTS = Path(__file__).parents[2] / "scripts" / "pretrain"
CONFIGS = [
    path
    for pattern in ["*.yaml", "*.yml"]
    for path in sorted(SCRIPTS.rglob(pattern))
    if path.parent.name not in ["augmentations", "wandb"]
]
AUGMENTATIONS = [*CONFIGS, *sorted(SCRIPTS.rglob("augmentations/*.yaml"))]


def name(path):
    return str(path.relative_to(SCRIPTS))


def source_of(Method):
    """Source of a method and of the methods that it extends."""
    return "".join(inspect.getsource(c) for c in Method.__mro__ if c.__module__.startswith("solo."))


@pytest.mark.parametrize("path", CONFIGS, ids=name)
def test_method_reads_its_settings(path):
    cfg = OmegaConf.load(path)
    Method = METHODS[cfg.method]
    source = source_of(Method)
    assert [key for key in cfg.method_kwargs if f"method_kwargs.{key}" not in source] == []
    if "momentum" in cfg:
        assert issubclass(Method, BaseMomentumMethod)
    assert not {"augmentations_cfg", "wandb_cfg"} & set(cfg)


@pytest.mark.parametrize("path", AUGMENTATIONS, ids=name)
def test_only_the_crop_is_enabled(path):
    cfg = OmegaConf.load(path)
    pipelines = cfg if path.parent.name == "augmentations" else cfg.get("augmentations", [])
    for pipeline in pipelines:
        transforms = {k: v for k, v in pipeline.items() if k not in ["crop_size", "num_crops"]}
        assert [key for key, value in transforms.items() if "enabled" in value] == ["rrc"]
