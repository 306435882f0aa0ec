"""``solo-ext embed``: rows, their order, labels, clusters, and what a stop leaves."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

import solo_ext
from solo_ext.core.errors import UserError
from solo_ext.data.transforms import eval_transform, fixed_view
from solo_ext.lab.evaluation import embed as module
from solo_ext.lab.evaluation import parquet
from solo_ext.lab.evaluation.embed import Embedded, embed
from solo_ext.lab.evaluation.models import Model
from solo_ext.lab.evaluation.parquet import written_metadata
from solo_ext.pretrained.runs import load_pretrained
from tests import forks
from tests.conftest import made_images

PLAIN: dict[str, Any] = {"num_workers": 0, "device": "cpu", "batch_size": 8}


@pytest.fixture
def nested(tmp_path: Path) -> Path:
    """Pictures at three depths, with what a folder of a photographer has beside them."""
    root = made_images(tmp_path / "nested", ["b", "a", "a/deep/er"], 4)
    Image.new("RGB", (20, 12), "red").save(root / "top.png")
    (root / "._top.png").write_bytes(b"what macOS leaves")
    made_images(root, [".hidden"], 1)
    (root / "notes.txt").write_text("no image")
    return root


def table(done: Embedded) -> pa.Table:
    return pq.read_table(done.out)


def plainly(backbone: torch.nn.Module, files: list[str], view: Any, batch: int = 8) -> np.ndarray:
    """Features as a script of its own would compute them, in batches of as many."""
    images = [view(Image.open(file).convert("RGB")) for file in files]
    backbone.eval()
    with torch.no_grad():
        parts = [backbone(torch.stack(images[i : i + batch])) for i in range(0, len(images), batch)]
    return torch.cat(parts).numpy()


def test_rows_are_those_of_a_plain_loop(pcl: Path, nested: Path, tmp_path: Path) -> None:
    done = embed(pcl, nested, tmp_path / "a.parquet", PLAIN)
    found, run = table(done), load_pretrained(pcl)
    files = sorted(str(p) for p in nested.rglob("*.png") if "/." not in str(p))
    assert sorted(found["path"].to_pylist()) == files
    assert found["index"].to_pylist() == list(range(len(files)))
    assert found["label"].null_count == len(files)
    size, statistics = fixed_view(run.cfg)
    expected = plainly(run.backbone, found["path"].to_pylist(), eval_transform(size, *statistics))
    assert found.schema.field("embedding").type == pa.list_(pa.float32(), run.features_dim)
    assert np.array_equal(np.stack(found["embedding"].to_numpy()), expected)
    assert (done.images, done.unreadable, done.resumed) == (len(files), [], 0)
    assert not (tmp_path / "a.parquet.parts").exists()


def test_file_says_what_made_it(pcl: Path, images: Path, tmp_path: Path) -> None:
    done = embed(pcl, images, tmp_path / "a.parquet", {**PLAIN, "crop_size": 24})
    about = written_metadata(done.out)
    assert about is not None
    assert about["solo_ext"] == solo_ext.__version__
    assert about["checkpoint_sha256"] == load_pretrained(pcl).digest
    assert about["backbone"]["name"] == "timm/resnet10t"
    assert (about["method"], about["epoch"], about["clusters"]) == ("pcl", 10, ["3", "6"])
    assert about["view"]["size"] == 24


def test_clusters_are_those_of_a_search_by_hand(pcl: Path, images: Path, tmp_path: Path) -> None:
    found = table(embed(pcl, images, tmp_path / "a.parquet", PLAIN))
    run = load_pretrained(pcl, "momentum")
    size, statistics = fixed_view(run.cfg)
    features = plainly(run.backbone, found["path"].to_pylist(), eval_transform(size, *statistics))
    w = {k.removeprefix("momentum_projector."): v.numpy() for k, v in run.weights.items()}
    hidden = np.maximum(features @ w["0.weight"].T + w["0.bias"], 0)
    z = hidden @ w["2.weight"].T + w["2.bias"]
    z /= np.linalg.norm(z, axis=1, keepdims=True)
    for m, k in enumerate((3, 6)):
        means = run.weights[f"prototypes.means_{m}"].numpy()
        phi = run.weights[f"prototypes.concentration_{m}"].numpy()
        for row, v in zip(found.to_pylist(), z, strict=True):
            distances = [float(np.sqrt(np.sum((v - c) ** 2))) for c in means]
            best = row[f"cluster_{k}"]
            assert distances[best] == pytest.approx(min(distances), abs=1e-6)
            assert row[f"distance_{k}"] == pytest.approx(min(distances), abs=1e-5)
            assert row[f"concentration_{k}"] == phi[best]
        assert found.schema.field(f"cluster_{k}").type == pa.int32()
    assert len(set(found["cluster_6"].to_pylist())) > 2


def test_runs_without_clusters_have_no_such_columns(run: Path, pcl: Path, tmp_path: Path) -> None:
    plain = embed(run, None, tmp_path / "a.parquet", PLAIN)
    without = embed(pcl, None, tmp_path / "b.parquet", {**PLAIN, "clusters": False})
    for done in (plain, without):
        assert table(done).column_names == ["path", "index", "label", "embedding"]
        assert done.clusters == []


def test_own_training_images_are_the_default(pcl: Path, images: Path, tmp_path: Path) -> None:
    found = table(embed(pcl, None, tmp_path / "a.parquet", PLAIN))
    files = sorted(str(p) for p in images.rglob("*.png"))
    assert sorted(found["path"].to_pylist()) == files
    assert found["label"].to_pylist() == [Path(p).parent.name for p in found["path"].to_pylist()]


def test_labels_are_there_where_they_are_obvious(tmp_path: Path) -> None:
    """As a run on these images would take them."""
    classes = made_images(tmp_path / "classes", ["ant", "bee"], 10)
    (classes / ".DS_Store").write_bytes(b"Mac OS X")
    (classes / "ant" / ".thumbnails").mkdir()
    deeper = made_images(tmp_path / "deeper", ["ant/x", "bee"], 10)
    listed = tmp_path / "list.txt"
    listed.write_text("classes/ant/0.png dog\nclasses/bee/1.png bee\n")
    unlabelled = tmp_path / "plain.txt"
    unlabelled.write_text("# mine\nclasses/ant/0.png\nclasses/ant/1.png\n")

    def labels(*paths: Path) -> list[str | None]:
        done = embed("pixels", paths, tmp_path / "a.parquet", {**PLAIN, "crop_size": 8})
        found: list[str | None] = table(done)["label"].to_pylist()
        return found

    assert labels(classes) == ["ant"] * 10 + ["bee"] * 10
    assert labels(deeper) == [None] * 20
    assert labels(listed) == ["dog", "bee"]
    assert labels(unlabelled) == [None] * 2
    assert labels(deeper, classes) == [None] * 40


def test_paths_open_from_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_images(tmp_path / "mine", ["a/b"], 3)
    monkeypatch.chdir(tmp_path)
    done = embed("pixels", "mine", "a.parquet", {**PLAIN, "crop_size": 8})
    paths = table(done)["path"].to_pylist()
    assert paths == [f"mine/a/b/{n}.png" for n in range(3)]
    assert all(Path(path).is_file() for path in paths)


def test_links_in_circles_are_refused(tmp_path: Path) -> None:
    root = made_images(tmp_path / "mine", ["a", "b"], 1)
    (root / "a" / "again").symlink_to(root)
    with pytest.raises(UserError, match="is a link to a folder that it lies in"):
        embed("pixels", root, tmp_path / "a.parquet", {**PLAIN, "crop_size": 8})


@pytest.fixture
def few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Row groups of 10, which batches of 8 do not divide."""
    monkeypatch.setattr(parquet, "ROWS", 10)


