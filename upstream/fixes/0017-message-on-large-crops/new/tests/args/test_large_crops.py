import main_pretrain
import pytest

from ..methods.utils import gen_base_cfg


@pytest.mark.parametrize("num_crops", [[1], [2, 1]])
def test_large_crops(num_crops):
    cfg = gen_base_cfg("simclr", batch_size=2, num_classes=10)
    cfg.method_kwargs = {"proj_hidden_dim": 16, "proj_output_dim": 16, "temperature": 0.2}
    cfg.augmentations = [{"crop_size": 32, "num_crops": n} for n in num_crops]
    cfg.devices = "1"

    # without Hydra's command line
    message = f"simclr needs 2 large crops, but augmentations give {sum(num_crops)}"
    with pytest.raises(AssertionError, match=message):
        main_pretrain.main.__wrapped__(cfg)
