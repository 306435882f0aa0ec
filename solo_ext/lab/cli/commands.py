"""Implements the commands; each prints text for people, or with ``--json`` one JSON document."""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from solo_ext.core.errors import NoSuchRun, UserError, show_messages
from solo_ext.lab.cli.output import progress_bars, say, show

_MOST_NAMES = 10
"""Most unreadable images that are named on the terminal."""
_NUMBERS = ("RANK", "LOCAL_RANK", "GROUP_RANK", "NODE_RANK", "SLURM_PROCID")


def run(args: argparse.Namespace) -> int:
    """Runs a parsed command line.

    Returns:
        0, or 1 if a part of the work failed; the other parts were done.

    Raises:
        UserError: the command cannot run, or its result was shown but could not be written.

    >>> import io
    >>> from solo_ext.lab.cli.main import build_parser
    >>> with contextlib.redirect_stdout(io.StringIO()):
    ...     code = run(build_parser().parse_args(["losses", "--json"]))
    >>> code
    0
    """
    # With --json standard output holds only the document; what Lightning prints goes to stderr.
    with contextlib.redirect_stdout(sys.stderr if args.json else sys.stdout):
        document = _COMMANDS[args.command](args)
    if args.json and _first_process():
        print(json.dumps(document, indent=1, default=str))
    if not isinstance(document, dict):
        return 0
    if "not_written" in document:
        raise UserError(document["not_written"])
    return 1 if document.get("failed") else 0


def _first_process() -> bool:
    # Check all variables: processes that Lightning starts inherit the SLURM_PROCID of their parent.
    return all(os.environ.get(name, "0") == "0" for name in _NUMBERS)


def _methods(args: argparse.Namespace) -> Any:
    from solo_ext.host import detect
    from solo_ext.lab.cli.listing import listed_methods

    host = detect()
    rows = listed_methods(host)
    show(args, f"methods (solo-learn {host.generation})", rows)
    return rows


def _losses(args: argparse.Namespace) -> Any:
    from solo_ext.lab.cli.listing import listed_losses

    rows = listed_losses()
    show(args, "losses, in solo_ext.losses and solo.losses", rows)
    return rows


def _doctor(args: argparse.Namespace) -> Any:
    from solo_ext.lab.cli.doctor import diagnose, lines

    found = diagnose()
    for line in lines(found):
        say(args, line)
    return found


def _pretrain(args: argparse.Namespace) -> Any:
    from solo_ext.config.check import check_sections
    from solo_ext.config.compose import compose
    from solo_ext.lab.cli.names import check_names
    from solo_ext.lab.training.names import check_method_of_images

    show_messages()
    images, overrides = _images_and_overrides(args.overrides)
    _check_source(args, images)
    if args.resume is not None:
        _check_there(args.resume)
    config: dict[str, Any] = {}
    if images and args.method is not None:
        check_method_of_images(args.method)
    if not images and args.resume is None:
        folder = Path(args.config_path) if args.config_path else None
        config = compose(args.config_name, overrides, folder)
        # Before what follows imports torch, Lightning and solo-learn.
        check_sections(config)
        check_names(config)

    from solo_ext.lab.training.prepare import check_folder, prepare
    from solo_ext.lab.training.pretrain import pretrain
    from solo_ext.lab.training.run_dir import check_run_dir

    if args.run_dir is not None:
        check_folder("--run-dir", args.run_dir)
        if _first_process():
            check_run_dir(Path(args.run_dir))
    run_dir = Path(args.run_dir) if args.run_dir else None
    first = _first_process()

    def tell(line: str) -> None:
        if first:
            say(args, line)

    if images:
        from solo_ext.lab.end_to_end import pretrain_images
        from solo_ext.lab.training.own_images import plan_run
        from solo_ext.pretrained.weights import check_start

        if args.dry_run:
            plan = plan_run(images, args.method, overrides, teacher=args.teacher)
            for line in plan.lines():
                tell(line)
            prepared = prepare(plan.config)
            check_start(prepared.run.backbone, prepared.method(prepared.cfg).backbone)
            return plan.config
        given = images, args.method, overrides
        result: Any = pretrain_images(
            *given, teacher=args.teacher, run_dir=run_dir, force=args.force, say=tell
        )
    elif args.resume is not None:
        from solo_ext.lab.end_to_end import go_on

        result = go_on(Path(args.resume), overrides, force=args.force, say=tell)
    else:
        result = pretrain(prepare(config), run_dir=run_dir, force=args.force)
    speed = f"{result.seconds:.1f} s, {result.images_per_second:.0f} images/s"
    tell(f"run directory  {result.run_dir}")
    tell(f"{result.epochs} {'epoch' if result.epochs == 1 else 'epochs'}, {speed}")
    if getattr(result, "model", None) is not None:
        tell(f"model          {result.model}")
        tell(f"load           {result.load}")
        if result.report is not None:
            tell(f"page           {result.report}")
    tell(f"next           {_next_command(result.run_dir)}")
    return vars(result)


