"""Wrong configs of every method end with one line that helps, and leave nothing behind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from solo_ext.methods import METHODS
from tests.lab.cli.mistakes import Mistake, assert_one_line_that_helps, of_config

Case = tuple[str | tuple[str, ...], tuple[str, ...]]
TEACHER = "method_kwargs.teacher.path={run}"
PROTOTYPES = ("method_kwargs.positives=prototype", "method_kwargs.clusters.warmup_epochs=0")
CLUSTERS = "method_kwargs.classes=cluster"
NO_LOSS_KWARGS = "~method_kwargs.loss_kwargs"

DEBIASED: dict[str, Case] = {
    "misspelt key": (
        "method_kwargs.taus_plus=0.1",
        ("method_kwargs.taus_plus=0.1: unknown key", "did you mean 'tau_plus'?"),
    ),
    "negative prior": (
        "method_kwargs.tau_plus=-0.1",
        ("method_kwargs.tau_plus=-0.1", "0 or more, below 1"),
    ),
    "no number": (
        "method_kwargs.temperature=nan",
        ("method_kwargs.temperature=nan", "a number above 0"),
    ),
    "infinite": (
        "method_kwargs.temperature=inf",
        ("method_kwargs.temperature=inf", "a number above 0"),
    ),
    "no layers": ("method_kwargs.proj_layers=0", ("proj_layers=0", "an integer above 0")),
    "text for a number": (
        "method_kwargs.temperature=warm",
        ("method_kwargs.temperature='warm'", "a number above 0"),
    ),
    "number for a truth": (
        "method_kwargs.symmetric=3",
        ("method_kwargs.symmetric=3", "true or false"),
    ),
    "predictor of views": (
        "method_kwargs.pred_hidden_dim=8",
        ("method_kwargs.pred_hidden_dim=8", "no side for a predictor", "take 0"),
    ),
    "half precision of a batch": (
        "method_kwargs.compute_dtype=bfloat16",
        ("method_kwargs.compute_dtype='bfloat16'", "queue", "take float32"),
    ),
    "name of positives": (
        "method_kwargs.positives=views",
        ("method_kwargs.positives='views'", "did you mean 'view'?", "nearest_neighbor"),
    ),
    "more prototypes than images": (
        (*PROTOTYPES, "method_kwargs.clusters.num_prototypes=[20,300]"),
        ("method_kwargs.clusters.num_prototypes=[20, 300]", "280 images", "up to 280"),
    ),
    "a queue of no use": (
        "method_kwargs.queue_size=4096",
        ("method_kwargs.queue_size=4096", "has no queue", "take method_kwargs.negatives=queue"),
    ),
}

HARD_NEGATIVE: dict[str, Case] = {
    "misspelt key": (
        "method_kwargs.betta=1",
        ("method_kwargs.betta=1: unknown key", "did you mean 'beta'?"),
    ),
    "negative": ("method_kwargs.beta=-1", ("method_kwargs.beta=-1", "0 or more")),
    "infinite": ("method_kwargs.beta=inf", ("method_kwargs.beta=inf", "0 or more")),
    "text for a number": ("method_kwargs.beta=hard", ("method_kwargs.beta='hard'", "0 or more")),
    "list for a number": (
        "method_kwargs.tau_plus=[0.1]",
        ("method_kwargs.tau_plus=[0.1]", "0 or more, below 1"),
    ),
    "text for a truth": (
        "method_kwargs.detach_weights=perhaps",
        ("method_kwargs.detach_weights='perhaps'", "true or false"),
    ),
    "more mined than queued": (
        (
            "method_kwargs.negatives=queue",
            "method_kwargs.queue_size=100",
            "method_kwargs.mixing.num_hard=101",
            "method_kwargs.mixing.num_pair_mixes=8",
        ),
        ("method_kwargs.mixing.num_hard=101", "the queue has 100 rows", "up to 100"),
    ),
    "more neighbours than rows": (
        (
            "method_kwargs.positives=nearest_neighbor",
            "method_kwargs.support_set.size=8",
            "method_kwargs.support_set.top_k=9",
        ),
        ("method_kwargs.support_set.top_k=9", "8 rows", "up to 8"),
    ),
    "memory of clusters": (
        (
            *PROTOTYPES,
            "method_kwargs.clusters.num_prototypes=[20]",
            "method_kwargs.clusters.e_step=bank",
            "method_kwargs.clusters.e_step_features=disk",
        ),
        ("method_kwargs.clusters.e_step_features='disk'", "take memory, or e_step=exact"),
    ),
}

MOCHI: dict[str, Case] = {
    "misspelt key": (
        "method_kwargs.mixing.num_hards=8",
        ("method_kwargs.mixing.num_hards=8: unknown key", "did you mean 'num_hard'?"),
    ),
    "nothing mined": (
        "method_kwargs.mixing.num_hard=0",
        ("method_kwargs.mixing.num_hard=0", "an integer above 0"),
    ),
    "fewer than no mixtures": (
        "method_kwargs.mixing.num_pair_mixes=-1",
        ("method_kwargs.mixing.num_pair_mixes=-1", "an integer of 0 or more"),
    ),
    "broken number": (
        "method_kwargs.mixing.num_query_mixes=1.5",
        ("method_kwargs.mixing.num_query_mixes=1.5", "an integer of 0 or more"),
    ),
    "scalar for a section": (
        "method_kwargs.mixing=128",
        ("method_kwargs.mixing=128", "a mapping with the keys num_hard"),
    ),
    "text for an integer": (
        "method_kwargs.queue_size=long",
        ("method_kwargs.queue_size='long'", "an integer above 0"),
    ),
    "more mined than queued": (
        "method_kwargs.mixing.num_hard=1001",
        ("method_kwargs.mixing.num_hard=1001", "the queue has 1000 rows", "up to 1000"),
    ),
    "queue shorter than what is mined": (
        "method_kwargs.queue_size=100",
        ("method_kwargs.mixing.num_hard=128", "the queue has 100 rows", "up to 100"),
    ),
    "half precision of mixtures": (
        "method_kwargs.compute_dtype=bfloat16",
        ("method_kwargs.compute_dtype='bfloat16'", "not mixed", "take float32"),
    ),
    "tau of momentum": ("momentum.final_tau=1.1", ("momentum.final_tau=1.1", "from 0 to 1")),
}

METRIC: dict[str, Case] = {
    "misspelt key": (
        "method_kwargs.minning=hard",
        ("method_kwargs.minning='hard': unknown key", "did you mean 'mining'?"),
    ),
    "misspelt argument of the loss": (
        "method_kwargs.loss_kwargs.temprature=0.5",
        ("method_kwargs.loss_kwargs.temprature=0.5", "did you mean 'temperature'?"),
    ),
    "value of the loss": (
        "method_kwargs.loss_kwargs.temperature=0",
        ("method_kwargs.loss_kwargs", "temperature=0", "must be above 0"),
    ),
    "negative weight": (
        "method_kwargs.uniformity_weight=-1",
        ("method_kwargs.uniformity_weight=-1", "0 or more"),
    ),
    "text for a number of the loss": (
        "method_kwargs.loss_kwargs.temperature=warm",
        ("method_kwargs.loss_kwargs", "'warm'", "soft_nearest_neighbor_loss_func"),
    ),
    "scalar for a section": (
        "method_kwargs.loss_kwargs=0.4",
        ("method_kwargs.loss_kwargs=0.4", "a mapping"),
    ),
    "no loss": ("~method_kwargs.loss", ("method_kwargs.loss=null", "required")),
    "name of the loss": (
        ("method_kwargs.loss=triplet_los_func", NO_LOSS_KWARGS),
        ("method_kwargs.loss='triplet_los_func'", "did you mean 'triplet_loss_func'?"),
    ),
    "name of the mining": (
        "method_kwargs.mining=semihard",
        ("method_kwargs.mining='semihard'", "did you mean 'semi_hard'?"),
    ),
    "loss of a queue": (
        ("method_kwargs.loss=info_nce_loss_func", NO_LOSS_KWARGS),
        ("method_kwargs.loss='info_nce_loss_func'", "no criterion trains it"),
    ),
    "argument of the loss before": (
        "method_kwargs.loss=triplet_loss_func",
        ("method_kwargs.loss_kwargs.temperature=0.4", "triplet_loss_func takes no such argument"),
    ),
    "class weights of images": (
        ("method_kwargs.loss=arcface_loss_func", NO_LOSS_KWARGS),
        ("method_kwargs.classes='instance'", "a weight per class", "label or cluster"),
    ),
    "more clusters than images": (
        (CLUSTERS, "method_kwargs.clusters.num_prototypes=[281]"),
        ("method_kwargs.clusters.num_prototypes=[281]", "280 images", "up to 280"),
    ),
    "two clusterings": (
        (CLUSTERS, "method_kwargs.clusters.num_prototypes=[20,30]"),
        ("method_kwargs.clusters.num_prototypes=[20, 30]", "one class", "give one number"),
    ),
}

PCL: dict[str, Case] = {
    "misspelt key": (
        "method_kwargs.num_prototype=[20]",
        ("method_kwargs.num_prototype=[20]: unknown key", "did you mean 'num_prototypes'?"),
    ),
    "misspelt key of k-means": (
        "method_kwargs.kmeans.iteration=5",
        ("method_kwargs.kmeans.iteration=5: unknown key", "did you mean 'iterations'?"),
    ),
    "no prototypes": (
        "method_kwargs.num_prototypes=[]",
        ("method_kwargs.num_prototypes=[]", "a list of 1 or more"),
    ),
    "one of them": (
        "method_kwargs.num_prototypes=[20,0]",
        ("method_kwargs.num_prototypes.1=0", "an integer above 0"),
    ),
    "negative warm-up": (
        "method_kwargs.warmup_epochs=-1",
        ("method_kwargs.warmup_epochs=-1", "an integer of 0 or more"),
    ),
    "scalar for a list": (
        "method_kwargs.num_prototypes=20",
        ("method_kwargs.num_prototypes=20", "a list", "an integer above 0"),
    ),
    "text for a truth": (
        "method_kwargs.symmetric=both",
        ("method_kwargs.symmetric='both'", "true or false"),
    ),
    "name of the head": ("method_kwargs.head=v3", ("method_kwargs.head='v3'", "allowed: v1, v2")),
    "name of the backend": (
        "method_kwargs.kmeans.backend=fais",
        ("method_kwargs.kmeans.backend='fais'", "did you mean 'faiss'?"),
    ),
    "more prototypes than images": (
        "method_kwargs.num_prototypes=[20,300]",
        ("method_kwargs.num_prototypes=[20, 300]", "280 images", "up to 280"),
    ),
    "more negatives than prototypes": (
        "method_kwargs.num_negatives=50",
        ("method_kwargs.num_negatives=50", "of 20 prototypes up to 64", "take null"),
    ),
    "sample below prototypes": (
        "method_kwargs.e_step_sample=50",
        ("method_kwargs.e_step_sample=50", "100 prototypes", "from 100 on"),
    ),
    "backend without a GPU": (
        "method_kwargs.kmeans.backend=flash",
        ("method_kwargs.kmeans.backend='flash'", "needs features on CUDA"),
    ),
    "bank on a disk": (
        ("method_kwargs.e_step=bank", "method_kwargs.e_step_features=disk"),
        ("method_kwargs.e_step_features='disk'", "take memory, or e_step=exact"),
    ),
    "folder of the features": (
        (
            "method_kwargs.warmup_epochs=0",
            "method_kwargs.e_step_features=disk",
            "method_kwargs.e_step_dir={file}/features",
        ),
        ("method_kwargs.e_step_dir='{file}/features'", "Not a directory", "name a folder"),
    ),
    "momentum classifier that sees one view": (
        ("method_kwargs.symmetric=false", "momentum.classifier=true"),
        ("momentum.classifier=true", "one view only", "method_kwargs.symmetric=true"),
    ),
}

NNCLR_SYMMETRIC: dict[str, Case] = {
    "misspelt key": (
        "method_kwargs.support_set.topk=2",
        ("method_kwargs.support_set.topk=2: unknown key", "did you mean 'top_k'?"),
    ),
    "key of the built-in": (
        "method_kwargs.queue_sizes=1000",
        ("method_kwargs.queue_sizes=1000: unknown key", "did you mean 'queue_size'?"),
    ),
    "no neighbour": (
        "method_kwargs.support_set.top_k=0",
        ("method_kwargs.support_set.top_k=0", "an integer above 0"),
    ),
    "empty set": (
        "method_kwargs.support_set.size=0",
        ("method_kwargs.support_set.size=0", "an integer above 0"),
    ),
    "scalar for a section": (
        "method_kwargs.support_set=1000",
        ("method_kwargs.support_set=1000", "a mapping with the keys exclude_own, size"),
    ),
    "text for a truth": (
        "method_kwargs.support_set.exclude_own=mine",
        ("method_kwargs.support_set.exclude_own='mine'", "true or false"),
    ),
    "more neighbours than rows": (
        "method_kwargs.support_set.top_k=1001",
        ("method_kwargs.support_set.top_k=1001", "1000 rows", "up to 1000"),
    ),
    "predictor of views": (
        "method_kwargs.positives=view",
        ("method_kwargs.pred_hidden_dim=512", "no side for a predictor", "take 0"),
    ),
    "predictor until there are prototypes": (
        (
            "method_kwargs.positives=prototype",
            "method_kwargs.clusters.num_prototypes=[20]",
        ),
        ("method_kwargs.clusters.warmup_epochs=20", "take 0", "pred_hidden_dim=0"),
    ),
    "one view": (
        "augmentations.0.num_crops=1",
        ("augmentations=", "1 large", "two"),
    ),
}

SEED: dict[str, Case] = {
    "misspelt key": (
        (TEACHER, "method_kwargs.queue_sise=8"),
        ("method_kwargs.queue_sise=8: unknown key", "did you mean 'queue_size'?"),
    ),
    "misspelt key of the teacher": (
        "method_kwargs.teacher.pth=x",
        ("method_kwargs.teacher.pth='x': unknown key", "did you mean 'path'?"),
    ),
    "temperature of nothing": (
        (TEACHER, "method_kwargs.teacher_temperature=0"),
        ("method_kwargs.teacher_temperature=0", "a number above 0"),
    ),
    "text for an integer": (
        (TEACHER, "method_kwargs.queue_size=many"),
        ("method_kwargs.queue_size='many'", "an integer above 0"),
    ),
    "path for a section": (
        "method_kwargs.teacher={run}",
        ("method_kwargs.teacher='{run}'", "a mapping with the keys cache,"),
    ),
    "no temperature of the teacher": (
        (TEACHER, "~method_kwargs.teacher_temperature"),
        ("method_kwargs.teacher_temperature=null", "give 0.01"),
    ),
    "temperature of another loss": (
        (TEACHER, "method_kwargs.loss=regression"),
        ("method_kwargs.teacher_temperature=0.01", "loss=regression", "leave it out"),
    ),
    "estimate without negatives": (
        (TEACHER, "method_kwargs.beta=1"),
        ("method_kwargs.beta=1", "loss=seed has no negatives", "loss=contrastive"),
    ),
    "name of the loss": (
        (TEACHER, "method_kwargs.loss=contrastiv"),
        ("method_kwargs.loss='contrastiv'", "did you mean 'contrastive'?"),
    ),
    "name of the layout": (
        (TEACHER, "method_kwargs.teacher.layout=moco"),
        ("method_kwargs.teacher.layout='moco'", "did you mean 'moco_v2'?"),
    ),
    "more mined than queued": (
        (
            TEACHER,
            "method_kwargs.loss=contrastive",
            "~method_kwargs.teacher_temperature",
            "method_kwargs.mixing.num_hard=1001",
            "method_kwargs.mixing.num_pair_mixes=4",
        ),
        ("method_kwargs.mixing.num_hard=1001", "the queue has 1000 rows", "up to 1000"),
    ),
    "no teacher there": ((), ("method_kwargs.teacher.path=", "teachers/digits", "no such file")),
    "no teacher": (
        "method_kwargs.teacher.path=null",
        ("method_kwargs.teacher.path=null", "layout run needs", "run directory"),
    ),
    "empty folder": (
        "method_kwargs.teacher.path={empty}",
        ("{empty}", "no .ckpt"),
    ),
    "text": ("method_kwargs.teacher.path={file}", ("{file}",)),
    "torn": ("method_kwargs.teacher.path={torn}", ("{torn}", "cannot be read")),
    "other args.json": ("method_kwargs.teacher.path={other}", ("does not fit", "of another shape")),
    "broken args.json": (
        "method_kwargs.teacher.path={bad_args}",
        ("args.json", "backbone.name=3"),
    ),
    "no Lightning checkpoint": ("method_kwargs.teacher.path={bare}", ("{bare}", "state_dict")),
    "text of another layout": (
        ("method_kwargs.teacher.path={file}", "method_kwargs.teacher.layout=moco_v2"),
        ("{file}", "cannot be read"),
    ),
    "folder of another layout": (
        (TEACHER, "method_kwargs.teacher.layout=dino"),
        ("method_kwargs.teacher.path='{run}'", "a folder", "layout dino needs a file"),
    ),
    "model of a run": (
        (TEACHER, "method_kwargs.teacher.model=resnet18"),
        ("method_kwargs.teacher.model='resnet18'", "a run says itself", "drop it"),
    ),
    "no model": (
        ("method_kwargs.teacher.path=null", "method_kwargs.teacher.layout=timm"),
        ("method_kwargs.teacher.model=null", "needs a model", "resnet50.a1_in1k"),
    ),
    "model like none": (
        (
            "method_kwargs.teacher.path=null",
            "method_kwargs.teacher.layout=torchvision",
            "method_kwargs.teacher.model=resnet81",
        ),
        ("method_kwargs.teacher.model='resnet81'", "unknown", "did you mean 'resnet18'?"),
    ),
    "momentum networks that are not there": (
        (TEACHER, "method_kwargs.teacher.networks=momentum"),
        ("{run}", "momentum"),
    ),
    "kept embeddings of views by chance": (
        (TEACHER, "method_kwargs.teacher.cache=true"),
        ("method_kwargs.teacher.cache=true", "to chance", "take false"),
    ),
    "half precision on a CPU": (
        (TEACHER, "method_kwargs.teacher.dtype=float16"),
        ("method_kwargs.teacher.dtype='float16'", "CPU", "bfloat16 or float32"),
    ),
    "three crops": (
        (TEACHER, "augmentations.0.num_crops=3"),
        ("augmentations=", "3 large", "num_crops: 1 or 2"),
    ),
}

PROTOSEED: dict[str, Case] = {
    "misspelt key": (
        (TEACHER, "method_kwargs.asignment=softmax"),
        ("method_kwargs.asignment='softmax': unknown key", "did you mean 'assignment'?"),
    ),
    "no prototypes": (
        (TEACHER, "method_kwargs.num_prototypes=0"),
        ("method_kwargs.num_prototypes=0", "an integer above 0"),
    ),
    "share of the prior": (
        (TEACHER, "method_kwargs.prior_momentum=1.5"),
        ("method_kwargs.prior_momentum=1.5", "from 0 to 1"),
    ),
    "list for a number": (
        (TEACHER, "method_kwargs.num_prototypes=[8]"),
        ("method_kwargs.num_prototypes=[8]", "an integer above 0"),
    ),
    "name of the assignment": (
        (TEACHER, "method_kwargs.assignment=sinkhron"),
        ("method_kwargs.assignment='sinkhron'", "did you mean 'sinkhorn'?", "softmax"),
    ),
    "name of the loss": (
        (TEACHER, "method_kwargs.loss=protocp"),
        ("method_kwargs.loss='protocp'", "did you mean 'protocpc'?", "ce"),
    ),
    "name of the precision": (
        (TEACHER, "method_kwargs.compute_dtype=float16"),
        ("method_kwargs.compute_dtype='float16'", "allowed: bfloat16, float32"),
    ),
    "one setting under two names": (
        (TEACHER, "method_kwargs.temperature=0.3", "method_kwargs.student_temperature=0.1"),
        ("method_kwargs.temperature=0.3", "student_temperature, which is 0.1", "give one of them"),
    ),
    "a teacher without prototypes": (
        (TEACHER, "method_kwargs.prototypes=old"),
        ("method_kwargs.prototypes='old'", "without prototypes", "take new"),
    ),
    "no teacher there": ((), ("method_kwargs.teacher.path=", "teachers/digits", "no such file")),
    "a teacher without a checkpoint": ("method_kwargs.teacher.path={empty}", ("{empty}", ".ckpt")),
    "settings of SEED": (
        (TEACHER, "method_kwargs.queue_size=1000"),
        ("method_kwargs.queue_size=1000: unknown key", "allowed:"),
    ),
}

PROTOCPC: dict[str, Case] = {
    "misspelt key": (
        "method_kwargs.num_protoypes=8",
        ("method_kwargs.num_protoypes=8: unknown key", "did you mean 'num_prototypes'?"),
    ),
    "no prototypes": (
        "method_kwargs.num_prototypes=-1",
        ("method_kwargs.num_prototypes=-1", "an integer above 0"),
    ),
    "no iterations": (
        "method_kwargs.sinkhorn_iterations=0",
        ("method_kwargs.sinkhorn_iterations=0", "an integer above 0"),
    ),
    "negative epochs": (
        "method_kwargs.freeze_prototypes_epochs=-1",
        ("method_kwargs.freeze_prototypes_epochs=-1", "an integer of 0 or more"),
    ),
    "text for a number": (
        "method_kwargs.student_temperature=cold",
        ("method_kwargs.student_temperature='cold'", "a number above 0"),
    ),
    "null for a number": (
        "method_kwargs.proj_layers=null",
        ("method_kwargs.proj_layers=null", "an integer above 0"),
    ),
    "name of the assignment": (
        "method_kwargs.assignment=argmax",
        ("method_kwargs.assignment='argmax'", "sinkhorn, softmax"),
    ),
    "name of the order": (
        "method_kwargs.prior_order=before",
        ("method_kwargs.prior_order='before'", "after_loss, before_loss"),
    ),
    "a teacher from a file": (
        "method_kwargs.teacher.path={run}",
        ("method_kwargs.teacher=", "unknown key", "allowed:"),
    ),
    "no momentum": ("momentum.base_tau=-0.1", ("momentum.base_tau=-0.1", "from 0 to 1")),
    "one view": ("augmentations.0.num_crops=1", ("augmentations=", "1 large", "two")),
    "three views": ("augmentations.0.num_crops=3", ("augmentations=", "3 large", "two")),
}

OF_METHODS: dict[str, dict[str, Case]] = {
    "debiased": DEBIASED,
    "hard_negative": HARD_NEGATIVE,
    "metric": METRIC,
    "mochi": MOCHI,
    "nnclr_symmetric": NNCLR_SYMMETRIC,
    "pcl": PCL,
    "protocpc": PROTOCPC,
    "protoseed": PROTOSEED,
    "seed": SEED,
}


def mistakes() -> list[Any]:
    """A tiny run of ``digits/<method>`` with the overrides of each case."""
    return [
        pytest.param(
            of_config(f"digits/{method}", *[words] if isinstance(words, str) else words, says=says),
            id=f"{method}: {name}",
        )
        for method, cases in OF_METHODS.items()
        for name, (words, says) in cases.items()
    ]


def test_every_method_is_there() -> None:
    assert sorted(OF_METHODS) == sorted(METHODS)


@pytest.mark.parametrize("mistake", mistakes())
def test_one_line_that_helps(
    mistake: Mistake, command: Callable[..., Any], places: dict[str, str], tmp_path: Path
) -> None:
    assert_one_line_that_helps(mistake, command, places, tmp_path)
