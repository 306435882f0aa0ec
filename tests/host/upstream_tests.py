"""Runs solo-learn's own tests of losses, methods and utilities with the plugin registered.

``python upstream_tests.py CHECKOUT``
"""

from __future__ import annotations

import os
import sys

import pytest

import solo_ext

# AutoUMAP needs seaborn and wandb, which the plugin does not.
LEFT_OUT = "tests/utils/test_auto_umap.py"


def main() -> int:
    root = sys.argv[1]
    os.chdir(root)
    solo_ext.register()
    folders = [f"tests/{name}" for name in ("losses", "methods", "utils")]
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:warnings", f"--ignore={LEFT_OUT}"]
    return int(pytest.main([*folders, *options]))


if __name__ == "__main__":
    sys.exit(main())
