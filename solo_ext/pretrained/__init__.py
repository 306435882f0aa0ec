"""Trained networks from files: as teachers, as backbones to evaluate, and written as exports.

Read ``files`` first (which files are read, without running code in them), then ``loaded``, what a
teacher is once loaded, and ``teachers``, which loads the one of a config: official files itself,
``libraries`` the models of timm and torchvision, ``runs`` the runs of solo-learn and of this
plugin. ``export`` writes the backbone of a run for use elsewhere and ``exported`` reads it back.
"""
