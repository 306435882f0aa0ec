"""``python -m solo_ext SCRIPT.py ARGUMENTS`` runs a script of solo-learn with the plugin's methods.

Without a script, ``python -m solo_ext`` is the command ``solo-ext``.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from solo_ext.core.errors import UserError, show_messages

logger = logging.getLogger("solo_ext.launcher")
_OF_MAIN_UMAP = {"matplotlib", "pandas", "seaborn", "umap", "wandb"}


def main() -> int:
    """Runs the script or the command that the command line names.

    Returns:
        The exit code, 2 for a user error; other exceptions of a script propagate.
    """
    if len(sys.argv) < 2 or not sys.argv[1].endswith(".py"):
        from solo_ext.lab.cli.main import main as command

        return command()
    with _mistakes_in_one_line(sys.argv[1]):
        run_script(sys.argv[1], sys.argv[2:])
    return 0


def run_script(script: str, arguments: Sequence[str]) -> None:
    """Runs a file as ``python SCRIPT.py`` does, after the methods are registered.

    Three things differ. Without a CUDA device, what the script moves to one stays on the CPU.
    Methods of the plugin take any number of large crops. User errors are printed as one line.

    Raises:
        UserError: no such file, an unknown method, or a setting that a method refuses.
    """
    try:
        tree = ast.parse(Path(script).read_bytes(), script)
    except OSError as error:
        raise UserError(
            f"{error.strerror}; name a script of a checkout of solo-learn's main branch"
        ) from error
    path = os.path.abspath(script)
    code = compile(_AnyNumberOfCrops().visit(tree), path, "exec", dont_inherit=True)
    sys.argv = [script, *arguments]
    if not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(os.path.realpath(script))
    # Hydra, pickle and spawned processes look for the script in the module `__main__`.
    module = sys.modules["__main__"] = ModuleType("__main__")
    vars(module).update(__file__=path, __builtins__=__builtins__)
    _prepare(script)
    exec(code, vars(module))


def _prepare(script: str) -> None:
    import hydra
    import torch

    from solo_ext import register
    from solo_ext.data.digits import add_resolvers
    from solo_ext.host import patches
    from solo_ext.lab.training.lightning_internals import start_other_ranks_by

    show_messages()
    register()
    patches.IN_LAUNCHER = True
    # The data paths of shipped configs and the args.json of checkpoints use these resolvers.
    add_resolvers()
    # Lightning starts further ranks as ``python SCRIPT.py``: start this module instead.
    start_other_ranks_by(lambda words: [words[0], "-m", "solo_ext", *words[1:]])
    hydra.main = _with_checks(hydra.main, script)
    if not torch.cuda.is_available():
        _stay_on_the_cpu()


class _AnyNumberOfCrops(ast.NodeTransformer):
    """Removes the assertion of two large crops; :func:`_check` checks the number instead."""

    def visit_If(self, node: ast.If) -> ast.stmt:
        self.generic_visit(node)
        asserts = all(isinstance(statement, ast.Assert) for statement in node.body)
        if asserts and "num_large_crops" in ast.unparse(node.test):
            return ast.copy_location(ast.Pass(), node)
        return node


def _with_checks(hydra_main: Callable[..., Any], script: str) -> Callable[..., Any]:
    """Wraps ``hydra.main`` so that configs are checked and user errors are printed in one line."""

    @functools.wraps(hydra_main)
    def main(*args: Any, **kwargs: Any) -> Callable[[Any], Any]:
        def decorate(task: Callable[[Any], Any]) -> Any:
            @functools.wraps(task)
            def checked(cfg: Any) -> Any:
                # Catch errors here, because Hydra would print a traceback.
                with _mistakes_in_one_line(script):
                    _check(cfg)
                    return task(cfg)

            return hydra_main(*args, **kwargs)(checked)

        return decorate

    return main


def _check(cfg: Any) -> None:
    """Refuses, with a message, what main_pretrain.py refuses by a bare assertion."""
    if "method" not in cfg or "augmentations" not in cfg:
        return
    from solo_ext import host
    from solo_ext.lab.training.builtin_methods import check_large_crops
    from solo_ext.lab.training.names import unknown_method

    methods = host.load().methods
    if cfg.method not in methods:
        raise unknown_method(cfg.method, methods, host.load().info.generation)
    size = cfg.augmentations[0].crop_size
    check_large_crops(
        cfg.method, sum(a.num_crops for a in cfg.augmentations if a.crop_size == size)
    )


def _stay_on_the_cpu() -> None:
    """Makes ``cuda()`` and ``to("cuda:0")`` leave tensors, and so modules, on the CPU."""
    import torch

    to = torch.Tensor.to

    @functools.cache
    def tell() -> None:
        logger.warning("no CUDA device here: what the script moves to one stays on the CPU")

    def instead(value: Any) -> Any:
        if not isinstance(value, str | torch.device) or torch.device(value).type != "cuda":
            return value
        tell()
        return torch.device("cpu")

    def to_cpu(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return to(self, *map(instead, args), **{k: instead(v) for k, v in kwargs.items()})

    torch.Tensor.cuda = lambda self, *_, **__: to_cpu(self, "cuda")  # type: ignore[method-assign,assignment]
    torch.Tensor.to = to_cpu  # type: ignore[method-assign,assignment]


@contextlib.contextmanager
def _mistakes_in_one_line(script: str) -> Iterator[None]:
    """Prints a user error or a missing package as one line that says what to do, and exits."""
    try:
        yield
    except (UserError, ModuleNotFoundError) as error:
        mistake = error if isinstance(error, UserError) else _missing_package(error)
        if mistake is None:
            raise
        print(f"{Path(script).name}: {mistake}", file=sys.stderr)
        raise SystemExit(mistake.exit_code) from None


def _missing_package(error: ModuleNotFoundError) -> UserError | None:
    """Error that says what to install; ``None`` if the package is installed but lacks a module."""
    if error.name is None:
        # Lightning's own checks already say what to install.
        return UserError(str(error))
    name = error.name.partition(".")[0]
    if find_spec(name) is not None:
        return None
    packages = "umap-learn matplotlib pandas seaborn wandb"
    remedy = f"pip install {packages}" if name in _OF_MAIN_UMAP else "install it"
    return UserError(f"the package {name!r} is not installed; {remedy}")


if __name__ == "__main__":
    sys.exit(main())
