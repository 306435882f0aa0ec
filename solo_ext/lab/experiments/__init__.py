"""`solo-ext benchmark`: grids of runs on equal terms, their records and reports.

Read the files in the order of a benchmark: ``settings`` (its YAML file), ``plan`` (the runs),
``launchers`` (processes on this machine, SLURM, Ray) and ``work`` (one run in its process), ``run``
(runs what is missing; ``records`` stores what is finished), ``tuning`` (the same search for every
row). For a report: ``results`` (records in the order of the settings, means and intervals over
seeds), ``verdicts`` (evidence for and against hypotheses) and ``report``.
"""
