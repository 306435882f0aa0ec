"""Entry point: parses the command line, and imports what a command needs only when it runs."""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from solo_ext import __version__
from solo_ext.core.errors import UserError, suggest_name
from solo_ext.lab.ending import end_with, in_one_line

_path = os.path.expanduser
_OPTION = re.compile(r"--?[A-Za-z]")


class _Parser(argparse.ArgumentParser):
    """Reports a mistake in one line with the nearest valid word; accepts overrides anywhere."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        words = list(sys.argv[1:] if args is None else args)
        for before, word in zip([self.prog, *words], words, strict=False):
            # This is mostly an unset shell variable; as a path it would mean the current folder.
            if not word.strip() or re.fullmatch("--[a-z-]+=", word):
                after = word.strip() or before
                self.error(f"an empty value after {after!r}; write one, or leave it out")
        known = {option for action in self._actions for option in action.option_strings}
        for word in words:
            if self._subparsers is not None and not word.startswith("-"):
                # The command's own parser checks the words after it.
                break
            name = word.partition("=")[0]
            if name == "--multirun":
                self.error(
                    "--multirun: start one command per setting, or `solo-ext benchmark run` for "
                    "several; solo-learn's own script has it: `python -m solo_ext main_pretrain.py`"
                )
            if _OPTION.match(word) and name not in known:
                remedy = suggest_name(name, known)
                if self.prog.endswith(" pretrain"):
                    from solo_ext.config.check import setting_called

                    if key := setting_called(name):
                        remedy = f"settings have no dashes: {key}=..."
                self.error(f"unknown option {name!r}; {remedy}")
        found, rest = super().parse_known_args(words, namespace)
        if "overrides" in found and self._subparsers is None:
            # argparse fills a list of positionals only once, before the first option.
            found.overrides += rest
            return found, []
        return found, rest

    def error(self, message: str) -> NoReturn:
        choices = [str(c) for a in self._actions if a.choices for c in a.choices]
        if wrong := re.match(r"argument (?:--)?(\w+): invalid choice: '(.*?)'", message):
            kind, given = wrong.groups()
            message = f"unknown {kind.lower()} {given!r}; {suggest_name(given, choices)}"
        elif "arguments are required: COMMAND" in message:
            message = f"a command is missing; allowed: {', '.join(sorted(choices))}"
        elif "arguments are required" in message:
            # argparse lists overrides as required too, but they are optional.
            message = message.removesuffix(", key=value")
        elif message.startswith("unrecognized arguments: "):
            message = f"one word too many: {message.partition(': ')[2]}"
        self.exit(UserError.exit_code, f"{self.prog}: {' '.join(message.split())}\n")


def build_parser() -> argparse.ArgumentParser:
    """The parser of every command.

    >>> words = ["pretrain", "--config-name", "digits/pcl", "max_epochs=2"]
    >>> args = build_parser().parse_args(words)
    >>> args.command, args.config_name, args.overrides
    ('pretrain', 'digits/pcl', ['max_epochs=2'])
    """
    parser = _Parser(
        prog="solo-ext",
        description="Self-supervised methods that solo-learn lacks, by name in its configs.",
        epilog="Exit codes: 0 done, 1 failure, 2 a mistake in config or command line, 128 + n "
        "ended by signal n.",
    )
    parser.add_argument("--version", action="version", version=f"solo-ext {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    def command(parent: Any, name: str, text: str) -> argparse.ArgumentParser:
        made: argparse.ArgumentParser = parent.add_parser(name, help=text)
        made.add_argument("--json", action="store_true", help="print one JSON document")
        return made

    demo = command(commands, "demo", "what a teacher adds, on digits, in minutes; a report")
    demo.add_argument(
        "--out", type=_path, default="solo-ext-demo", help="folder of runs and report"
    )
    demo.add_argument("--epochs", type=_positive, help="epochs of each run")
    demo.set_defaults(action="demo")

    command(commands, "methods", "methods that a config can name")
    command(commands, "losses", "losses of the plugin")
    command(
        commands, "doctor", "which solo-learn, versions, devices; what is missing and how to get it"
    )

    pretrain = command(commands, "pretrain", "pretrain on a folder of images, or by a config")
    source = pretrain.add_mutually_exclusive_group()
    source.add_argument("--method", help="of a run on IMAGES: pcl if left out, simclr, byol, ...")
    source.add_argument("--config-name", help="<dataset>/<method>, or a YAML file")
    source.add_argument("--resume", metavar="RUN_DIR", type=_path, help="go on with a run")
    pretrain.add_argument("--config-path", type=_path, help="folder of your own configs")
    pretrain.add_argument(
        "--run-dir", type=_path, help="where to write; continued if it holds this run"
    )
    pretrain.add_argument(
        "--force", action="store_true", help="go on from a checkpoint of other settings or images"
    )
    pretrain.add_argument(
        "--teacher",
        help="of a run on IMAGES, what to distil: timm/<model>, torchvision/<model>, a run, a file",
    )
    pretrain.add_argument(
        "--dry-run", action="store_true", help="of a run on IMAGES: say what it would be"
    )
    pretrain.add_argument(
        "overrides",
        nargs="*",
        metavar="IMAGES|key=value",
        help="folders of images or a file that lists them; settings",
    )

    evaluate = command(commands, "eval", "evaluate a run directory or a checkpoint")
    # Do not give `choices`: listing the protocols would import them for every command.
    evaluate.add_argument("protocol", metavar="PROTOCOL", help="knn, linear, ..., or suite")
    evaluate.add_argument(
        "run",
        metavar="RUN_DIR",
        type=_path,
        help="a run directory, a checkpoint, timm/<model> or pixels",
    )
    evaluate.add_argument("overrides", nargs="*", metavar="key=value")

    embed = command(commands, "embed", "write features and clusters of images to a Parquet file")
    embed.add_argument(
        "run",
        metavar="RUN_DIR",
        type=_path,
        help="a run directory, a checkpoint, timm/<model> or pixels",
    )
    # argparse cannot tell where one list of words ends and the next begins.
    embed.add_argument(
        "overrides",
        nargs="*",
        metavar="IMAGES|key=value",
        help="folders of images or a file that lists them, else the run's own; settings",
    )
    embed.add_argument(
        "--out", type=_path, required=True, metavar="FILE", help="the file, FILE.parquet"
    )
    embed.add_argument(
        "--atlas", action="store_true", help="open the file in Embedding Atlas, in the browser"
    )

    page = command(commands, "report", "write the page of a run: curves, a map, clusters, pictures")
    page.add_argument("run", metavar="RUN_DIR", type=_path, help="a run directory")
    page.add_argument(
        "overrides",
        nargs="*",
        metavar="IMAGES|key=value",
        help="folders of images or a file that lists them, else the run's own; settings",
    )
    page.add_argument("--out", type=_path, metavar="FILE", help="RUN_DIR/report.html if left out")
    page.add_argument(
        "--samples", type=_positive, default=5000, help="most images; 5000 if left out"
    )

    benchmark = commands.add_parser("benchmark", help="compare methods over data sets and seeds")
    actions = benchmark.add_subparsers(dest="action", metavar="COMMAND", required=True)
    for name, text in (
        ("run", "run what a benchmark lacks"),
        ("tune", "choose settings on held-out training images"),
    ):
        words = command(actions, name, text)
        _add_run_words(words)
        if name == "run":
            words.add_argument("--stages", nargs="+", metavar="STAGE", help="only these stages")
            words.add_argument(
                "--within",
                type=_positive,
                metavar="MINUTES",
                help="end by then: start what ends in time, stop the rest, which goes on next time",
            )
    report = command(actions, "report", "tables, a page and verdicts of records")
    report.add_argument(
        "records", metavar="RECORDS", type=_path, help="folder of a benchmark, or of several"
    )
    report.add_argument("--out", type=_path, help="folder of the report; RECORDS if left out")

    of_data = commands.add_parser("data", help="write data sets in another format")
    formats = of_data.add_subparsers(dest="action", metavar="COMMAND", required=True)
    converting = command(formats, "convert", "write images of any format into shards")
    converting.add_argument("overrides", nargs="*", metavar="key=value", help="data.train_path=...")
    converting.add_argument("--out", type=_path, required=True, help="folder of the shards")
    converting.add_argument(
        "--split",
        default="train",
        choices=("train", "val"),
        help="whether data.train_path or data.val_path is read",
    )
    converting.add_argument(
        "--shard-mb", type=_positive, default=64, help="most MB of a shard; 64 if left out"
    )

    export = command(commands, "export", "write the backbone of a run for use elsewhere")
    export.add_argument("run", metavar="RUN_DIR", type=_path)
    export.add_argument(
        "--format",
        required=True,
        choices=("timm", "safetensors", "torchvision", "detectron2"),
        help="a folder for plain timm, one file for solo_ext.load_exported, weights for "
        "torchvision's detection models and mmdetection, or for detectron2",
    )
    export.add_argument(
        "--out", type=_path, help="the folder or file; without it, in the run directory"
    )
    return parser


def _add_run_words(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG", help="digits, cifar10-cpu, ..., or a YAML file")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="of the benchmark")
    parser.add_argument(
        "--out",
        type=_path,
        help="folder of records and runs; if left out benchmark_runs/CONFIG, of tune CONFIG-tuning",
    )
    parser.add_argument("--rows", nargs="+", metavar="ROW", help="only these rows")
    parser.add_argument("--parallel", type=_positive, help="runs at once; one per GPU or core")
    parser.add_argument(
        "--devices", type=_positive, default=1, help="devices of one run, on each of its nodes"
    )
    parser.add_argument("--nodes", type=_positive, default=1, help="nodes of one run, by Ray")
    parser.add_argument(
        "--launcher",
        default="local",
        choices=("local", "slurm", "ray"),
        help="processes of this machine, an array of SLURM jobs, or tasks of a Ray cluster",
    )
    parser.add_argument(
        "--slurm",
        nargs="+",
        default=[],
        metavar="key=value",
        help="for submitit, such as slurm_partition=gpu timeout_min=600",
    )
    parser.add_argument(
        "--ray",
        nargs="+",
        default=[],
        metavar="key=value",
        help="for Ray's tasks, such as num_gpus=1 max_retries=-1",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="list the runs and their minutes, start none"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command.

    Returns:
        The exit code: 0, 2 for a user error, 128 plus the number of the signal that ended a run, or
        1 for any other error.

    >>> main(["eval", "no-such-protocol", "runs/pcl"])
    2
    """
    # Spinning OpenMP threads make two busy cores ten times slower; torch reads this on import.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if argv is None:
        # An error in a finalizer cannot be caught; by default Python prints its traceback.
        sys.unraisablehook = lambda _: None

    def command() -> int:
        args = build_parser().parse_args(argv)
        from solo_ext.lab.cli import commands

        return commands.run(args)

    # Once a run has started, its own message says how to continue.
    begins = list(sys.argv[1:] if argv is None else argv)[:1] == ["pretrain"]
    code = in_one_line(command, "start it again" if begins else "the same command goes on")
    if argv is None:
        # The process is about to end: a second Ctrl-C would print the interpreter's traceback.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        end_with(code)
        if code:
            # Print nothing after the error: threads that end with the process would add tracebacks.
            sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    return code


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer above 0")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
