"""Training, evaluation and benchmarks of the methods; nothing of the plugin imports this package.

``training`` (the run of ``solo-ext pretrain``), ``evaluation`` (protocols on a trained run),
``experiments`` (grids of methods, data and seeds, and their reports), ``cli`` (``solo-ext``).
``pages`` writes the HTML of reports.
"""
