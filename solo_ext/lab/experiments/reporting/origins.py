"""What ran where, and how each number was measured."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from solo_ext.lab.experiments.records import Record
from solo_ext.lab.experiments.reporting.blocks import Table
from solo_ext.lab.experiments.reporting.results import Results
from solo_ext.lab.experiments.reporting.wording import DASH


def environments_table(records: Sequence[Record]) -> Table:
    """A line for every distinct machine, set of versions, code and number of threads."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        same = [record["environment"], record["code"], record["threads"]]
        groups.setdefault(json.dumps(same, sort_keys=True), []).append(record)
    lines = []
    for held in sorted(groups.values(), key=lambda g: min(r["finished"] for r in g)):
        found, code = held[0]["environment"], held[0]["code"]
        finished = sorted(r["finished"][:10] for r in held)
        lines.append(
            [
                str(len(held)),
                _host(found),
                hardware(found),
                str(held[0]["threads"]),
                _code(code),
                " to ".join(dict.fromkeys((finished[0], finished[-1]))),
                _versions(found),
            ]
        )
    head = ["Runs", "Host", "Hardware", "Threads", "Code", "Finished", "Versions"]
    return Table(head, lines, numeric=frozenset({3}))


def hardware(environment: Mapping[str, Any]) -> str:
    """Such as ``AMD EPYC, 2 cores, NVIDIA H200``."""
    parts = [str(environment.get("processor") or DASH)]
    if environment.get("cores"):
        parts.append(f"{environment['cores']} cores")
    return ", ".join([*parts, *map(str, environment.get("gpus") or ["no GPU"])])


def machines(records: Sequence[Record]) -> set[str]:
    """Distinct hardware and threads of trained runs: their seconds are not comparable."""
    return {
        f"{hardware(r['environment'])}, {r['threads']} threads"
        for r in records
        if r["seconds"] is not None
    }


def protocols_table(records: Sequence[Record]) -> Table:
    """Settings of every protocol, defaults filled in, and how many runs were measured so."""
    # Here, because it imports torch, which nothing else in a report needs.
    from solo_ext.lab.evaluation.evaluate import PROTOCOLS

    counts: dict[tuple[str, str], int] = {}
    for record in records:
        for name, given in record["evaluation"].items():
            entry = name, _settings(PROTOCOLS.get(name), given)
            counts[entry] = counts.get(entry, 0) + 1
    lines = [
        [name, PROTOCOLS[name].title if name in PROTOCOLS else DASH, settings or DASH, str(count)]
        for (name, settings), count in counts.items()
    ]
    return Table(["Protocol", "What", "Settings", "Runs"], lines, numeric=frozenset({3}))


def rows_table(results: Results) -> Table:
    """What every row trains."""
    lines = []
    for name, row in results.settings.rows.items():
        lines.append(
            [
                results.label(name),
                name,
                row.config or row.baseline or DASH,
                ", ".join(row.changes) or DASH,
                ", ".join(row.bases) or DASH,
            ]
        )
    return Table(["Row", "Name", "Config", "Changes", "Compared with"], lines)


def _host(environment: Mapping[str, Any]) -> str:
    host = environment.get("host") or {}
    if not isinstance(host, Mapping):
        return str(host)
    names = (host.get("generation"), host.get("version"))
    said = dict.fromkeys(str(v) for v in names if v)
    finger = f" ({host['fingerprint']})" if host.get("fingerprint") else ""
    return f"solo-learn {', '.join(said)}{finger}" if said else DASH


def _code(code: Mapping[str, Any]) -> str:
    parts = [str(code.get("version") or DASH)]
    if code.get("commit"):
        parts.append(str(code["commit"])[:12])
    if code.get("changed"):
        parts.append("with changes that are not committed")
    return ", ".join(parts)


def _versions(environment: Mapping[str, Any]) -> str:
    packages = environment.get("packages") or {}
    named = {"python": environment.get("python"), **packages, "CUDA": environment.get("cuda")}
    return ", ".join(f"{name} {version}" for name, version in named.items() if version)


def _settings(protocol: type[BaseModel] | None, given: Mapping[str, Any] | None) -> str:
    fields = {} if protocol is None else protocol.model_fields
    defaults = {
        name: field.get_default(call_default_factory=True)
        for name, field in fields.items()
        if not field.is_required()
    }
    values = defaults | dict(given or {})
    return ", ".join(f"{key} {_plain(value)}" for key, value in values.items())


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)
