"""Trained networks in files: read as teachers or backbones to evaluate, and written as exports.

Read ``files`` first, which reads checkpoints without running code in them, then ``loaded``, the
parts of a loaded teacher, and ``teachers``, which loads the teacher of a config: official files
itself, models of timm and torchvision by ``libraries``, and runs of solo-learn and of this plugin
by ``runs``. ``export`` writes the backbone of a run for use elsewhere; ``exported`` reads it back.
"""
