"""Pages show what comes from configs, files and names of classes, and make no markup of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from solo_ext.lab.cli.main import main
from solo_ext.lab.evaluation.suite import render_suite
from solo_ext.lab.training.prepare import prepare
from solo_ext.lab.training.pretrain import pretrain
from tests.page_tree import Node, parse

MakeConfig = Callable[..., dict[str, Any]]
HOSTILE = (
    "</script></title></style>--><script>bad()</script><img src=x onerror=bad()>"
    "\"'><a href='javascript:bad()'>&lt;b&gt;"
)


def every_node(node: Node) -> list[Node]:
    return [node, *(found for child in node.children for found in every_node(child))]


def assert_harmless(page: str) -> None:
    """Nothing in it runs, loads or leads anywhere."""
    nodes = every_node(parse(page))
    assert not {"script", "iframe", "object", "embed", "base", "form"} & {n.tag for n in nodes}
    for node in nodes:
        assert not [name for name in node.attrs if name.startswith("on")]
        assert not node.attrs.get("src", "data:").startswith(("x", "http", "javascript"))
        assert "href" not in node.attrs or node.attrs["href"].startswith("#")


def hostile(value: Any, keep: tuple[str, ...] = (), key: str = "") -> Any:
    """A record whose every text, and every key that is free, is hostile."""
    if isinstance(value, dict):
        return {k: hostile(v, keep, k) for k, v in value.items()}
    if isinstance(value, list):
        return [hostile(v, keep, key) for v in value]
    return HOSTILE if isinstance(value, str) and key not in keep else value


@pytest.fixture(scope="module")
def record(make_config: MakeConfig, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a suite writes."""
    run = tmp_path_factory.mktemp("pages") / "run"
    data = {"val_path": make_config("simclr")["data"]["train_path"]}
    pretrain(prepare(make_config("simclr", data=data)), run_dir=run, show_progress=False)
    words = ["protocols=[knn,clustering]", "knn.k=[1]", "device=cpu"]
    assert main(["eval", "suite", str(run), *words]) == 0
    found: dict[str, Any] = json.loads((run / "eval_suite.json").read_text())
    return found


def test_suite(record: dict[str, Any], tmp_path: Path) -> None:
    assert_harmless(render_suite(record, tmp_path))
    spoiled = hostile(record, keep=("status",))
    entry = spoiled["entries"][0]
    entry["settings"] = {HOSTILE: HOSTILE}
    entry["results"] = [{HOSTILE: HOSTILE, "picture": HOSTILE}]
    entry["headline"] = {HOSTILE: 1.0}
    spoiled["entries"].append({**entry, "status": "failed", "error": HOSTILE})
    spoiled["environment"] = {HOSTILE: HOSTILE}
    page = render_suite(spoiled, tmp_path)
    assert_harmless(page)
    assert "<script" not in page
    # It is there to be read all the same.
    assert parse(page).all("h1")[0].text == f"Evaluation of {HOSTILE}"
    assert page.count("bad()") > 20


@pytest.mark.parametrize(
    "name", ["../secret.png", "/etc/passwd", "a/b.png", "link.png", "x.svg", "x.html"]
)
def test_pictures_of_other_folders_are_not_shown(
    name: str, record: dict[str, Any], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    (folder / "a").mkdir(parents=True)
    for place in (
        tmp_path / "secret.png",
        folder / "a" / "b.png",
        folder / "x.svg",
        folder / "x.html",
    ):
        place.write_bytes(b"secret")
    (folder / "link.png").symlink_to(tmp_path / "secret.png")
    entry = {**record["entries"][0], "results": [{"picture": name}]}
    page = render_suite({**record, "entries": [entry]}, folder)
    assert not parse(page).all("img")
