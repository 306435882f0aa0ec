"""Pretraining: from a config to a run directory.

Read the files in the order of a run. `prepare` checks a config and opens the images
(`builtin_methods` and `cpu_precision` are parts of it). `pretrain` is the run: it chooses the run
directory (`run_dir`) and the checkpoint to continue from (`resumption`, which also says what a
checkpoint holds), and calls Lightning's Trainer with the run's data and loggers (`trainer`), and
with callbacks that save and stop (`checkpoints`, `signals`) and watch for non-finite losses
(`nonfinite`), collapse and unreadable images (`watch`). `compiled` compiles the networks. Only
`lightning_internals` uses Lightning's private attributes.
"""
