"""Pretraining: from a config to a run directory.

Read in the order of a run. `prepare` checks a config and opens the images (`checks` and
`builtin_methods` hold what it refuses). `pretrain` is the run: it takes the directory (`run_dir`),
chooses the checkpoint to continue from (`resume_point`), gives the method its data (`run_data`) and
calls Lightning's Trainer (`trainer`) with callbacks that save and stop (`checkpoints`, `signals`),
keep the state of training in checkpoints (`run_state`), and watch for non-finite losses
(`nonfinite`), collapse and unreadable images (`watch`). Only `lightning_internals` uses Lightning's
private attributes.
"""
