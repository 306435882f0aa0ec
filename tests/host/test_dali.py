"""``data.format=dali`` on the installed host: the right images, in the right order, once each."""

import itertools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from solo_ext.config.schema import DALI, Images, RunConfig
from solo_ext.core import distributed
from solo_ext.core.errors import ConfigError, UserError
from solo_ext.data.images import files_of
from solo_ext.data.loaders import pretrain_loader
from solo_ext.data.reading import targets_of
from solo_ext.host.dali_loader import DALILoader, check_dali
from solo_ext.lab.evaluation.evaluate import evaluate
from solo_ext.lab.training.prepare import Prepared, prepare
from solo_ext.lab.training.pretrain import pretrain
from tests.lab.training.same_run import assert_resumes

pytest.importorskip("nvidia.dali")
MakeConfig = Callable[..., dict[str, Any]]
Make = Callable[..., Prepared]
CPU = {"device": "cpu"}
COUNT, BATCH = 25, 4
TWO = [{"crop_size": 16, "num_crops": 2}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images of one grey each, told by the file's name; and files that are no images."""
    root = tmp_path_factory.mktemp("greys")
    numbers = np.random.default_rng(1).permutation(COUNT).tolist()
    for place, number in enumerate(numbers):
        folder = root / "cab"[place % 3]
        folder.mkdir(exist_ok=True)
        Image.new("RGB", (20, 18), (10 * number,) * 3).save(folder / f"x{number:02d}.jpg")
    (root / "a" / "notes.txt").write_text("no image")
    (root / ".hidden").write_text("no folder")
    return root


@pytest.fixture
def settings(make_config: MakeConfig, folder: Path) -> MakeConfig:
    def build(method: str = "simclr", **changes: Any) -> dict[str, Any]:
        given: dict[str, Any] = {
            "dali": CPU,
            "optimizer": {"batch_size": BATCH},
            "augmentations": [
                {"crop_size": 16, "num_crops": 2, "horizontal_flip": {"prob": 0.5}},
                {"crop_size": 8, "num_crops": 1},
            ],
        }
        data = {"train_path": str(folder), "format": "dali", **changes.pop("data", {})}
        return make_config(method, data=data, **{**given, **changes})

    return build


@pytest.fixture
def make(settings: MakeConfig) -> Make:
    return lambda *args, **changes: prepare(settings(*args, **changes))


def loader(prepared: Prepared) -> DALILoader:
    return DALILoader(prepared.run, prepared.train)


def stems(prepared: Prepared) -> list[str]:
    """Names of the files in the order of the images."""
    return [Path(file).stem for file in files_of(prepared.train)]


def stems_seen(crop: torch.Tensor) -> list[str]:
    """Names of the files of these crops, by their grey."""
    mean, std = torch.tensor((0.485, 0.456, 0.406)), torch.tensor((0.229, 0.224, 0.225))
    levels = (crop.mean((2, 3)) * std + mean).mean(1) * 255
    return [f"x{number:02d}" for number in (levels / 10).round().int().tolist()]


def same(one: list[Any], two: list[Any]) -> bool:
    return all(
        torch.equal(a[0], b[0]) and all(map(torch.equal, a[1], b[1]))
        for a, b in zip(one, two, strict=True)
    )


def test_batches_are_the_files_that_their_indices_name(make: Make) -> None:
    prepared = make()
    names = stems(prepared)
    targets = list(targets_of(prepared.train))
    assert len(names) == COUNT
    assert all(name.startswith("x") for name in names)
    found = list(loader(prepared))
    assert len(found) == COUNT // BATCH
    for indices, crops, labels in found:
        assert indices.dtype == labels.dtype == torch.int64
        assert [tuple(crop.shape[1:]) for crop in crops] == [(3, 16, 16)] * 2 + [(3, 8, 8)]
        for crop in crops:
            assert stems_seen(crop) == [names[i] for i in indices]
        assert labels.tolist() == [targets[i] for i in indices]
    seen = torch.cat([batch[0] for batch in found])
    assert len(seen.unique()) == len(seen) == COUNT // BATCH * BATCH


@pytest.mark.parametrize("fraction", [-1, 0.5])
def test_order_is_that_of_the_ordinary_loader(make: Make, fraction: float) -> None:
    prepared = make(data={"fraction": fraction})
    ours, ordinary = loader(prepared), pretrain_loader(prepared.run, prepared.train)
    orders = []
    for epoch in (0, 1, 4):
        ours.sampler.set_epoch(epoch)
        ordinary.order.set_epoch(epoch)
        orders.append([batch[0].tolist() for batch in ours])
        assert orders[-1] == [batch[0].tolist() for batch in ordinary]
    assert orders[0] != orders[1]


def test_same_seed_same_batches(make: Make) -> None:
    """Whatever the number of threads; another seed or epoch draws anew."""
    jitter = {"prob": 0.8, "brightness": 0.4, "contrast": 0.4, "saturation": 0.2, "hue": 0.1}
    pipeline = {"crop_size": 16, "num_crops": 2, "color_jitter": jitter}
    every = {name: {"prob": 0.5} for name in ("grayscale", "gaussian_blur", "solarization")}
    augmentations = [{**pipeline, **every}]
    first = list(loader(make(augmentations=augmentations)))
    again = loader(make(augmentations=augmentations, data={"num_workers": 3}))
    assert same(first, list(again))
    again.sampler.set_epoch(1)
    assert not same(first, list(again))
    assert not same(first, list(loader(make(augmentations=augmentations, seed=6))))
    assert not torch.equal(*first[0][1])


def test_an_epoch_cut_short_leaves_the_next_whole(make: Make) -> None:
    cut, whole = loader(make()), loader(make())
    list(itertools.islice(cut, 2))
    for epoch in (1, 2):
        cut.sampler.set_epoch(epoch)
        whole.sampler.set_epoch(epoch)
        assert same(list(cut), list(whole))


@pytest.mark.parametrize("place", [{"epoch": 2, "batches": 0}, {"epoch": 1, "batches": 4}])
def test_goes_on_from_a_place(make: Make, place: dict[str, int]) -> None:
    whole, resumed = loader(make()), loader(make())
    whole.sampler.set_epoch(place["epoch"])
    resumed.load_state_dict(place)
    assert resumed.state_dict() == place
    assert same(list(whole)[place["batches"] :], list(resumed))
    assert resumed.state_dict() == {"epoch": place["epoch"] + 1, "batches": 0}


def test_ranks_share_the_images(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    parts, seeds = [], []
    for rank in range(3):
        monkeypatch.setattr(distributed, "rank", lambda rank=rank: rank)
        monkeypatch.setattr(distributed, "world_size", lambda: 3)
        parts.append(list(loader(make())))
        seeds.append(loader(make()).pipeline_arguments["seed"])
    assert len(set(seeds)) == 3, "an image at the same place of a batch is augmented anew"
    assert [len(part) for part in parts] == [COUNT // 3 // BATCH] * 3
    seen = torch.cat([batch[0] for part in parts for batch in part])
    assert len(seen.unique()) == len(seen)


@pytest.mark.parametrize("dataset", ["custom", "imagenet100"])
def test_fixed_augmentation_is_the_image(make: Make, dataset: str) -> None:
    """Without chance, both hosts give the image at the size of the crop, normalised as asked."""
    fixed = {"crop_size": 18, "num_crops": 2, "rrc": {"enabled": False}}
    fixed |= {"mean": [0.5] * 3, "std": [0.229] * 3}
    found = list(loader(make(augmentations=[fixed], data={"dataset": dataset})))
    data = {"dataset": dataset, "format": "image_folder"}
    ordinary = make(augmentations=[fixed], data=data)
    for ours, theirs in zip(found, pretrain_loader(ordinary.run, ordinary.train), strict=True):
        for a, b in zip(ours[1], theirs[1], strict=True):
            assert ((a - b).abs() * 0.229 * 255).max() < 2


def test_file_list(make: Make, folder: Path, tmp_path: Path) -> None:
    files = sorted(folder.glob("*/*.jpg"), reverse=True)
    lines = [f"{file} {file.parent.name}" for file in files]
    (tmp_path / "list.txt").write_text("\n".join(lines))
    prepared = make(data={"train_path": str(tmp_path / "list.txt")})
    assert prepared.run.data.num_classes == 3
    for indices, crops, labels in loader(prepared):
        assert stems_seen(crops[0]) == [files[i].stem for i in indices]
        assert labels.tolist() == ["abc".index(files[i].parent.name) for i in indices]


def test_no_labels(make: Make, folder: Path, tmp_path: Path) -> None:
    for file in folder.glob("*/*.jpg"):
        shutil.copy(file, tmp_path)
    prepared = make(data={"train_path": str(tmp_path), "no_labels": True})
    names = stems(prepared)
    for indices, crops, labels in loader(prepared):
        assert stems_seen(crops[0]) == [names[i] for i in indices]
        assert labels.tolist() == [-1] * BATCH


PCL: dict[str, Any] = {
    "method_kwargs": {"num_prototypes": [5], "queue_size": 8, "head": "v1"},
    "augmentations": TWO,
    "max_epochs": 2,
}


def test_pcl_clusters_the_right_images(make: Make, tmp_path: Path) -> None:
    """Images of like greys share a cluster: the E-step's row is the batch's index."""
    prepared = make("pcl", **PCL)
    pretrain(prepared, run_dir=tmp_path / "run", show_progress=False)
    (checkpoint,) = (tmp_path / "run").glob("*.ckpt")
    state = torch.load(checkpoint, weights_only=True)["state_dict"]
    (clusters,) = state["prototypes.assignments"].tolist()
    number = [int(name[1:]) for name in stems(prepared)]
    spread = [
        np.std([n for n, c in zip(number, clusters, strict=True) if c == cluster])
        for cluster in set(clusters)
    ]
    assert len(set(clusters)) > 1
    assert np.mean(spread) < 0.6 * np.std(number)


@pytest.mark.parametrize("method", ["simclr", "pcl", "deepclusterv2"])
def test_resumes_at_the_end_of_an_epoch(settings: MakeConfig, tmp_path: Path, method: str) -> None:
    """What the run would have been without the stop, DALI's augmentation included."""
    changes = PCL if method == "pcl" else {"augmentations": TWO, "max_epochs": 2}
    assert_resumes(settings(method, **changes), tmp_path, COUNT // BATCH)


def test_limited_epochs_are_validated_and_evaluated(
    make: Make, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prepared = make(
        data={"val_path": str(folder)},
        limit_train_batches=2,
        max_epochs=3,
        augmentations=TWO,
        debug_augmentations=True,
    )
    result = pretrain(prepared, run_dir=tmp_path / "run", show_progress=False)
    assert "2 x [" in capsys.readouterr().out, "the host's augmentation"
    found = torch.load(result.checkpoint, weights_only=True)  # type: ignore[arg-type]
    assert (result.epochs, found["global_step"]) == (3, 6)
    assert "val_acc1" in (tmp_path / "run" / "metrics.jsonl").read_text()
    own = {"k": [1], "temperature": [0.1]}
    records = [
        evaluate(tmp_path / "run", "knn", {**own, **extra})
        for extra in ({}, {"data": {"format": "image_folder"}}, {"data": {"format": "dali"}})
    ]
    assert len({str(record["results"]) for record in records}) == 1
    with pytest.raises(ConfigError, match="not an HDF5 file"):
        evaluate(tmp_path / "run", "knn", {"data": {"format": "h5"}})


DUMMIES = {"device": "cpu", "encode_indexes_into_labels": False}
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("simclr", {"data": {"dataset": "cifar10"}}, r"data\.dataset='cifar10'.*class folders"),
    (
        "simclr",
        {"augmentations": [{"crop_size": 8, "num_crops": 2, "equalization": {"prob": 0.1}}]},
        r"augmentations\.0\.equalization\.prob=0\.1.*DALI has no equalisation",
    ),
    ("simclr", {"dali": {"device": "tpu"}}, r"dali\.device='tpu'.*cpu"),
    ("simclr", {"dali": {"devise": "cpu"}}, r"dali\.devise.*did you mean 'device'"),
    ("simclr", {"optimizer": {"batch_size": 26}}, "25 images per process"),
    *(
        (
            method,
            {"dali": DUMMIES, "augmentations": TWO},
            "encode_indexes_into_labels=false.*set it to true",
        )
        for method in ("pcl", "deepclusterv2")
    ),
]


@pytest.mark.parametrize(("method", "changes", "message"), REFUSED)
def test_refused_before_training(
    make: Make, method: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        loader(make(method, **changes))


def test_without_indices_labels_are_true(make: Make) -> None:
    prepared = make(dali=DUMMIES)
    targets = dict(zip(stems(prepared), targets_of(prepared.train), strict=True))
    for indices, crops, labels in loader(prepared):
        assert indices.tolist() == list(range(BATCH))
        assert labels.tolist() == [targets[name] for name in stems_seen(crops[0])]


def test_dali_that_is_not_installed(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("solo_ext.data.dali.dali_installed", lambda: False)
    with pytest.raises(ConfigError, match=r"data\.format='dali'.*dali-cuda12.*dali-cuda13"):
        make()


@pytest.mark.parametrize("content", [b"", "half"])
def test_a_run_names_the_file_that_is_no_image(
    make: Make, folder: Path, tmp_path: Path, content: bytes | str
) -> None:
    shutil.copytree(folder, tmp_path / "data")
    bad = tmp_path / "data" / "a" / "broken.jpg"
    whole = next(folder.glob("a/*.jpg")).read_bytes()
    bad.write_bytes(whole[: len(whole) // 2] if isinstance(content, str) else content)
    # All 26 images: in one batch, or the last of an epoch could leave it out.
    prepared = make(
        data={"train_path": str(tmp_path / "data")}, optimizer={"batch_size": 13}, augmentations=TWO
    )
    with pytest.raises(UserError, match=r"broken\.jpg") as caught:
        pretrain(prepared, run_dir=tmp_path / "run", show_progress=False)
    assert "\n" not in str(caught.value)


def test_a_gpu_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    run = RunConfig.model_construct(data=Images(dataset="custom"), augmentations=[], dali=DALI())
    with pytest.raises(ConfigError, match=r"dali\.device='gpu'.*dali\.device=cpu"):
        check_dali(run)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_batches_of_the_gpu(make: Make) -> None:
    prepared = make(dali={"device": "gpu"})
    names = stems(prepared)
    for indices, crops, _ in loader(prepared):
        assert crops[0].device.type == "cuda"
        assert stems_seen(crops[0].cpu()) == [names[i] for i in indices]
