"""Features that a backbone gives, and their files."""

from __future__ import annotations

import threading
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities import rank_zero_only
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from solo_ext.lab.evaluation.features import FeatureStore, Ranks, extract_features


def make_backbone(*tail: nn.Module) -> nn.Sequential:
    """Returns a small network whose eval mode differs from its train mode."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.Dropout(0.5), *tail)


def make_images(count: int = 10) -> tuple[Tensor, Tensor]:
    images = torch.randn(count, 3, 6, 6, generator=torch.Generator().manual_seed(0))
    return images, torch.arange(count, dtype=torch.int32) % 4


def modes(backbone: nn.Module) -> list[bool]:
    return [module.training for module in backbone.modules()]


@pytest.mark.parametrize("batch_size", [3, 10])
def test_equals_the_eval_mode_forward_and_counts_batches(batch_size: int) -> None:
    images, targets = make_images()
    loader = DataLoader(TensorDataset(images, targets), batch_size=batch_size)
    backbone, calls = make_backbone(nn.Flatten()), list[tuple[int, int]]()
    features, labels = extract_features(backbone, loader, progress=lambda *call: calls.append(call))
    expected = backbone.eval()(images).detach()
    torch.testing.assert_close(features, expected, rtol=1e-4, atol=1e-5)
    assert (features.shape, features.dtype, labels.dtype) == ((10, 80), torch.float32, torch.int64)
    assert labels.tolist() == targets.tolist()
    assert not features.requires_grad
    assert not features.is_inference()
    assert calls == [(done + 1, len(loader)) for done in range(len(loader))]


def test_backbone_in_half_precision() -> None:
    images, targets = make_images()
    features, _ = extract_features(make_backbone().bfloat16(), [(images.bfloat16(), targets)])
    assert features.dtype == torch.float32


def test_backbone_is_left_as_it_was() -> None:
    backbone = make_backbone()
    backbone[1].eval()
    state = {name: value.clone() for name, value in backbone.state_dict().items()}
    extract_features(backbone, [make_images()])
    assert modes(backbone) == [True, True, False, True]
    for name, value in backbone.state_dict().items():
        assert torch.equal(value, state[name]), name


@pytest.mark.parametrize("where", ["backbone", "progress"])
def test_modes_are_restored_after_an_error(where: str) -> None:
    def fails(*_: Any) -> Any:
        raise RuntimeError(f"broken {where}")

    backbone = make_backbone()
    backbone[0].eval()
    if where == "backbone":
        backbone.register_forward_hook(fails)
    before = modes(backbone)
    with pytest.raises(RuntimeError, match=f"broken {where}"):
        extract_features(backbone, [make_images()], progress=fails)
    assert modes(backbone) == before
    assert torch.is_grad_enabled()


@pytest.mark.parametrize(
    ("backbone", "value", "message"),
    [
        (nn.Identity(), float("nan"), "2 of 10 rows"),
        (nn.Identity(), float("-inf"), "2 of 10 rows"),
        (nn.Flatten(2), 0.0, r"returned \(5, 3, 36\) for 5 images"),
        (nn.Unflatten(0, (1, 5)), 0.0, r"returned \(1, 5, 3, 6, 6\)"),
    ],
)
def test_rejects_outputs(backbone: nn.Module, value: float, message: str) -> None:
    """Rows that are not finite are counted over all batches."""
    images, targets = make_images()
    images[[2, 7], 1:] = value
    with pytest.raises(ValueError, match=message):
        extract_features(backbone, [(images[:5], targets[:5]), (images[5:], targets[5:])])


COUNT, WIDTH = 23, 4
KEY = {"model": "a", "data": {"path": "x"}}


def row(index: int) -> Tensor:
    return torch.arange(WIDTH) + 10.0 * index


class Extraction:
    """Batches of three rows whose values are their index; remembers what it was asked for."""

    def __init__(self, stop_after: int | None = None, drop: int = 0) -> None:
        self.asked: list[int] = []
        self.stop_after, self.drop = stop_after, drop

    def __call__(self, indices: Sequence[int]) -> Generator[tuple[Tensor, Tensor]]:
        self.asked += indices
        for start in range(0, len(indices) - self.drop, 3):
            if self.stop_after is not None and start >= self.stop_after:
                raise KeyboardInterrupt
            part = list(indices[start : start + 3])
            yield torch.stack([row(i) for i in part]), torch.tensor(part) % 5


def store(folder: Path, key: Any = KEY, count: int = COUNT, **options: Any) -> FeatureStore:
    return FeatureStore(folder, key, count, rows_per_file=5, **options)


def files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.safetensors"))


def check(found: tuple[Tensor, Tensor]) -> None:
    assert torch.equal(found[0], torch.stack([row(i) for i in range(COUNT)]))
    assert torch.equal(found[1], torch.arange(COUNT) % 5)


def test_extracts_once(tmp_path: Path) -> None:
    first, second = Extraction(), Extraction()
    check(store(tmp_path).features(first))
    check(store(tmp_path).features(second))
    assert first.asked == list(range(COUNT))
    assert second.asked == []
    assert [f.name for f in files(tmp_path)] == [f"{i:05d}-of-00005.safetensors" for i in range(5)]


@pytest.mark.parametrize("change", ["model", "count"])
def test_of_something_else_is_extracted(change: str, tmp_path: Path) -> None:
    store(tmp_path).features(Extraction())
    other = Extraction()
    key = {**KEY, "model": "b"} if change == "model" else KEY
    store(tmp_path, key, COUNT - (change == "count")).features(other)
    assert len(other.asked) == COUNT - (change == "count")


@pytest.mark.fault
def test_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        store(tmp_path).features(Extraction(stop_after=12))
    assert len(files(tmp_path)) == 2
    rest = Extraction()
    check(store(tmp_path).features(rest))
    assert rest.asked == list(range(10, COUNT))


def cut_short(file: Path, content: bytes) -> None:
    file.write_bytes(content[: len(content) // 2])


def another_byte(file: Path, content: bytes) -> None:
    file.write_bytes(content[:-30] + bytes([content[-30] ^ 1]) + content[-29:])


def of_another_set(file: Path, content: bytes) -> None:
    save_file({k: v + 1 for k, v in load_file(file).items()}, file)


@pytest.mark.fault
@pytest.mark.parametrize("damage", [cut_short, another_byte, of_another_set])
def test_damaged_file_alone_is_made_again(damage: Any, tmp_path: Path) -> None:
    store(tmp_path).features(Extraction())
    for place in (1, 4):
        file = files(tmp_path)[place]
        damage(file, file.read_bytes())
    again = Extraction()
    check(store(tmp_path).features(again))
    assert again.asked == [*range(5, 10), *range(20, COUNT)]
    check(store(tmp_path).features(Extraction(stop_after=0)))


@pytest.mark.fault
def test_features_that_are_not_finite_or_missing_are_refused(tmp_path: Path) -> None:
    def broken(indices: Sequence[int]) -> Generator[tuple[Tensor, Tensor]]:
        yield torch.full((len(indices), 2), float("nan")), torch.zeros(len(indices))

    with pytest.raises(ValueError, match="5 of 5 rows of features are not finite"):
        store(tmp_path).features(broken)
    assert files(tmp_path) == []

    with pytest.raises(ValueError, match="too few features came for 23 images"):
        store(tmp_path).features(Extraction(drop=4))


@pytest.mark.fault
@pytest.mark.parametrize("ranks", [Ranks(0, 1), Ranks(0, 2), Ranks(1, 2)])
def test_folder_that_cannot_be_written(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every process says so."""
    # Lightning would keep back the warnings of the second process.
    monkeypatch.setattr(rank_zero_only, "rank", ranks.rank)
    (tmp_path / "file").write_text("")
    with pytest.warns(UserWarning, match="features are not stored"):
        found = store(tmp_path / "file").features(Extraction(), ranks)
    if not ranks.rank:
        check(found)


@pytest.mark.parametrize("done", [0, 2])
def test_processes_share_the_work(done: int, tmp_path: Path) -> None:
    """Also where a part was there before."""
    if done:
        with pytest.raises(KeyboardInterrupt):
            store(tmp_path).features(Extraction(stop_after=5 * done + 2))
    parts = [Extraction() for _ in range(3)]

    def work(rank: int) -> None:
        found[rank] = store(tmp_path).features(parts[rank], Ranks(rank, 3))

    found: dict[int, tuple[Tensor, Tensor]] = {}
    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    check(found[0])
    assert [len(found[rank][0]) for rank in (1, 2)] == [0, 0]
    # The first may have done what was not there yet when it was ready.
    assert {index for part in parts for index in part.asked} == set(range(5 * done, COUNT))
    assert set(parts[1].asked).isdisjoint(parts[2].asked)


@pytest.mark.fault
def test_share_of_a_lost_process_is_done(tmp_path: Path) -> None:
    alone = Extraction()
    check(store(tmp_path).features(alone, Ranks(0, 2)))
    assert sorted(alone.asked) == list(range(COUNT))
