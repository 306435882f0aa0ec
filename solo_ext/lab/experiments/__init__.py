"""`solo-ext benchmark`: grids of runs on equal terms, their records and reports.

In order of a benchmark's life: ``settings`` (its YAML file), ``plan`` (the runs), ``launchers``
(processes of this machine, SLURM) and ``work`` (one run in its process), ``run`` (what is missing
is run; ``records`` holds what is finished), ``tuning`` (the same search for every row). A report:
``results`` (records in the order of the settings), ``statistics`` and ``verdicts`` (what they say
of hypotheses), ``tables``, ``figures`` and ``report``.
"""
