"""``solo-ext report``: the page of a run, one HTML file with its curves, map and pictures.

Read in this order: ``thumbnails`` (small pictures of images), ``charts`` (curves, the map of the
embeddings), ``galleries`` (clusters, neighbours, near duplicates, outliers), ``run_page`` (all of
these with headline numbers, settings and environment).
"""