def _next_command(run_dir: Path) -> str:
    """A command that measures the run: kNN where there are labelled images to measure on."""
    from solo_ext.lab.training.run_dir import read_config

    data = read_config(run_dir)["data"]
    measured = data["val_path"] or data["holdout"]
    protocol = "knn" if measured and not data["no_labels"] else "suite"
    return f"solo-ext eval {protocol} {shlex.quote(str(run_dir))}"


def _images_and_overrides(words: list[str]) -> tuple[list[str], list[str]]:
    """Splits words into paths and ``key=value``; a path that exists may contain ``=``."""

    def is_override(word: str) -> bool:
        path = word.startswith(("/", ".", "~/")) or os.path.exists(word)
        return not path and ("=" in word or word.startswith("~"))

    overrides = [word for word in words if is_override(word)]
    return [os.path.expanduser(w) for w in words if w not in overrides], overrides


def _check_source(args: argparse.Namespace, images: list[str]) -> None:
    """Refuses a command line that names no images and no config, or both."""
    named = {"--config-name": args.config_name, "--resume": args.resume}
    chosen = [option for option, value in named.items() if value is not None]
    if images and chosen:
        raise UserError(
            f"{chosen[0]} names its images: leave out {images[0]!r}; for a setting write key=value"
        )
    if not images and not chosen:
        raise UserError(
            "nothing to train on; name a folder of images, a config with --config-name, or a run "
            "with --resume"
        )
    if args.resume is not None:
        for name in ("config_path", "run_dir"):
            if getattr(args, name):
                raise UserError(f"--resume names the run and its config: leave out {name!r}")
    for option in ("dry_run", "teacher"):
        if getattr(args, option) and not images:
            raise UserError(f"--{option.replace('_', '-')} is for a folder of images: name one")


def _check_there(run: str) -> None:
    """Refuses a missing run or checkpoint before torch is imported."""
    if not (run == "pixels" or run.startswith("timm/") or os.path.lexists(run)):
        raise NoSuchRun(run)


def _eval(args: argparse.Namespace) -> Any:
    from omegaconf import OmegaConf

    from solo_ext.config.compose import apply_overrides, parse
    from solo_ext.lab.evaluation.names import SUITE, check_protocol

    settings = OmegaConf.create({})
    apply_overrides(settings, parse(args.overrides))
    plain: Any = OmegaConf.to_container(settings)
    # Before what follows imports torch.
    check_protocol(args.protocol, plain)
    _check_there(args.run)

    from solo_ext.lab.evaluation.evaluate import evaluate
    from solo_ext.lab.evaluation.suite import evaluate_suite

    with progress_bars() as progress:
        if args.protocol == SUITE:
            record = evaluate_suite(args.run, plain, progress)
        else:
            record = evaluate(args.run, args.protocol, plain, progress)
    epoch = "" if record["epoch"] is None else f", epoch {record['epoch']}"
    title = f"{args.protocol}: {record['method'] or record['run']}{epoch}"
    present = _show_suite if args.protocol == SUITE else _keep_record
    return present(args, title, record)


def _show_suite(args: argparse.Namespace, title: str, record: dict[str, Any]) -> dict[str, Any]:
    from solo_ext.lab.evaluation.suite import PAGE, left_out_line

    rows = [
        {
            "protocol": entry["protocol"],
            "seconds": entry["seconds"],
            "result": entry["error"]
            or "  ".join(f"{k} {v:.4g}" for k, v in entry["headline"].items()),
        }
        for entry in record["entries"]
    ]
    if rows:
        show(args, title, rows)
        _say_notes(args, record)
        if record["left_out"]:
            say(args, left_out_line(record["left_out"]))
        say(args, f"report  {Path(record['folder']) / PAGE}")
    return record


def _say_notes(args: argparse.Namespace, record: dict[str, Any]) -> None:
    for note in record["notes"]:
        say(args, f"note    {note}")


def _keep_record(args: argparse.Namespace, title: str, record: dict[str, Any]) -> dict[str, Any]:
    from solo_ext.core.files import write_text

    if not record["results"]:
        # This process only helped to extract features.
        return record
    show(args, title, record["results"])
    _say_notes(args, record)
    folder = Path(record["folder"])
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / f"eval_{args.protocol}.json", json.dumps(record, indent=1))
    except OSError as error:
        why = f"the record was not written to {str(folder)!r}: {error}; the numbers are those shown"
        return {**record, "not_written": f"{why}, out=FOLDER names another place"}
    return record


