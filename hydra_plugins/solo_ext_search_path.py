"""Lets Hydra programs, solo-learn's own scripts among them, find and run the plugin's configs.

Hydra imports this module at every start of every Hydra program: nothing heavy before it is
known that the program is solo-learn's, and no failure of ours ends the program.
"""

from __future__ import annotations

import sys

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin


class SoloExtSearchPath(SearchPathPlugin):
    """Adds ``solo_ext/`` to the search path and, in a solo-learn program, registers methods."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Called by Hydra with the search path of the program."""
        try:
            from solo_ext.core.files import config_root
            from solo_ext.data.digits import add_resolvers

            search_path.append(provider="solo_ext", path=f"file://{config_root()}")
            add_resolvers()
            if "solo.methods" in sys.modules:
                from solo_ext import register
                from solo_ext.core.errors import show_messages

                show_messages()
                register()
        except (Exception, SystemExit) as error:
            problem = f"{type(error).__name__}: {error}"
            print(f"solo_ext: left out of this program ({problem})", file=sys.stderr)
