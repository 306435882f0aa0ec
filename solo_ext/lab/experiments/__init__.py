"""`solo-ext benchmark`: grids of runs on equal terms, their records and reports.

- What a run is: ``settings`` (the YAML file), ``plan`` (the runs that it describes), ``tuning``
  (the same search for every row, as runs too).
- What starts runs: ``run`` (those that have no record), ``pace`` (which of them end within a time
  limit), ``launchers`` (processes on this machine, SLURM, Ray), ``work`` (one run in its process).
- What reads records: ``records`` (the files), ``results`` (means and intervals over seeds),
  ``verdicts`` (evidence for and against hypotheses), ``report``.
"""
