"""From an image on disk to the batch; the result is the same for any number of workers.

Read ``images`` (opens the data set of a config), ``formats`` (class folders, lists, HDF5, Hugging
Face) and ``reading`` (decodes one image, and replaces one that cannot be read). ``sampler`` gives
the order, ``transforms`` the crops, ``views`` samples with their crops, ``loaders`` the batches and
``workers`` the processes that make them. ``indexed`` is the E-step's pass over the training set.
With ``data.augmentation=batch`` the training device makes the crops: ``raw_batches`` reads whole
images, ``batch_augment`` augments them; ``mixing`` is MixUp and CutMix of finished views. ``dali``
reads through NVIDIA DALI; ``digits`` writes the data set of the examples.
"""
