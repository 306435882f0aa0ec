"""Training, evaluation and benchmarks of the methods; no package of the plugin imports this one.

``training`` (the run of ``solo-ext pretrain``), ``evaluation`` (protocols on a trained run),
``report`` (the page of a run), ``experiments`` (grids of methods, data and seeds, and their
reports), ``cli`` (``solo-ext``).
``pages`` writes the HTML of reports, ``ending`` ends a command by one line and an exit code.
"""
