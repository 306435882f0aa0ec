import inspect
from pathlib import Path

import main_linear
import main_pretrain
import pytest
from solo.data import dali_dataloader
from solo.data.dali_dataloader import (
    ClassificationDALIDataModule,
    NormalPipelineBuilder,
    PretrainDALIDataModule,
    PretrainPipelineBuilder,
)


class DummyTrainer:
    local_rank = 0
    global_rank = 0
    world_size = 1


@pytest.fixture
def files(tmp_path):
    for label in range(2):
        (tmp_path / str(label)).mkdir()
        for i in range(8):
            (tmp_path / str(label) / f"{i}.jpg").touch()
    return tmp_path


@pytest.fixture
def build(files, monkeypatch):
    """Builds a pipeline, and returns the files and labels that its reader gets."""

    def build(Builder, **kwargs):
        given = {}
        monkeypatch.setattr(
            dali_dataloader.ops.readers, "File", lambda **kwargs: given.update(kwargs)
        )
        builder = Builder(files, batch_size=2, device="cpu", **kwargs)
        return builder, [Path(f) for f in given["files"]], given["labels"]

    return build


@pytest.mark.parametrize(
    "Builder, kwargs",
    [(PretrainPipelineBuilder, {"transforms": None}), (NormalPipelineBuilder, {})],
)
def test_order(Builder, kwargs, build):
    builder, files, labels = build(Builder, seed=1, **kwargs)
    assert labels == [int(f.parent.name) for f in files]
    assert files != sorted(files)

    # all processes have the same order, and draw other augmentations
    other, other_files, _ = build(Builder, seed=1, device_id=1, shard_id=1, num_shards=2, **kwargs)
    assert files == other_files
    assert builder.seed != other.seed

    # which the seed changes
    _, other_files, other_labels = build(Builder, seed=2, **kwargs)
    assert files != other_files
    assert sorted(files) == sorted(other_files)
    assert other_labels == [int(f.parent.name) for f in other_files]


def test_order_without_shuffling(build):
    _, files, _ = build(PretrainPipelineBuilder, transforms=None, random_shuffle=False)
    assert files == sorted(files)
    _, files, _ = build(NormalPipelineBuilder, validation=True)
    assert files == sorted(files)


def test_indexes(build):
    builder, files, indexes = build(
        PretrainPipelineBuilder, transforms=None, seed=1, encode_indexes_into_labels=True
    )
    # positions in the sorted list of files, from which the labels follow
    assert [sorted(files)[i] for i in indexes] == files
    assert [builder.conversion_map[i] for i in indexes] == [int(f.parent.name) for f in files]


def test_data_modules(files, monkeypatch):
    class Built(Exception):
        pass

    def remember(*args, **kwargs):
        raise Built(kwargs["seed"])

    for name in ["PretrainPipelineBuilder", "NormalPipelineBuilder"]:
        monkeypatch.setattr(dali_dataloader, name, remember)

    kwargs = {"batch_size": 2, "dali_device": "cpu", "seed": 34}
    pretrain = PretrainDALIDataModule(
        "imagenet", files, transforms=None, num_large_crops=2, num_small_crops=0, **kwargs
    )
    linear = ClassificationDALIDataModule("imagenet", files, files, **kwargs)
    for data in [pretrain, linear]:
        data.trainer = DummyTrainer()
        with pytest.raises(Built, match="34"):
            data.setup()


def test_scripts():
    for script in [main_pretrain, main_linear]:
        assert "seed=cfg.seed," in inspect.getsource(script.main.__wrapped__)
