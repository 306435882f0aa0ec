"""``solo-ext eval``: measures the features of a trained backbone.

Read in this order: ``models`` (what is evaluated, and the settings that all protocols share),
``features`` (frozen, extracted once and kept on disk), ``context`` (model, images and features
together), ``protocol`` (what a protocol is). Then the protocols, each with
its maths: ``knn`` (with retrieval), ``linear`` (L-BFGS, SGD sweep, few labels), ``clustering``,
``geometry``; ``linear_augmented`` and ``finetune``, which share ``supervised``; the pictures of
``map`` and ``neighbors``; and ``transfer``, which runs the others on further data sets.
``evaluate`` lists all of them by name and runs one, ``suite`` runs several with one report,
and ``online`` measures during training.

To add a protocol: one file with a class of settings that measures, one line in ``transfer``'s
table (or in ``evaluate``'s), its name in ``solo_ext.config.schema.OnlineProtocol``, one test.
"""