def _embed(args: argparse.Namespace) -> Any:
    _check_there(args.run)
    from omegaconf import OmegaConf

    from solo_ext.config.compose import apply_overrides, parse
    from solo_ext.lab.evaluation.embed import embed, open_in_atlas, refuse_without_atlas

    if args.atlas:
        refuse_without_atlas()
    images, overrides = _images_and_overrides(args.overrides)
    settings = OmegaConf.create({})
    apply_overrides(settings, parse(overrides))
    plain: Any = OmegaConf.to_container(settings)
    show_messages()
    with progress_bars() as progress:
        done = embed(args.run, images, args.out, plain, progress)
    shown = done.unreadable[:_MOST_NAMES]
    for name in shown:
        say(args, f"left out  {name}")
    if len(done.unreadable) > len(shown):
        say(args, f"left out  {len(done.unreadable) - len(shown)} more, which --json names")
    of = f", {', '.join(done.clusters)} clusters" if done.clusters else ""
    say(args, f"written   {done.out}: {done.images} images, {done.features_dim} features{of}")
    say(args, f"read      pandas.read_parquet({str(done.out)!r})")
    if args.atlas:
        open_in_atlas(done.out)
    return vars(done)


def _report(args: argparse.Namespace) -> Any:
    _check_there(args.run)
    from omegaconf import OmegaConf

    from solo_ext.config.compose import apply_overrides, parse
    from solo_ext.lab.report.run_page import report

    images, overrides = _images_and_overrides(args.overrides)
    settings = OmegaConf.create({})
    apply_overrides(settings, parse(overrides))
    plain: Any = OmegaConf.to_container(settings)
    show_messages()
    out = Path(args.out) if args.out else None
    with progress_bars() as progress:
        page = report(
            args.run, images, out=out, settings=plain, samples=args.samples, progress=progress
        )
    say(args, f"report  {page}")
    return {"report": page}


def _export(args: argparse.Namespace) -> Any:
    _check_there(args.run)
    from solo_ext.pretrained.export import export

    done = export(Path(args.run), args.format, Path(args.out) if args.out else None)
    about = done.metadata
    size = f"{about.input_size} x {about.input_size}"
    say(args, f"written   {done.out}")
    say(args, f"backbone  {about.backbone.name}, {about.features_dim} features of images of {size}")
    say(args, f"load      {done.load}")
    return {
        "format": args.format,
        "out": done.out,
        "load": done.load,
        "difference": done.difference,
        **about.model_dump(),
    }


def _data(args: argparse.Namespace) -> Any:
    from omegaconf import OmegaConf
    from pydantic import create_model

    from solo_ext.config.check import validated
    from solo_ext.config.compose import apply_overrides, parse
    from solo_ext.config.schema import Images
    from solo_ext.core.types import Section
    from solo_ext.data.convert import convert
    from solo_ext.data.images import open_images

    settings = OmegaConf.create({"data": {"dataset": "custom"}})
    apply_overrides(settings, parse(args.overrides))
    given: Any = OmegaConf.to_container(settings)
    # Only settings of data are read here; any other is an unknown key.
    kind = create_model("Conversion", __base__=Section, data=(Images, ...))
    checked: Any = validated(kind, given)
    images = open_images(checked.data, args.split)
    with progress_bars() as progress:
        report = functools.partial(progress, "images")
        done = convert(images, Path(args.out), args.shard_mb << 20, report)
    for name in done.unreadable:
        say(args, f"left out  {name}")
    say(args, f"written   {done.images} images in shards ({done.shards}), {args.out}")
    say(args, f"read      data.format=streaming data.{args.split}_path={args.out}")
    return {**done._asdict(), "out": args.out}


def _benchmark(args: argparse.Namespace) -> Any:
    from solo_ext.lab.experiments.settings import benchmark_file

    if hasattr(args, "config"):
        # Before what follows imports torch.
        benchmark_file(args.config)

    from solo_ext.lab.cli.benchmark import ACTIONS

    return ACTIONS[args.action](args)


_COMMANDS: dict[str, Callable[[argparse.Namespace], Any]] = {
    "benchmark": _benchmark,
    "data": _data,
    "demo": _benchmark,
    "methods": _methods,
    "losses": _losses,
    "doctor": _doctor,
    "pretrain": _pretrain,
    "embed": _embed,
    "eval": _eval,
    "export": _export,
    "report": _report,
}
