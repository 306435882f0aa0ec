"""From an image on disk to the batch; the result is the same for any number of workers.

Read in the order of an image's way: ``reading`` decodes one and says what stands in for one that
cannot be read; ``folders``, ``h5`` and ``huggingface`` find them, ``listing`` keeps their paths;
``shards`` reads files of many, those of ``streaming``, which ``convert`` writes, and the tars of
``webdataset``; ``images`` opens those of a config.
``transforms`` makes crops, ``views`` decides which sample is next and draws its crops, ``workers``
runs this in processes, ``loaders`` makes the batches.
``fixed`` has the one fixed view of each image, for evaluation and the E-step. With
``data.augmentation=batch`` ``raw_batches`` reads whole images and ``batch_augment`` (its
operations: ``batch_ops``) makes the crops on the training device; ``mixing`` is MixUp and CutMix
of finished views. ``dali`` reads through NVIDIA DALI; ``digits`` writes the data set of the
examples.
"""
