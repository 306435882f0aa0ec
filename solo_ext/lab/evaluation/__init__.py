"""``solo-ext eval``: measures the features of a trained backbone.

Read in this order: ``models`` (what is evaluated, and the settings that all protocols share),
``features`` (frozen, extracted once and kept on disk), ``context`` (model, images and features
together), ``protocol`` (what a protocol is). Then the protocols: ``scores`` of features as they are
(kNN, retrieval, clustering, geometry), ``linear`` probes (L-BFGS, SGD sweep, few labels),
``supervised`` training on augmented views (linear classifiers, fine-tuning), ``pictures`` (maps,
neighbours) and ``label_free`` (measures of augmented views without labels). ``cluster_scores`` are
those of clusters without labels. ``evaluate`` lists all of them by name, runs one, and has
``transfer``, which runs them on further data sets; ``suite`` runs several with one report,
``online`` measures during training.

To add a protocol, write a class of settings with a method that measures, a line in the table of
``evaluate``, its name in ``solo_ext.config.schema.OnlineProtocol`` (and in ``WITHOUT_LABELS`` of
``protocol``, if it needs none), and a test.
"""
