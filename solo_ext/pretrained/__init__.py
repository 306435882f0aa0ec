"""Trained networks from files: as teachers, as backbones to evaluate, and written as exports.

Read ``files`` first (which files are read, without running code in them), then ``loaded``, what a
teacher is once loaded, and ``teachers``, which loads the one of a config: ``layouts`` reads the
official files of MoCo v2, SwAV and DINO, ``libraries`` the models of timm and torchvision, ``runs``
the runs of solo-learn and of this plugin, ``heads`` the layers after a backbone. ``export`` writes
the backbone of a run for use elsewhere and ``exported`` reads it back; ``detection`` has the names
that detection libraries use.
"""
