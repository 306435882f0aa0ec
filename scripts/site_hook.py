"""What MkDocs does with our pages before it renders them; ``mkdocs.yml`` names this file.

Pages are written so that links work in the repository too. Five things are made here, from the
sources and without importing torch:

- ``<!-- settings: solo_ext.methods.pcl.PCLKwargs -->``: the table of a class of settings;
- ``<!-- command line -->``: the options of every command;
- ``<!-- rows: pcl; mocov2plus -->``: these rows of the tables on the page of results;
- a fence of ``math``: MathML, which browsers show without a script;
- a notebook: a page of its cells and of what they showed when ``scripts/notebooks.py`` ran them.

Pages outside of ``docs/`` that ours link to (the README, results, ...) become part of the site.
"""

from __future__ import annotations

import argparse
import ast
import functools
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe
from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
START = "README.md"
"""Where a reader begins; what it and the pages in ``docs/`` lead to is on the site."""
RESULTS = ROOT / "docs" / "benchmarks" / "index.md"
LINK = re.compile(r"\[([^\]]*)\]\(([^)\s#:]+)(#[^)\s]*)?\)")
"""Text, path and anchor of a link; addresses of the web have a colon, and are none."""
NOTEBOOK = ".ipynb"
FENCE = re.compile(r"(```.*?```)", re.DOTALL)


class Roles(griffe.Extension):
    """Turns what docstrings have of reStructuredText into Markdown."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrites the docstring of a module, class, function or attribute."""
        if obj.docstring:
            text = re.sub(r":[a-z]+:`~[^`]*\.([^`.]+)`", r"`\1`", obj.docstring.value)
            text = re.sub(r":[a-z]+:`([^`]+)`", r"`\1`", text)
            text = re.sub(r"^(\s*)Example:$", r"\1Examples:", text, flags=re.MULTILINE)
            obj.docstring.value = re.sub(r"::$", ":", text, flags=re.MULTILINE)


def on_config(config: MkDocsConfig) -> None:
    """Adds the fence of formulas."""
    fences = config.mdx_configs.setdefault("pymdownx.superfences", {})
    fences["custom_fences"] = [{"name": "math", "class": "math", "format": _formula}]


def _formula(source: str, *_: Any, **__: Any) -> str:
    lines = "".join(convert(line, display="block") for line in source.split(r"\\"))
    return f'<div class="formula">{lines}</div>'


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds what pages link to outside of ``docs/``, at its path in the repository."""
    waiting = [START, *(f"docs/{file.src_uri}" for file in files.documentation_pages())]
    seen = set(waiting)
    while waiting:
        path = waiting.pop()
        if not path.startswith("docs/"):
            files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
        if path.endswith(".md"):
            prose = FENCE.sub("", (ROOT / path).read_text())
            targets = {_in_repository(found[2], path) for found in LINK.finditer(prose)}
            waiting += [target for target in targets - seen if (ROOT / target).is_file()]
            seen |= targets
    for file in [file for file in files if file.src_uri.endswith(NOTEBOOK)]:
        page = file.src_uri.removesuffix(NOTEBOOK) + ".md"
        files.append(File.generated(config, page, content=_notebook(ROOT / "docs" / file.src_uri)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Fills in what is made from sources, and makes links those of the site."""
    site = page.file.src_uri
    source = f"docs/{site}" if (ROOT / "docs" / site).exists() else site

    def link(found: re.Match[str]) -> str:
        text, written, anchor = found.groups()
        target = _in_repository(written, source)
        if (ROOT / target).is_dir():
            # A folder is no page; its name stays.
            return text
        if target.endswith(NOTEBOOK):
            target = target.removesuffix(NOTEBOOK) + ".md"
        target = os.path.relpath(target.removeprefix("docs/"), os.path.dirname(site) or ".")
        return f"[{text}]({target}{anchor or ''})"

    parts = FENCE.split(markdown)
    parts[::2] = (LINK.sub(link, prose) for prose in parts[::2])
    made = {"settings": _settings, "command line": _command_line, "rows": _result_rows}

    def fill(found: re.Match[str]) -> str:
        return made[found[1]]((found[2] or "").strip())

    return re.sub(rf"<!-- ({'|'.join(made)})(?:: (.*?))? -->", fill, "".join(parts))


