"""`solo-ext benchmark`: grids of runs on equal terms, their records and reports."""
