"""From an image on disk to the batch; the result is the same for any number of workers.

Read in the order of an image's way: ``reading`` decodes one and says what stands in for one that
cannot be read; ``folders``, ``h5`` and ``huggingface`` find them; ``shards`` reads files of many,
those of ``streaming``, which ``convert`` writes, and the tars of ``webdataset``; ``images`` opens
those of a config. ``transforms`` makes crops, ``views`` decides which sample is next and draws its
crops, ``workers`` runs this in processes, ``loaders`` makes the batches, also those of fixed views.
With ``data.augmentation=batch`` ``batch_augment`` (its operations: ``batch_ops``) makes the crops
on the training device; it also mixes views. ``dali`` reads through NVIDIA DALI; ``digits`` writes
the data set of the examples.
"""
