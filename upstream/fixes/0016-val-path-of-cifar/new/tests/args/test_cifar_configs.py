from pathlib import Path

import pytest
from omegaconf import OmegaConf

SCRIPTS = Path(__file__).parents[2] / "scripts" / "pretrain"
CONFIGS = sorted(SCRIPTS.glob("cifar*/*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: str(path.relative_to(SCRIPTS)))
def test_validation_images_are_where_the_training_images_are(path):
    cfg = OmegaConf.load(path)
    assert cfg.data.dataset in ["cifar10", "cifar100"]
    assert Path(cfg.data.val_path) == Path(cfg.data.train_path)
