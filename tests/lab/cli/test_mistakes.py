"""Wrong configs and command lines end with one line that helps, and leave nothing behind."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from solo_ext import host
from tests.lab.cli.mistakes import TINY, Mistake, assert_one_line_that_helps, of_config

HOST = host.detect().generation
DEBIASED = ("pretrain", "--config-name", "digits/debiased")
PROJECTOR = "proj_hidden_dim: 8, proj_output_dim: 8"


def config(*overrides: str, says: tuple[str, ...]) -> Mistake:
    """A tiny run of ``digits/debiased`` with these overrides."""
    return of_config("digits/debiased", *overrides, says=says)


def of_method(name: str, kwargs: str, *more: str, says: tuple[str, ...]) -> Mistake:
    """A tiny run of a built-in with these ``method_kwargs``."""
    section = f"{{{{{PROJECTOR}{', ' if kwargs else ''}{kwargs}}}}}"
    chosen = (f"method={name}", "~method_kwargs", f"+method_kwargs={section}")
    return config(*chosen, *more, says=says)


def words(*given: str, says: tuple[str, ...]) -> Mistake:
    """A whole command line."""
    return Mistake(given, says)


KEYS = {
    "top level": config(
        "max_epoch=3", says=("max_epoch=3: unknown key", "did you mean 'max_epochs'?", "allowed:")
    ),
    "nested": config(
        "optimizer.lrr=0.1", says=("optimizer.lrr=0.1: unknown key", "did you mean 'lr'?")
    ),
    "nested twice": config(
        "checkpoint.frequencyy=1", says=("checkpoint.frequencyy=1", "did you mean 'frequency'?")
    ),
    "method_kwargs": config(
        "method_kwargs.temprature=0.5",
        says=("method_kwargs.temprature=0.5: unknown key", "did you mean 'temperature'?"),
    ),
    "augmentations": config(
        "augmentations.0.gausian_blur.prob=0.5",
        says=("augmentations.0.gausian_blur=", "unknown key", "did you mean 'gaussian_blur'?"),
    ),
    "within an augmentation": config(
        "augmentations.0.rrc.crop_mn_scale=0.5",
        says=("augmentations.0.rrc.crop_mn_scale=0.5", "did you mean 'crop_min_scale'?"),
    ),
    "optimizer.kwargs": config(
        "optimizer.kwargs.momentom=0.5",
        says=("optimizer.kwargs.momentom=0.5: unknown key", "did you mean 'momentum'?"),
    ),
    "backbone.kwargs of timm": config(
        "backbone.kwargs.chanels=[8]",
        says=("backbone.kwargs.chanels=[8]: unknown key", "did you mean 'channels'?"),
    ),
    "backbone.kwargs of solo-learn": config(
        "backbone.name=resnet18",
        "~backbone.kwargs",
        "+backbone.kwargs.zero_init_residul=true",
        says=(
            "backbone.kwargs.zero_init_residul=true: unknown key",
            "did you mean 'zero_init_residual'?",
        ),
    ),
    "the Trainer's": config(
        "gradient_clip_vall=1", says=("gradient_clip_vall=1", "did you mean 'gradient_clip_val'?")
    ),
    "hydra's": config("hydra.run.dir=elsewhere", says=("hydra=", "unknown key")),
    "kwarg of another method": config(
        "method_kwargs.num_negatives=10",
        says=("method_kwargs.num_negatives=10: unknown key", "did you mean 'negatives'"),
    ),
    "required, missing": config(
        "~optimizer.lr", says=("optimizer.lr=null", "required", "a number")
    ),
    "section missing": config("~scheduler", says=("scheduler=null", "required", "warmup_epochs")),
    "required of a method": of_method(
        "simclr", "", says=("method_kwargs.temperature=null", "required", "a number above 0")
    ),
}

NAMES = {
    "method": config(
        "method=debaised", says=("method='debaised': unknown method", "did you mean 'debiased'?")
    ),
    "case of a method": config("method=SimCLR", says=("did you mean 'simclr'?",)),
    "backbone": config(
        "backbone.name=resnet81",
        says=("backbone.name='resnet81'", "did you mean 'resnet18'?", "timm/<model>"),
    ),
    "timm model": config(
        "backbone.name=timm/resnet81",
        says=("backbone.name='timm/resnet81'", "did you mean 'timm/resnet18'?"),
    ),
    "timm model without prefix": config(
        "backbone.name=resnet10t", says=("did you mean 'timm/resnet10t'?",)
    ),
    "timm model like none": config(
        "backbone.name=timm/qqqqqqqq", says=("backbone.name='timm/qqqqqqqq'", "timm.list_models")
    ),
    "optimiser": config(
        "optimizer.name=sdg",
        says=("optimizer.name='sdg'", "did you mean 'sgd'?", "adam, adamw, lars, sgd"),
    ),
    "scheduler": config(
        "scheduler.name=cosine", says=("scheduler.name='cosine'", "did you mean 'warmup_cosine'?")
    ),
    "data set": config(
        "data.dataset=cifra10", says=("data.dataset='cifra10'", "did you mean 'cifar10'?")
    ),
    "format": config(
        "data.format=image_foldr", says=("data.format='image_foldr'", "did you mean 'image_folder'")
    ),
    "policy": config(
        "data.unreadable=ignore", says=("data.unreadable='ignore'", "allowed: refuse, skip")
    ),
    "policy that DALI has not": config(
        "data.unreadable=skip",
        "data.format=dali",
        says=("data.unreadable='skip'", "DALI", "image_folder"),
    ),
    "start method": config(
        "data.start_method=spwan", says=("data.start_method='spwan'", "did you mean 'spawn'?")
    ),
    "logger": config(
        "loggers=[csv,tensorbord]", says=("loggers.1='tensorbord'", "did you mean 'tensorboard'?")
    ),
    "accelerator": config(
        "accelerator=gpuu", says=("accelerator='gpuu'", "did you mean 'gpu'?", "allowed: auto, cpu")
    ),
    "strategy": config("strategy=dpp", says=("strategy='dpp'", "did you mean 'ddp'?", "allowed:")),
    "precision": config("precision=17", says=("precision=17", "did you mean '16'?", "32-true")),
    "precision by name": config(
        "precision=16-mxed", says=("precision='16-mxed'", "did you mean '16-mixed'?")
    ),
    "profiler": config("profiler=simpel", says=("profiler='simpel'", "did you mean 'simple'?")),
}

TYPES = {
    "text for an integer": config(
        "max_epochs=many", says=("max_epochs='many'", "allowed: an integer above 0")
    ),
    "float for an integer": config("max_epochs=2.5", says=("max_epochs=2.5", "an integer above 0")),
    "text for a number": config(
        "optimizer.lr=fast", says=("optimizer.lr='fast'", "a number above 0")
    ),
    "list for a scalar": config(
        "optimizer.lr=[0.1]", says=("optimizer.lr=[0.1]", "a number above 0")
    ),
    "truth for a number": config(
        "optimizer.lr=true", says=("optimizer.lr=true", "a number above 0")
    ),
    "scalar for a list": config(
        "loggers=csv", says=("loggers='csv'", "a list", "csv or tensorboard")
    ),
    "scalar for a section": config(
        "optimizer=adam", says=("optimizer='adam'", "a mapping with the keys batch_size")
    ),
    "key below a scalar": config("optimizer.lr.base=3", says=("optimizer.lr=", "a number above 0")),
    "null for a path": config("data.train_path=null", says=("data.train_path=null", "text")),
    "null for a name": config("method=null", says=("method=null", "text")),
    "null for a section": config("optimizer=null", says=("optimizer=null", "a mapping")),
    "of an optimiser": config(
        "optimizer.kwargs.momentum=abc", says=("optimizer.kwargs.momentum='abc'", "a number")
    ),
    "betas of Adam": config(
        "optimizer.name=adam",
        "optimizer.kwargs.betas=[0.9]",
        says=("optimizer.kwargs.betas=[0.9]", "a list of 2"),
    ),
    "of the Trainer": config("benchmark=maybe", says=("benchmark='maybe'", "true or false")),
    "time of the Trainer": config("max_time=xyz", says=("max_time='xyz'", "DD:HH:MM:SS")),
    "of the backbone": config("backbone.kwargs.channels=5", says=("backbone.kwargs.channels=5",)),
}

VALUES = {
    "rate of zero": config("optimizer.lr=0", says=("optimizer.lr=0", "a number above 0")),
    "negative rate": config("optimizer.lr=-1", says=("optimizer.lr=-1", "a number above 0")),
    "infinite rate": config("optimizer.lr=inf", says=("optimizer.lr=inf", "a number above 0")),
    "negative epochs": config("max_epochs=-1", says=("max_epochs=-1", "an integer above 0")),
    "tau_plus": config(
        "method_kwargs.tau_plus=1", says=("method_kwargs.tau_plus=1", "0 or more, below 1")
    ),
    "temperature": config(
        "method_kwargs.temperature=0", says=("method_kwargs.temperature=0", "a number above 0")
    ),
    "fraction": config(
        "data.fraction=1.5", says=("data.fraction=1.5", "-1, or a number above 0, up to 1")
    ),
    "fraction that loses classes": config(
        "data.fraction=0.001", says=("data.fraction=0.001", "class")
    ),
    "tau of momentum": of_method(
        "byol",
        "pred_hidden_dim: 8",
        "momentum.base_tau=1.5",
        says=("momentum.base_tau=1.5", "from 0 to 1"),
    ),
    "taus swapped": of_method(
        "byol",
        "pred_hidden_dim: 8",
        "momentum.base_tau=0.999",
        "momentum.final_tau=0.9",
        says=("momentum.base_tau=0.999", "momentum.final_tau=0.9"),
    ),
    "scales swapped": config(
        "augmentations.0.rrc.crop_min_scale=0.9",
        "augmentations.0.rrc.crop_max_scale=0.3",
        says=("augmentations.0.rrc.crop_min_scale=0.9", "up to 0.3"),
    ),
    "batch": config("optimizer.batch_size=4000", says=("optimizer.batch_size=4000", "280 images")),
    "seed": config("seed=99999999999", says=("seed=99999999999", "from 0 to 4294967295")),
    "momentum of SGD": config(
        "optimizer.kwargs.momentum=1.5", says=("optimizer.kwargs.momentum=1.5", "below 1")
    ),
    "nesterov alone": config(
        "optimizer.kwargs.nesterov=true",
        "optimizer.kwargs.momentum=0",
        says=("optimizer.kwargs.nesterov=true", "momentum"),
    ),
    "milestones": config(
        "scheduler.name=step", says=("scheduler.lr_decay_steps=null", "a list such as")
    ),
    "validation": config(
        "check_val_every_n_epoch=0", says=("check_val_every_n_epoch=0", "an integer above 0")
    ),
    "interval of validation": config(
        "val_check_interval=100", says=("val_check_interval=100", "4 batches")
    ),
    "three crops": config("augmentations.0.num_crops=3", says=("augmentations=", "3 large", "two")),
    "three crops of a built-in": of_method(
        "simclr",
        "temperature: 0.1",
        "augmentations.0.num_crops=3",
        says=("augmentations=", "3 large", "num_crops: 2"),
    ),
    "turned off beside a probability": config(
        "augmentations.0.gaussian_blur.enabled=false",
        "augmentations.0.gaussian_blur.prob=0.5",
        says=("augmentations.0.gaussian_blur.enabled=false", "allowed: prob"),
    ),
    "crop that does not fit": config(
        "backbone.name=timm/vit_tiny_patch16_224",
        "~backbone.kwargs",
        "+backbone.kwargs.img_size=64",
        says=("augmentations.0.crop_size=32", "vit_tiny_patch16_224"),
    ),
    "devices": config("devices=abc", says=("devices='abc'", "give a number, a list, or auto")),
    "no devices": config("devices=0", says=("devices=0", "an integer above 0")),
    "numbered processors": config("devices='0,1'", says=("devices='0,1'", "CPU")),
    "accelerator that is not there": config(
        "accelerator=tpu", says=("accelerator='tpu'", "allowed here: auto, cpu")
    ),
    "what the Trainer refuses": config("barebones=true", says=("barebones",)),
    "queue": of_method(
        "nnclr",
        "temperature: 0.1, pred_hidden_dim: 8, queue_size: 63",
        says=("method_kwargs.queue_size=63", "smaller than the batch", "64"),
    ),
    "queue of SwAV": of_method(
        "swav",
        "temperature: 0.1, queue_size: 7",
        says=("method_kwargs.queue_size=7", "smaller than the batch"),
    ),
    "clusters": of_method(
        "deepclusterv2",
        "num_prototypes: [300]",
        says=("method_kwargs.num_prototypes=[300]", "up to 256"),
    ),
    "whitening": of_method(
        "wmse", "whitening_size: 24", says=("method_kwargs.whitening_size=24", "batch of 64")
    ),
    "warm-up of DINO": of_method(
        "dino",
        "num_prototypes: 8, warmup_teacher_temperature_epochs: 9",
        says=("method_kwargs.warmup_teacher_temperature_epochs=9", "up to 1"),
    ),
    "maps": config("auto_umap.enabled=true", says=("auto_umap.enabled=true", "main_pretrain.py")),
    "evaluation without images": config(
        "data.val_path=null",
        "online_eval.every_n_epochs=1",
        says=("online_eval.every_n_epochs=1", "data.val_path"),
    ),
    "wandb": config("wandb.enabled=true", says=("wandb.enabled=true", "pip install wandb")),
    "tensorboard": config("loggers=[tensorboard]", says=("loggers=['tensorboard']", "pip install")),
}

PATHS = {
    "no data": config("data.train_path=/no/where", says=("data.train_path='/no/where'", "folder")),
    "folder as HDF5": config(
        "data.format=h5", says=("data.train_path='{digits}'", "a folder, not an HDF5 file")
    ),
    "text as HDF5": config(
        "data.format=h5",
        "data.train_path={file}",
        says=("data.train_path='{file}'", "not an HDF5 file"),
    ),
    "missing HDF5": config(
        "data.format=h5", "data.train_path=/no/x.h5", says=("data.train_path=", "no such file")
    ),
    "missing data set": config(
        "data.format=huggingface",
        "data.train_path=/no/where",
        says=("data.train_path='/no/where'", "a name on the hub"),
    ),
    "empty data set": config(
        "data.format=huggingface",
        "data.train_path={empty}",
        says=("data.train_path='{empty}'", "data files", "load_dataset"),
    ),
    "torn parquet": config(
        "data.format=huggingface",
        "data.train_path={parquet}",
        "+data.huggingface.cache_dir={parquet}.cache",
        says=("data.train_path='{parquet}'", "arquet"),
    ),
    "data in a file": config("data.train_path={file}", says=("data.train_path='{file}'", "line 1")),
    "more classes than the data set has": config(
        "data.dataset=cifar10",
        "data.format=huggingface",
        "data.train_path={one_class_more}",
        "data.val_path=null",
        "data.fraction=-1",
        "+data.huggingface.cache_dir={parquet}.cache",
        says=("data.dataset='cifar10'", "10 classes", "of 11", "custom"),
    ),
    "no classes": config("data.train_path={flat}", says=("data.train_path='{flat}'", "<class>/")),
    "empty classes": config(
        "data.train_path={hollow}", says=("data.train_path='{hollow}'", "class")
    ),
    "unknown class": config(
        "data.val_path={one_class_more}",
        says=("data.val_path='{one_class_more}'", "class 'eleven'", "allowed: 0, 1"),
    ),
    "class that is missing": config(
        "data.val_path={one_class_less}",
        says=("data.val_path='{one_class_less}'", "class '7'"),
    ),
    "no labels, no images": config(
        "data.no_labels=true", "data.val_path=null", says=("data.train_path=", "no image")
    ),
    "runs below a file": config(
        "checkpoint.dir={file}/runs", says=("checkpoint.dir=", "is a file")
    ),
    "run directory that is a file": Mistake(
        (*DEBIASED, *TINY, "--run-dir", "{file}"), ("--run-dir='{file}'", "name a folder")
    ),
    "empty folder": Mistake((*DEBIASED, *TINY, "--run-dir="), ("an empty value", "'--run-dir='")),
    "somebody's folder": Mistake(
        (*DEBIASED, *TINY, "--run-dir", "{configs}"),
        ("--run-dir='{configs}': it holds 'circle.yaml' and is no run", "an empty folder"),
    ),
    "a checkpoint folder of solo-learn": Mistake(
        (*DEBIASED, *TINY, "--run-dir", "{upstream}"),
        ("--run-dir='{upstream}': it holds", "is no run"),
    ),
    "run directory of another config": Mistake(
        (*DEBIASED, *TINY, "optimizer.lr=0.7", "--run-dir", "{run}"),
        ("{run}", "another run: optimizer.lr", "--force"),
    ),
    "checkpoint to resume from": config(
        "resume_from_checkpoint=/no/run.ckpt",
        says=("resume_from_checkpoint='/no/run.ckpt'", ".ckpt"),
    ),
}

LINES = {
    "nothing": words(says=("allowed: benchmark, demo, doctor, eval",)),
    "command": words("pretrian", says=("unknown command 'pretrian'", "did you mean 'pretrain'?")),
    "option before the command": words(
        "--vresion", says=("'--vresion'", "did you mean '--version'?")
    ),
    "option": words(
        "pretrain", "--config-nam", "x", says=("'--config-nam'", "did you mean '--config-name'?")
    ),
    "option with a value": words(
        "pretrain", "--config-nam=x", says=("'--config-nam'", "did you mean '--config-name'?")
    ),
    "option of doctor": words("doctor", "--jsn", says=("'--jsn'", "did you mean '--json'?")),
    "word too many": words("methods", "simclr", says=("simclr",)),
    "no --config-name": words("pretrain", "max_epochs=1", says=("--config-name", "--resume")),
    "no name": words("pretrain", "--config-name", says=("--config-name",)),
    "name of a config": words(
        "pretrain",
        "--config-name",
        "digits/debaised",
        says=("--config-name='digits/debaised'", "did you mean 'digits/debiased'?", "allowed:"),
    ),
    "--config-path": words(
        "pretrain", "--config-name", "x", "--config-path", "/no/where", says=("/no/where", "folder")
    ),
    "epochs of the demo": words("demo", "--epochs", "0", says=("--epochs", "an integer above 0")),
    "text for epochs": words("demo", "--epochs", "few", says=("'few'", "an integer above 0")),
    "no key=value": config("max_epochs", says=("'max_epochs'", "write key=value")),
    "no key": config("=3", says=("'=3'", "write key=value")),
    "index in brackets": config(
        "augmentations[0].crop_size=3", says=("augmentations.0.crop_size",)
    ),
    "sweep": config("max_epochs=1,2", says=("'max_epochs=1,2'", "key=[a,b]")),
    "deletes nothing": config(
        "~optimizer.learning_rate", says=("optimizer.learning_rate", "not there", "batch_size")
    ),
    "deletes another value": config("~optimizer.lr=7", says=("optimizer.lr=0.3", "7")),
    "entry of a list": config(
        "augmentations.5.crop_size=8", says=("augmentations.5.crop_size=8", "0")
    ),
    "name for an entry": config("augmentations.x=8", says=("augmentations.x=8", "augmentations.0")),
    "group": config("foo/bar=3", says=("foo/bar", "foo.bar=")),
    "option of a group": config(
        "solo_ext/augmentations@augmentations=digit", says=("digit", "did you mean 'digits'?")
    ),
    "interpolation": config("name=${{nothing}}", says=("name='${{nothing}}'", "not found")),
    "environment variable": config(
        "name=${{oc.env:SOLO_EXT_NO_SUCH}}", says=("name=", "SOLO_EXT_NO_SUCH")
    ),
    "circle": config("name=${{name}}", says=("name='${{name}}'", "ecursive")),
}

FILES = {
    name: words("pretrain", "--config-path", "{configs}", "--config-name", name, says=says)
    for name, says in {
        "torn": ("config 'torn'", "line 2"),
        "twice": ("config 'twice'", "duplicate key name"),
        "list": ("'list'",),
        "circle": ("config 'circle'", "circle"),
        "no_default": ("config 'nothing'", "not there"),
        "no_group": ("did you mean 'digits'?",),
        "missing": ("name='???'",),
        "nowhere": ("name='${{data.nowhere}}'", "data.nowhere"),
        "sub/unpacked": ("sub/unpacked", "# @package _global_"),
        "twce": ("--config-name='twce'", "did you mean 'twice'?"),
    }.items()
}

RESUME = {
    "empty": words("pretrain", "--resume", "", says=("an empty value after '--resume'",)),
    "no run": words("pretrain", "--resume", "{empty}", says=("{empty}", "config.yaml")),
    "no folder": words("pretrain", "--resume", "/no/run", says=("/no/run", "no such folder")),
    "with overrides": words(
        "pretrain", "--resume", "{run}", "max_epochs=2", says=("max_epochs=2",)
    ),
    "with a config path": words(
        "pretrain", "--resume", "{run}", "--config-path", "x", says=("config_path",)
    ),
    "with a config": words(
        "pretrain", "--resume", "{run}", "--config-name", "x", says=("--resume",)
    ),
    "torn": words("pretrain", "--resume", "{torn}", says=("{torn}", "cannot be read")),
}

EVAL = {
    "protocol": words("eval", "knnn", "{run}", says=("'knnn'", "did you mean 'knn'?")),
    "no run directory": words("eval", "knn", says=("RUN_DIR",)),
    "no folder": words("eval", "knn", "/no/run", says=("/no/run", "no such run")),
    "no checkpoint": words("eval", "knn", "{empty}", says=("{empty}", "no .ckpt")),
    "torn": words("eval", "knn", "{torn}", says=("{torn}", "cannot be read")),
    "no Lightning checkpoint": words("eval", "knn", "{bare}", says=("{bare}", "state_dict")),
    "no args.json": words("eval", "knn", "{no_args}", says=("no args.json",)),
    "other args.json": words("eval", "knn", "{other}", says=("does not fit", "of another shape")),
    "broken args.json": words("eval", "knn", "{bad_args}", says=("args.json", "backbone.name=3")),
    "key": words("eval", "knn", "{run}", "kk=[20]", says=("kk=[20]: unknown", "did you mean 'k'?")),
    "key of the other protocol": words(
        "eval", "knn", "{run}", "weight_decay=[1]", says=("weight_decay=[1]", "temperature")
    ),
    "nested key": words(
        "eval", "knn", "{run}", "data.trainpath=x", says=("data.trainpath='x'", "'train_path'?")
    ),
    "k": words("eval", "knn", "{run}", "k=0", says=("k=0", "a list", "an integer above 0")),
    "an entry of k": words("eval", "knn", "{run}", "k=[5,0]", says=("k.1=0", "an integer above 0")),
    "temperature": words(
        "eval", "knn", "{run}", "temperature=[0]", says=("temperature.0=0", "a number above 0")
    ),
    "temperature as a scalar": words(
        "eval", "knn", "{run}", "temperature=0", says=("temperature=0", "a list")
    ),
    "holdout": words("eval", "linear", "{run}", "holdout=1", says=("holdout=1", "below 1")),
    "device": words("eval", "knn", "{run}", "device=tpu", says=("device='tpu'", "auto, cpu")),
    "device without values": words("eval", "knn", "{run}", "device=meta", says=("device='meta'",)),
    "no key=value": words("eval", "knn", "{run}", "k", says=("'k'", "write key=value")),
    "sweep": words("eval", "knn", "{run}", "k=1,2", says=("k=1,2", "key=[a,b]")),
    "data": words(
        "eval", "knn", "{run}", "data.train_path=/no/where", says=("data.train_path='/no/where'",)
    ),
    "classes": words(
        "eval",
        "knn",
        "{run}",
        "data.val_path={one_class_less}",
        says=("data.val_path='{one_class_less}'", "'7'"),
    ),
}

EXPORT = {
    "no run directory": words("export", "--format", "timm", says=("RUN_DIR",)),
    "no format": words("export", "{run}", says=("--format",)),
    "format": words(
        "export", "{run}", "--format", "tim", says=("unknown format 'tim'", "did you mean 'timm'?")
    ),
    "option": words("export", "{run}", "--outt=x", says=("'--outt'", "did you mean '--out'?")),
    "override": words("export", "{run}", "--format=timm", "epoch=3", says=("epoch=3",)),
    "no folder": words("export", "/no/run", "--format=timm", says=("/no/run", "no such run")),
    "torn": words("export", "{torn}", "--format=timm", says=("{torn}", "cannot be read")),
    "other args.json": words("export", "{other}", "--format=timm", says=("does not fit",)),
    "name of the file": words(
        "export", "{run}", "--format=safetensors", "--out={empty}", says=("--out='{empty}'",)
    ),
    "place": words(
        "export", "{run}", "--format=timm", "--out=no/where", says=("--out='no/where'", "'no'")
    ),
}

ONLY_IN_MAIN = {
    "release": of_method("mae", "", says=("method='mae'", "1.0.2", "PYTHONPATH")),
}
IN_MAIN = {
    "backbone of MAE": of_method(
        "mae",
        "decoder_embed_dim: 8, decoder_depth: 1, decoder_num_heads: 1",
        "~method_kwargs.proj_hidden_dim",
        "~method_kwargs.proj_output_dim",
        says=("backbone.name='timm/resnet10t'", "vit_tiny"),
    ),
    "argument that upstream drops": config(
        "backbone.name=poolformer_s12",
        "~backbone.kwargs",
        "+backbone.kwargs.pool_sise=3",
        says=("backbone.kwargs.pool_sise=3", "did you mean 'pool_size'?"),
    ),
}

TABLES: dict[str, dict[str, Mistake]] = {
    "keys": KEYS,
    "names": NAMES,
    "types": TYPES,
    "values": VALUES,
    "paths": PATHS,
    "lines": LINES,
    "files": FILES,
    "resume": RESUME,
    "eval": EVAL,
    "export": EXPORT,
    "host": ONLY_IN_MAIN if HOST == "1.0.2" else IN_MAIN,
}
ALL = [
    pytest.param(mistake, id=f"{table}: {name}")
    for table, mistakes in TABLES.items()
    for name, mistake in mistakes.items()
    if name not in ("wandb", "tensorboard") or find_spec(name) is None
]


@pytest.mark.parametrize("mistake", ALL)
def test_one_line_that_helps(
    mistake: Mistake, command: Callable[..., Any], places: dict[str, str], tmp_path: Path
) -> None:
    assert_one_line_that_helps(mistake, command, places, tmp_path)


def test_in_a_process_of_its_own(tmp_path: Path) -> None:
    """The latest mistake there is: model and loggers exist, the Trainer refuses."""
    done = subprocess.run(
        [sys.executable, "-m", "solo_ext.lab.cli.main", *DEBIASED, *TINY, "barebones=true"],
        cwd=tmp_path,
        env={**os.environ},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert done.stderr.startswith("solo-ext: ")
    assert list(tmp_path.iterdir()) == []
