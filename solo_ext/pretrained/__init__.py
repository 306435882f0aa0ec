"""Trained networks from files: as teachers, as backbones to evaluate, and written as exports.

Read ``files`` first (which files are read, without running code in them), then ``teachers``: where
a teacher comes from, and what it is once loaded. ``layouts`` reads the official files of MoCo v2,
SwAV and DINO, ``libraries`` the models of timm and torchvision, ``runs`` the runs of solo-learn and
of this plugin, ``heads`` the layers after a backbone. ``export`` writes the backbone of a run for
use elsewhere and ``exported`` reads it back; ``detection`` has the names that detection libraries
use.
"""
