"""Pages as trees, for tests."""

from __future__ import annotations

from dataclasses import dataclass, field
from html.parser import HTMLParser

VOID = {"meta", "br", "hr", "img", "link", "input"}


@dataclass
class Node:
    """An element, with its own text and that of its descendants in order."""

    tag: str
    attrs: dict[str, str]
    parent: Node | None = None
    children: list[Node] = field(default_factory=list)
    text: str = ""

    def all(self, tag: str, css: str = "") -> list[Node]:
        """Returns the descendants of that tag (and class), in document order."""
        found: list[Node] = []
        for child in self.children:
            if child.tag == tag and (not css or css in child.attrs.get("class", "").split()):
                found.append(child)
            found += child.all(tag, css)
        return found


class Tree(HTMLParser):
    """Builds a tree, refusing any tag that is closed out of order or not at all."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.root = self.node = Node("document", {})
        self.feed(page)
        self.close()
        assert self.node is self.root, f"<{self.node.tag}> is never closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self.node = self.node.children[-1]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names)), f"<{tag}> repeats an attribute"
        values = {name: value or "" for name, value in attrs}
        self.node.children.append(Node(tag, values, self.node))

    def handle_endtag(self, tag: str) -> None:
        assert self.node.tag == tag, f"</{tag}> closes <{self.node.tag}>"
        assert self.node.parent is not None
        self.node = self.node.parent

    def handle_data(self, data: str) -> None:
        node: Node | None = self.node
        while node is not None:
            node.text += data
            node = node.parent


def parse(page: str) -> Node:
    return Tree(page).root
