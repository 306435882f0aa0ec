"""Tables of methods and losses, and putting them into solo-learn."""

import math
import re
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

import solo_ext
from solo_ext import host, plugin
from solo_ext.core.errors import UserError
from solo_ext.core.registry import Entry, Registry
from solo_ext.lab.training.prepare import prepare
from solo_ext.losses import LOSSES, debiased_loss_func, nt_xent_loss_func
from solo_ext.methods import METHODS, Debiased


def first() -> None:
    """A target."""


def second() -> None:
    """Another one."""


@pytest.fixture
def registry() -> Registry[Any]:
    return Registry("loss")


def test_a_table_by_name(registry: Registry[Any]) -> None:
    assert registry.register("one", paper="A Paper", year=2020, arxiv="2007.00224")(first) is first
    origin = first.__module__.split(".")[0]
    assert registry["one"] == Entry("one", first, "A Paper", 2020, "2007.00224", origin)
    registry.add(Entry("a", second, origin="ours"))
    assert list(registry) == ["one", "a"]
    assert [entry.target for entry in registry.values()] == [first, second]
    with pytest.raises(ValueError, match="'a' of theirs is already registered by ours"):
        registry.add(Entry("a", first, origin="theirs"))
    # The same target may come again.
    registry.add(Entry("a", second, origin="ours"))
    assert len(registry) == 2
    with pytest.raises(UserError, match="unknown loss 'onne'; did you mean 'one'"):
        registry["onne"]


@pytest.fixture
def restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[host.Host]:
    """The host; what the test puts into its tables and ours is taken out again."""
    plugin.register()
    loaded = host.load()
    losses = loaded.solo.losses
    plugin._tell.cache_clear()
    tables: list[dict[str, Any]] = [METHODS, LOSSES, loaded.methods, vars(losses)]
    before, exported = [dict(table) for table in tables], list(losses.__all__)
    yield loaded
    for table, held in zip(tables, before, strict=True):
        table.clear()
        table.update(held)
    losses.__all__[:] = exported


def declare(monkeypatch: pytest.MonkeyPatch, *points: EntryPoint) -> None:
    """Makes these the entry points of the environment."""

    def find(*, group: str) -> list[EntryPoint]:
        return [point for point in points if point.group == group]

    monkeypatch.setattr(plugin, "entry_points", find)


def loss_point(name: str, value: str) -> EntryPoint:
    return EntryPoint(name, value, plugin.LOSS_GROUP)


def test_fills_solo_learn(restored: host.Host) -> None:
    import solo.losses
    import solo.methods

    assert restored.methods is solo.methods.METHODS
    assert solo.methods.METHODS["debiased"] is Debiased
    assert solo.losses.debiased_loss_func is debiased_loss_func
    assert solo.losses.nt_xent_loss_func is nt_xent_loss_func
    for name in LOSSES:
        assert solo.losses.__all__.count(name) == 1
    names: dict[str, Any] = {}
    exec("from solo.losses import *", names)
    assert names["debiased_loss_func"] is debiased_loss_func
    # solo-learn's own stay.
    assert names["simclr_loss_func"].__module__.startswith("solo.")
    assert restored.methods["simclr"].__module__.startswith(("solo.", "solo_ext.host."))


def test_is_idempotent(restored: host.Host) -> None:
    losses = restored.solo.losses
    before = dict(restored.methods), dict(vars(losses)), list(losses.__all__)
    for _ in range(2):
        solo_ext.register()
    assert (dict(restored.methods), dict(vars(losses)), list(losses.__all__)) == before


def test_the_hosts_own_stay_and_ours_have_another_name(
    restored: host.Host, caplog: pytest.LogCaptureFixture
) -> None:
    """As after this plugin's methods have come into solo-learn."""
    own = restored.methods["simclr"], restored.solo.losses.simclr_loss_func
    METHODS.add(Entry("simclr", first, origin="somebody"))
    LOSSES.add(Entry("simclr_loss_func", first, origin="somebody"))
    for _ in range(2):
        plugin.register()
    assert (restored.methods["simclr"], restored.solo.losses.simclr_loss_func) == own
    assert restored.methods["somebody/simclr"] is first
    message = "solo-learn has a method 'simclr' of its own, which stays; somebody's is"
    assert caplog.text.count(message) == 1
    assert not any(name.startswith("solo_ext/") for name in restored.methods)


def test_loads_entry_points(restored: host.Host, monkeypatch: pytest.MonkeyPatch) -> None:
    declare(
        monkeypatch,
        loss_point("their_loss_func", "math:hypot"),
        EntryPoint("their_method", "collections:Counter", plugin.METHOD_GROUP),
        EntryPoint("no_business_of_ours", "nowhere:nothing", "console_scripts"),
    )
    import collections

    for _ in range(2):
        plugin.register()
    assert restored.solo.losses.their_loss_func is math.hypot
    assert restored.solo.losses.__all__.count("their_loss_func") == 1
    assert restored.methods["their_method"] is collections.Counter
    assert LOSSES["their_loss_func"].origin == "math"
    assert METHODS["their_method"].origin == "collections"
    assert "no_business_of_ours" not in METHODS


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("a_module_that_is_not_there:loss", "No module named 'a_module_that_is_not_there'"),
        ("math:no_such_function", "no_such_function"),
        ("broken_module:loss", "no GPU today"),
        ("exits:loss", "needs a licence"),
        ("math:pi", "it is 3.14"),
    ],
)
@pytest.mark.parametrize("group", [plugin.METHOD_GROUP, plugin.LOSS_GROUP])
def test_a_broken_entry_point_is_named(
    restored: host.Host,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    make_config: Any,
    caplog: pytest.LogCaptureFixture,
    value: str,
    problem: str,
    group: str,
) -> None:
    (tmp_path / "broken_module.py").write_text("raise RuntimeError('no GPU today')\n")
    (tmp_path / "exits.py").write_text("import sys; sys.exit('needs a licence')\n")
    monkeypatch.syspath_prepend(tmp_path)
    declare(monkeypatch, EntryPoint("theirs", value, group))
    plugin.register()
    message = f"entry point 'theirs' = '{value}' of group {group} cannot be loaded: "
    assert caplog.text.count(message) == 1
    assert "debiased" in restored.methods
    table = METHODS if group == plugin.METHOD_GROUP else LOSSES
    with pytest.raises(UserError, match=problem):
        table["theirs"].target()
    if group == plugin.METHOD_GROUP:
        with pytest.raises(UserError, match=problem):
            prepare(make_config("theirs"))


def test_an_entry_point_does_not_take_a_name_that_is_taken(
    restored: host.Host, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By ours, or by another entry point."""
    declare(
        monkeypatch,
        EntryPoint("debiased", "collections:Counter", plugin.METHOD_GROUP),
        *(loss_point(name, "math:hypot") for name in ("nt_xent_loss_func", "same")),
        loss_point("same", "math:dist"),
    )
    plugin.register()
    for name, owner in (
        ("debiased", "solo_ext"),
        ("nt_xent_loss_func", "solo_ext"),
        ("same", "math"),
    ):
        assert re.search(f"'{name}'.*already registered by {owner}", caplog.text)
    assert restored.methods["debiased"] is Debiased
    assert restored.solo.losses.nt_xent_loss_func is nt_xent_loss_func
    assert LOSSES["same"].target is math.hypot