class StoppedError(Exception):
    """A stop that nothing handles."""


def stopped_after(batches: int) -> Callable[[str, int, int], None]:
    seen = iter(range(batches - 1))

    def progress(*_: Any) -> None:
        if next(seen, None) is None:
            raise StoppedError

    return progress


@pytest.mark.usefixtures("few_rows")
@pytest.mark.parametrize("stop", [1, 2, 4])
def test_continued_file_is_that_of_one_call(
    stop: int, pcl: Path, images: Path, tmp_path: Path
) -> None:
    whole = embed(pcl, images, tmp_path / "whole.parquet", PLAIN)
    out = tmp_path / "a.parquet"
    with pytest.raises(StoppedError):
        embed(pcl, images, out, PLAIN, stopped_after(stop))
    assert not out.exists()
    done = embed(pcl, images, out, PLAIN)
    # What was computed by the time of the stop is kept, though it fills no row group.
    assert done.resumed == 8 * stop
    assert out.read_bytes() == whole.out.read_bytes()
    groups = pq.ParquetFile(out).metadata
    assert [groups.row_group(i).num_rows for i in range(groups.num_row_groups)] == [10] * 4 + [8]
    assert not (tmp_path / "a.parquet.parts").exists()


def wait_until(there: Callable[[], bool], process: Any) -> None:
    end = time.monotonic() + 120
    while not there():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.01)


