"""``solo-ext eval``: measures the features of a trained backbone.

Read in this order: ``models`` (what is evaluated, and the settings that all protocols share),
``features`` (frozen, extracted once and kept on disk), ``context`` (model, images and features
together), ``protocol`` (what a protocol is). Then the protocols: ``scores`` of features as they are
(kNN, retrieval, clustering, geometry), ``linear`` probes (L-BFGS, SGD sweep, few labels),
``supervised`` training on augmented views (linear classifiers, fine-tuning), ``pictures`` (maps,
neighbours), ``label_free`` (measures of augmented views without labels) and ``clusters`` (those of
PCL's E-step). ``evaluate`` lists all of them by name, runs one, and has ``transfer``, which runs
them on further data sets; ``suite`` runs several with one report, ``online`` measures during
training. Last, ``embed`` writes the features of any images to a file, which ``parquet`` makes part
by part.

To add a protocol, write a class of settings with a method that measures, a line in the table of
``evaluate``, its name in ``solo_ext.config.schema.OnlineProtocol`` (and in ``WITHOUT_LABELS`` of
``protocol``, if it needs none), and a test.
"""
