"""Trained networks out of files: as teachers, as backbones to evaluate, and out again as exports.

Read ``files`` first (what is read, and that no code in it is run), then ``teachers``: where a
teacher comes from and what it is once loaded. ``layouts`` knows the official files of MoCo v2,
SwAV and DINO, ``libraries`` the models of timm and torchvision, ``runs`` the runs of solo-learn
and of this plugin, ``heads`` the layers behind a backbone. ``export`` writes the backbone of a run
for use elsewhere and ``exported`` reads it back; ``detection`` has the names that detection
libraries use.
"""