_SLOWLY = """
import sys, time
from solo_ext.lab.evaluation import embed, parquet
parquet.ROWS = 10
embed.embed(*sys.argv[1:4], {"num_workers": 0, "device": "cpu", "batch_size": 8},
            lambda *_: time.sleep(0.5))
"""


@pytest.mark.fault
@pytest.mark.slow
def test_killed_process_is_continued(pcl: Path, images: Path, tmp_path: Path) -> None:
    whole = embed(pcl, images, tmp_path / "whole.parquet", PLAIN)
    out = tmp_path / "a.parquet"
    process = forks.start("-c", _SLOWLY, pcl, images, out, env=dict(os.environ))
    parts = tmp_path / "a.parquet.parts"
    wait_until(lambda: len(list(parts.rglob("*.parquet"))) >= 1, process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    done = embed(pcl, images, out, PLAIN)
    assert done.resumed >= 16
    assert pq.read_table(out).equals(pq.read_table(whole.out))


@pytest.mark.usefixtures("few_rows")
def test_finished_file_is_left_alone(pcl: Path, images: Path, tmp_path: Path) -> None:
    out = tmp_path / "a.parquet"
    first = embed(pcl, images, out, PLAIN)
    before = out.stat().st_mtime_ns
    again = embed(pcl, images, out, PLAIN, stopped_after(1))
    assert out.stat().st_mtime_ns == before
    assert (again.images, again.resumed, again.clusters) == (48, 48, first.clusters)


@pytest.mark.usefixtures("few_rows")
@pytest.mark.parametrize("change", ["model", "view", "image", "more"])
def test_rows_of_another_model_view_or_image_are_not_mixed_in(
    change: str, run: Path, pcl: Path, images: Path, tmp_path: Path
) -> None:
    own, out = shutil.copytree(images, tmp_path / "images"), tmp_path / "a.parquet"
    settings = {**PLAIN, "clusters": False}
    with pytest.raises(StoppedError):
        embed(pcl, own, out, settings, stopped_after(3))
    model = run if change == "model" else pcl
    if change == "view":
        settings["crop_size"] = 24
    elif change == "image":
        Image.new("RGB", (16, 16), "red").save(own / "0" / "0.png")
    elif change == "more":
        Image.new("RGB", (16, 16), "red").save(own / "0" / "00.png")
    done = embed(model, own, out, settings)
    assert done.resumed == 0
    fresh = embed(model, own, tmp_path / "fresh.parquet", settings)
    assert table(done).equals(table(fresh))


@pytest.mark.usefixtures("few_rows")
def test_damaged_part_is_made_again(pcl: Path, images: Path, tmp_path: Path) -> None:
    out = tmp_path / "a.parquet"
    with pytest.raises(StoppedError):
        embed(pcl, images, out, PLAIN, stopped_after(5))
    first, second = sorted((tmp_path / "a.parquet.parts").rglob("*.parquet"))[:2]
    second.write_bytes(second.read_bytes()[:-9])
    # Its end is whole, one of its rows is not.
    column = pq.read_metadata(first).row_group(0).column(3)
    content = bytearray(first.read_bytes())
    content[column.data_page_offset + column.total_compressed_size - 5] ^= 0xFF
    first.write_bytes(content)
    with pytest.raises(UserError, match="was damaged"):
        embed(pcl, images, out, PLAIN)
    whole = embed(pcl, images, tmp_path / "whole.parquet", PLAIN)
    assert table(embed(pcl, images, out, PLAIN)).equals(table(whole))


@pytest.mark.usefixtures("few_rows")
def test_unreadable_images_are_refused_or_left_out(pcl: Path, images: Path, tmp_path: Path) -> None:
    own, out = shutil.copytree(images, tmp_path / "images"), tmp_path / "a.parquet"
    broken = [own / "0" / "0.png", own / "2" / "15.png", *(own / "2").glob("9.png")]
    order = table(embed(pcl, own, tmp_path / "whole.parquet", PLAIN))["path"].to_pylist()
    for file in broken[1:]:
        file.write_bytes(b"no image")
    with pytest.raises(
        UserError, match=r"image '.*' cannot be read.*data\.unreadable=skip"
    ) as line:
        embed(pcl, own, out, PLAIN)
    assert "\n" not in str(line.value)
    broken[0].unlink()
    broken[0].write_bytes(b"")
    done = embed(pcl, own, out, {**PLAIN, "data": {"unreadable": "skip"}})
    assert done.unreadable == [p for p in order if Path(p) in broken]
    found = table(done)
    assert found["path"].to_pylist() == [p for p in order if Path(p) not in broken]
    assert [order[i] for i in found["index"].to_pylist()] == found["path"].to_pylist()
    assert embed(pcl, own, out, {**PLAIN, "data": {"unreadable": "skip"}}).unreadable == (
        done.unreadable
    )


@pytest.mark.usefixtures("few_rows")
def test_what_is_computed_before_an_unreadable_image_is_kept(
    pcl: Path, images: Path, tmp_path: Path
) -> None:
    own, out = shutil.copytree(images, tmp_path / "images"), tmp_path / "a.parquet"
    (own / "2" / "9.png").write_bytes(b"no image")
    with pytest.raises(UserError):
        embed(pcl, own, out, PLAIN)
    done = embed(pcl, own, out, {**PLAIN, "data": {"unreadable": "skip"}})
    assert done.resumed == 40
    assert done.images == 47


def test_a_last_part_without_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last images cannot be read, and every earlier row has been written."""
    monkeypatch.setattr(parquet, "ROWS", 8)
    own = made_images(tmp_path / "images", ["a"], 10)
    order = sorted((own / "a").iterdir())
    for file in order[8:]:
        file.write_bytes(b"")
    settings = {**PLAIN, "crop_size": 8, "data": {"unreadable": "skip"}}
    done = embed("pixels", own, tmp_path / "a.parquet", settings)
    assert done.images == 8
    assert done.unreadable == [str(file) for file in order[8:]]


def test_names_need_not_be_utf8(tmp_path: Path) -> None:
    root = tmp_path / "images"
    root.mkdir()
    Image.new("RGB", (8, 8)).save(root / "ok.png")
    (root / "ok.png").rename(os.path.join(root, os.fsdecode(b"\xff.png")))
    done = embed("pixels", root, tmp_path / "a.parquet", {**PLAIN, "crop_size": 8})
    assert table(done)["path"].to_pylist() == [f"{root}/\\xff.png"]


def guide() -> str:
    return (Path(__file__).parents[3] / "docs/guides/use-embeddings.md").read_text()


def test_snippets_of_the_guide(pcl: Path, images: Path, tmp_path: Path) -> None:
    done = embed(pcl, images, tmp_path / "a.parquet", PLAIN)
    names: dict[str, Any] = {}
    for text in re.findall(r"```python\n(.*?)```", guide(), re.DOTALL):
        exec(text, names)
    near = names["nearest"](str(done.out), 7, 3)
    assert near["path"].iloc[0] == table(done)["path"][7].as_py()
    assert near["cosine"].is_monotonic_decreasing
    assert names["made_by"](str(done.out))["method"] == "pcl"
    duckdb = pytest.importorskip("duckdb")
    (query,) = re.findall(r"```sql\n(.*?);\n```", guide(), re.DOTALL)
    query = query.replace("embeddings.parquet", str(done.out)).replace("_100", "_6")
    found = duckdb.sql(query).fetchall()
    assert 1 < len(found) <= 5
    assert sum(row[1] for row in found) <= 48
    assert duckdb.sql(f"select embedding::FLOAT[{done.features_dim}] from '{done.out}'").fetchall()


@pytest.mark.parametrize(
    ("model", "images", "settings", "says"),
    [
        ("pixels", None, {}, "pixels was trained on no images here"),
        ("pixels", "nowhere", {}, "'nowhere': no such folder; give folders of images, or one list"),
        ("pixels", "empty", {}, "'empty': no image in it"),
        ("nowhere", "good", {}, "'nowhere': no such run directory"),
        ("pixels", "good", {"batchsize": 3}, "did you mean 'batch_size'"),
        ("pixels", "good", {"data": {"train_path": "x"}}, "data.train_path"),
        ("pixels", "good", {"device": "abacus"}, "device='abacus'"),
    ],
)
def test_mistakes_are_a_line(
    model: str,
    images: str | None,
    settings: dict[str, Any],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    made_images(Path("good"), ["a"], 1)
    with pytest.raises(UserError, match=says):
        embed(model, images, "a.parquet", settings)
    assert not list(tmp_path.glob("a.parquet*"))


def test_other_files_are_not_replaced(pcl: Path, images: Path, tmp_path: Path) -> None:
    own, other = tmp_path / "own.parquet", tmp_path / "other.parquet"
    own.write_bytes(b"mine")
    pq.write_table(pa.table({"x": [1]}), other)
    for file in (own, other):
        before = file.read_bytes()
        with pytest.raises(UserError, match="was not written by solo-ext embed"):
            embed(pcl, images, file, PLAIN)
        assert file.read_bytes() == before
    with pytest.raises(UserError, match="is a folder; name a file"):
        embed(pcl, images, tmp_path, PLAIN)


def test_two_processes_do_not_write_one_file(pcl: Path, images: Path, tmp_path: Path) -> None:
    from solo_ext.core.files import locked

    parts = tmp_path / "a.parquet.parts"
    parts.mkdir()
    with locked(parts / ".lock"), pytest.raises(UserError, match="by another process"):
        embed(pcl, images, tmp_path / "a.parquet", PLAIN)


def test_missing_packages_are_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"not installed; pip install 'solo-ext\[embed\]'"):
        embed("pixels", "nowhere")


def test_features_that_are_not_finite_are_a_line(tmp_path: Path) -> None:
    class Broken(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.flatten(1) * torch.inf

    images = made_images(tmp_path / "images", ["a"], 3)
    good = module._opened("pixels", module.EmbedRun(crop_size=8), [images])[0]
    model = Model(good.name, Broken(), 192, good.cfg, "x", "broken", None, tmp_path)
    with pytest.raises(UserError, match="3 of 3 rows of features are not finite"):
        embed(model, images, tmp_path / "a.parquet", {**PLAIN, "crop_size": 8})


def test_function_of_the_package_loads_no_torch_before(tmp_path: Path) -> None:
    code = "import solo_ext, sys; solo_ext.embed; print('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "False\n"
    images = made_images(tmp_path / "images", ["a"], 3)
    done = solo_ext.embed("pixels", images, tmp_path / "a.parquet", crop_size=8, num_workers=0)
    assert done.images == 3