def _in_repository(link: str, page: str) -> str:
    """The path that a link of a page means, from the root of the repository."""
    return os.path.normpath(os.path.join(os.path.dirname(page), link))


# Notebooks.


def _notebook(file: Path) -> str:
    """The page of a notebook: its cells, and below each what it showed."""
    parts, heading = [], ""
    for cell in json.loads(file.read_text())["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            heading = [heading, *re.findall("^#+ (.+)", source, flags=re.MULTILINE)][-1]
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        shown = [o.get("data", {"text/plain": o.get("text", "")}) for o in cell["outputs"]]
        pictures = ["".join(o["image/png"]).strip() for o in shown if "image/png" in o]
        texts = ["".join(o["text/plain"]) for o in shown if "image/png" not in o]
        if texts:
            parts.append("```{.text .shown}\n" + "".join(texts).strip() + "\n```")
        # The heading above a picture describes it.
        parts += [f"![{heading}](data:image/png;base64,{picture})" for picture in pictures]
    # The address of the page ends in a folder, which the file lies beside.
    parts.append(f'<a href="../{file.name}" download>Download this notebook</a>')
    return "\n\n".join(parts)


# Settings.


@functools.cache
def _package() -> griffe.Object:
    return griffe.load(
        "solo_ext",
        search_paths=[str(ROOT)],
        docstring_parser="google",
        allow_inspection=False,
        extensions=griffe.load_extensions(Roles),
    )


def _settings(path: str) -> str:
    rows = list(_rows(_package().modules_collection[path], {}, ""))
    width = 4 if any(text for *_, text in rows) else 3
    lines = ["| key | default | allowed | |", "|---|---|---|---|"]
    for key, *cells in rows:
        # A pipe would end the cell.
        cells = [f"`{key}`", *(cell.replace("\n", " ").replace("|", r"\|") for cell in cells)]
        lines.append("| " + " | ".join(cells[:width]) + " |")
    if width == 3:
        lines[:2] = ["| key | default | allowed |", "|---|---|---|"]
    return "\n".join(lines)


def _rows(
    section: griffe.Class, preset: dict[str, ast.expr], prefix: str
) -> Iterator[tuple[str, str, str, str]]:
    """Key, default, allowed values and meaning of each setting of a class and its bases."""
    fields: dict[str, griffe.Attribute] = {}
    meaning: dict[str, str] = {}
    for base in reversed([section, *section.mro()]):
        for name, member in base.members.items():
            if (
                member.is_attribute
                and member.annotation
                and "ClassVar" not in str(member.annotation)
            ):
                fields[name] = member
        for part in base.docstring.parsed if base.docstring else []:
            if part.kind is griffe.DocstringSectionKind.attributes:
                meaning |= {item.name: item.description for item in part.value}
    for name, field in fields.items():
        value = preset.get(name) or (
            ast.parse(str(field.value)).body[0].value if field.value else None
        )
        nested = _resolved(str(field.annotation), field)
        if isinstance(nested, griffe.Class):
            keywords = {k.arg: k.value for k in getattr(value, "keywords", [])}
            words = nested.docstring.value.partition("\n\n")[0] if nested.docstring else ""
            if words.startswith("``"):
                yield f"{prefix}{name}", "", "section", words.partition("``: ")[2]
            yield from _rows(nested, keywords, f"{prefix}{name}.")
        else:
            default = "must be given" if value is None else f"`{_yaml(value)}`"
            allowed = _allowed(ast.parse(str(field.annotation), mode="eval").body, field)
            yield f"{prefix}{name}", default, allowed, meaning.get(name, "")


def _resolved(name: str, field: griffe.Attribute) -> griffe.Object | None:
    """What a name in a module stands for, if that is in the package."""
    try:
        found = _package().modules_collection[field.module.resolve(name)]
        return found.final_target if found.is_alias else found
    except (KeyError, griffe.GriffeError):
        return None


def _yaml(value: ast.expr) -> str:
    if isinstance(value, ast.List):
        return f"[{', '.join(map(_yaml, value.elts))}]"
    text = ast.unparse(value)
    return {"None": "null", "True": "true", "False": "false"}.get(text, text.strip("'"))


PLAIN = {
    "int": "whole number",
    "float": "number",
    "str": "text",
    "bool": "`true` or `false`",
    "Any": "anything",
    "ByteSize": "size such as `200gb`",
    "dict": "mapping",
}
SIGNS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}


