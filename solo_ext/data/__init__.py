"""From an image on disk to the batch; batches are the same for any number of workers.

In reading order: ``reading`` decodes an image and finds the sample that replaces an unreadable one;
``folders``, ``h5`` and ``huggingface`` are data sets; ``shards`` has the common part of two more,
``streaming`` (MDS, which ``convert`` writes) and ``webdataset`` (tars); ``images`` opens the data
set of a config. ``transforms`` makes crops, ``views`` decides which sample is next and draws its
crops, ``workers`` runs this in processes, ``loaders`` makes batches, also batches of fixed views.
With ``data.augmentation=batch``, ``batch_augment`` makes the crops on the training device by the
operations of ``batch_ops``; it also mixes views. ``dali`` reads through NVIDIA DALI; ``digits``
writes the data set of the examples.
"""