def _allowed(node: ast.expr, field: griffe.Attribute) -> str:
    """The values of a type, in words."""
    match node:
        case ast.Constant(None):
            return "`null`"
        case ast.BinOp(left, ast.BitOr(), ast.Subscript(ast.Name("SerializeAsAny"), _)):
            return _allowed(left, field)
        case ast.BinOp(left, ast.BitOr(), right):
            return f"{_allowed(left, field)}, or {_allowed(right, field)}"
        case ast.Subscript(ast.Name("Literal"), values):
            listed = values.elts if isinstance(values, ast.Tuple) else [values]
            return ", ".join(f"`{_yaml(value)}`" for value in listed)
        case ast.Subscript(ast.Name("Annotated"), ast.Tuple([kind, *limits])):
            return " ".join([_allowed(kind, field), *_limits(limits)])
        case ast.Subscript(ast.Name("list" | "Sequence"), of):
            return f"list of {_allowed(of, field)}"
        case ast.Subscript(ast.Name(name), _) | ast.Name(name):
            if name in PLAIN:
                return PLAIN[name]
            named = _resolved(name, field)
            if isinstance(named, griffe.Class):
                return "mapping"
            if isinstance(named, griffe.Attribute):
                return _allowed(ast.parse(str(named.value), mode="eval").body, named)
    return f"`{ast.unparse(node)}`"


def _limits(limits: list[ast.expr]) -> Iterator[str]:
    for limit in limits:
        match limit:
            case ast.Call(ast.Name(sign), [ast.Constant(value)]) if sign.lower() in SIGNS:
                yield f"{SIGNS[sign.lower()]} {value}"
            case ast.Call(ast.Name("Field"), [], keywords):
                for word in keywords:
                    if word.arg in SIGNS:
                        yield f"{SIGNS[word.arg]} {ast.unparse(word.value)}"


# The command line.


def _command_line(_: str) -> str:
    sys.path.insert(0, str(ROOT))
    from solo_ext.lab.cli.main import build_parser

    return "\n".join(_command(build_parser()))


def _command(parser: argparse.ArgumentParser, text: str = "") -> Iterator[str]:
    groups = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    if not groups:
        yield f"\n## `{parser.prog}`\n\n{text}.\n\n| option | |\n|---|---|"
        for action in parser._actions:
            if action.dest != "help":
                names = [f"`{word}`" for word in action.option_strings] or [
                    f"`{action.metavar or action.dest}`"
                ]
                yield f"| {', '.join(names)} | {action.help or ''} |".replace("%%", "%")
    for group in groups:
        texts = {choice.dest: choice.help or "" for choice in group._choices_actions}
        for name, child in group.choices.items():
            yield from _command(child, texts[name].capitalize())


# Results.


def _result_rows(labels: str) -> str:
    """The rows of these labels, of each table on the page of results."""
    wanted = [label.strip() for label in labels.split(";")]
    parts: list[str] = []
    for title, table in re.findall(r"^\*\*(.+?)\*\*.*\n\n((?:\|.*\n)+)", RESULTS.read_text(), re.M):
        head, line, *rows = table.splitlines()
        kept = [row for row in rows if row.split("|")[1].strip() in wanted]
        if kept:
            parts.append(
                "\n".join((f"**{title}**\n", head, line, *(row.replace("**", "") for row in kept)))
            )
    if not parts:
        raise PluginError(f"rows: none of {RESULTS.name} is called {labels!r}")
    return "\n\n".join(parts)
