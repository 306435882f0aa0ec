"""The E-step of a method in training: clusters the training set's embeddings into prototypes.

A method owns an :class:`EStep`, which creates prototypes and bank, decides when an E-step is due,
embeds all images, runs k-means (:func:`solo_ext.clustering.e_step`), logs the result and fills the
bank. :class:`EStepKwargs` are its settings.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from annotated_types import MinLen
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor

from solo_ext.core import distributed
from solo_ext.core.distributed import propagate_rank_errors, rank_barrier
from solo_ext.core.draws import LARGE, derive_seed
from solo_ext.core.errors import ConfigError, UserError
from solo_ext.core.precision import full_precision
from solo_ext.core.types import FolderName, NonNegativeInt, PositiveFloat, PositiveInt, Section
from solo_ext.memory.clusters import ClusterPrototypes
from solo_ext.memory.features import FeatureBank
from solo_ext.methods.registry import logger

if TYPE_CHECKING:
    from solo_ext.clustering import Granularity

PUBLISHED_CLUSTERS = 25000, 50000, 100000
"""Numbers of clusters in PCL's ImageNet runs."""
CLUSTERS = "method_kwargs.clusters"
"""Config key of the E-step's settings in methods other than PCL."""
_BATCHES_AT_ONCE = 4
# Batches between two barriers during embedding; at a barrier the host waits for the device.
_BARRIER_EVERY = 16


class KMeansKwargs(Section):
    """Settings of the k-means that finds the prototypes.

    Attributes:
        backend: ``auto`` is flash on a GPU if flash-kmeans is installed, else torch; with
            ``deterministic`` it is always torch. ``hierarchical`` compares an image with some
            ``2 sqrt(K)`` prototypes in each iteration, and with all K at the end.
        iterations: Lloyd iterations of the first E-step.
        warm_iterations: Lloyd iterations of later ones, which start from the previous means.
        restarts: number of initialisations of the first E-step; the best result is kept.

    Example:
        >>> KMeansKwargs(backend="hierarchical", iterations=10)
        KMeansKwargs(backend='hierarchical', iterations=10, warm_iterations=5, restarts=1)
    """

    backend: Literal["auto", "torch", "hierarchical", "faiss", "flash"] = "auto"
    iterations: PositiveInt = 20
    warm_iterations: PositiveInt = 5
    restarts: PositiveInt = 1


class EStepKwargs(Section):
    """When the embeddings of the training set are clustered, and into what.

    Attributes:
        num_prototypes: K of each granularity; null: PCL's, in proportion to the number of images.
        warmup_epochs: number of first epochs without prototypes.
        alpha: smooths the concentrations of small clusters.
        e_step: ``exact`` embeds the training set again, ``bank`` reuses embeddings of training.
        e_step_every: epochs between E-steps.
        e_step_sample: number of images that k-means runs on, drawn anew for every E-step; all
            images are then assigned to the prototypes that it finds. Null takes all.
        features_dir: folder on a local disk for the embeddings during an ``exact`` E-step; null:
            they stay on the device. The prototypes are the same either way.
        kmeans: as :class:`KMeansKwargs`.

    Example:
        >>> EStepKwargs(num_prototypes=[100, 200], kmeans={"restarts": 3}).kmeans.iterations
        20
    """

    num_prototypes: Annotated[list[PositiveInt], MinLen(1)] | None = None
    warmup_epochs: NonNegativeInt = 20
    alpha: PositiveFloat = 10.0
    e_step: Literal["exact", "bank"] = "exact"
    e_step_every: PositiveInt = 1
    e_step_sample: PositiveInt | None = None
    features_dir: Annotated[FolderName, MinLen(1)] | None = None
    kmeans: KMeansKwargs = KMeansKwargs()


def check_e_step(settings: Any, key: str) -> None:
    """Refuses settings of the E-step that do not fit each other or this machine.

    Args:
        settings: :class:`EStepKwargs`, or the section of the config.
        key: config key of the settings, for messages.

    Raises:
        ConfigError: a setting does not fit; the message names the first one.

    Example:
        >>> check_e_step(EStepKwargs(num_prototypes=[100], e_step_sample=50), CLUSTERS)
        Traceback (most recent call last):
            ...
        solo_ext.core.errors.ConfigError: ...: k-means cannot find 100 prototypes among ...
    """
    finest = max(settings.num_prototypes)
    if settings.e_step_sample is not None and settings.e_step_sample < finest:
        raise ConfigError(
            f"{key}.e_step_sample",
            settings.e_step_sample,
            f"k-means cannot find {finest} prototypes among fewer images",
            f"allowed: null, which takes all, or numbers from {finest} on",
        )
    if settings.features_dir is not None and settings.e_step == "bank":
        raise ConfigError(
            f"{key}.features_dir",
            settings.features_dir,
            "the bank lies on the device, and k-means reads it there",
            f"remove it, or set {key}.e_step=exact",
        )
    if settings.kmeans.backend != "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
        _resolved(settings.kmeans.backend, device, key)


def check_prototypes(settings: Any, key: str, num_samples: int) -> None:
    """Refuses more prototypes than samples, with both numbers in the ConfigError.

    Example:
        >>> check_prototypes(EStepKwargs(num_prototypes=[100]), CLUSTERS, num_samples=32)
        Traceback (most recent call last):
            ...
        solo_ext.core.errors.ConfigError: ...: the training set has 32 images; allowed: ...
    """
    if max(settings.num_prototypes) > num_samples:
        raise ConfigError(
            f"{key}.num_prototypes",
            list(settings.num_prototypes),
            f"the training set has {num_samples} images",
            f"allowed: numbers up to {num_samples}",
        )


class EStep:
    """Clusters a method's embeddings of the training set before an epoch (PCL, Algorithm 1).

    The method has ``embed``, which maps images to embeddings (N, D) of any norm, and ``embedder``,
    the networks that ``embed`` uses. The method registers ``prototypes`` and ``bank`` as its own
    submodules, so that checkpoints hold them.

    Attributes:
        prototypes: result of the last E-step.
        bank: the embeddings of training steps with ``e_step: bank``, else ``None``.

    Args:
        settings: when to cluster, and how; ``None`` if the method does not cluster, and no call
            does anything.
        key: config key of the settings, for messages.
        dim: D.
        temperature: mean of the concentrations.

    Example:
        >>> e_step = EStep(EStepKwargs(num_prototypes=[3, 6], warmup_epochs=1), CLUSTERS, dim=8)
        >>> [tuple(means.shape) for means in e_step.prototypes.means]
        [(3, 8), (6, 8)]
        >>> e_step.is_due(epoch=0), e_step.is_due(epoch=1)
        (False, True)
    """

    def __init__(
        self,
        settings: EStepKwargs | None,
        key: str,
        dim: int,
        temperature: float = 1.0,
    ) -> None:
        self.active = settings is not None
        self.settings = settings = settings or EStepKwargs()
        self.key, self.temperature = key, temperature
        self.prototypes = ClusterPrototypes(settings.num_prototypes or (), dim)
        self.bank = FeatureBank(dim) if self.active and settings.e_step == "bank" else None

    def start(self, method: Any) -> None:
        """Sizes the bank by the training set and chooses a k-means backend.

        Raises:
            ConfigError: there are too few samples, or the backend is not available.
            UserError: the checkpoint is of another training set.
        """
        if not self.active:
            return
        from solo_ext.config.check import common_config
        from solo_ext.data.loaders import labels_of, training_set

        self._config = common_config(method.cfg)
        self._dataset = dataset = training_set(method.trainer, self._config)
        self._size, self._labels = len(dataset), labels_of(dataset)
        # This rank embeds the samples of its share.
        self._samples = range(distributed.rank(), self._size, distributed.world_size())
        # Check this here too: solo-learn's own script does not run our checks of the data.
        check_prototypes(self.settings, self.key, self._size)
        shares = self.prototypes.assignments[0], () if self.bank is None else self.bank.value
        for share in shares:
            count = distributed.total(len(share), method.device)
            if count not in (0, self._size):
                raise UserError(
                    f"the checkpoint is of a training set of {count} images, this one has "
                    f"{self._size}; resume with the data of the checkpoint"
                )
        if self.bank is not None and not len(self.bank.value):
            self.bank.resize_(self._size)
        self.backend = _resolved(self.settings.kmeans.backend, method.device, self.key)
        if self.settings.features_dir is not None:
            with propagate_rank_errors(method.device):
                # Find a full disk now and not epochs later: every process keeps its file until
                # all processes have one.
                _held = self._room(method.device)
        late, last = self.settings.warmup_epochs, method.cfg.max_epochs
        if late >= last:
            rank_zero_only(logger.warning)(
                f"{self.key}.warmup_epochs={late} of max_epochs={last}: the prototypes will never "
                "be used"
            )

    def is_due(self, epoch: int) -> bool:
        """Whether ``epoch`` begins with an E-step."""
        since = epoch - self.settings.warmup_epochs
        fresh = self.prototypes.epoch < 0
        due = since >= 0 and (fresh or since % self.settings.e_step_every == 0)
        return bool(self.active and due)

    def before_epoch(self, method: Any) -> bool:
        """Runs and logs the E-step if the epoch begins with one; returns whether it does."""
        due = self.is_due(method.current_epoch)
        if due:
            metrics = self.run(method)
            method.log_dict(metrics, on_step=False, on_epoch=True, batch_size=1, sync_dist=True)
        return due

    def update_bank(self, indices: Tensor, keys: Iterable[Tensor]) -> None:
        """Writes the mean of each image's embeddings, unit rows (N, D) per view, to the bank.

        Without a bank, the keys are not computed if they are a generator.
        """
        if self.bank is not None:
            mean = F.normalize(torch.stack(list(keys)).mean(0), dim=1)
            self.bank.update_(distributed.gather(indices), distributed.gather(mean))

    def run(self, method: Any) -> dict[str, float]:
        """Embeds and clusters the training set, and updates the prototypes.

        Every rank embeds (or takes from the bank) every world-size-th sample, and k-means works on
        the same shares. An error on one rank ends all of them.

        Returns:
            What to log: per granularity the objective, concentrations, numbers of empty and
            singleton clusters, and normalised mutual information with any labels; seconds.

        Raises:
            RankError: another rank failed.
        """
        from solo_ext.clustering import e_step

        state, settings, kmeans = self.prototypes, self.settings, self.settings.kmeans
        begin, epoch, warm = time.monotonic(), method.current_epoch, state.epoch >= 0
        seed = method.cfg.get("seed") or 0
        samples, sample = self._samples, {}
        if settings.e_step_sample is not None:
            sample = {"sample": settings.e_step_sample, "sample_seed": derive_seed(seed, epoch)}
        with propagate_rank_errors(method.device):
            # V' = f'(X): momentum features of all training data.
            features = self._features(method)
            embedded = time.monotonic()
            # C^m = k-means(V', k_m), phi^m = concentration(C^m, V'), m = 1 .. M.
            found = e_step(
                features,
                torch.arange(samples.start, samples.stop, samples.step, device=method.device),
                state.num_prototypes,
                temperature=self.temperature,
                alpha=settings.alpha,
                init=state.means if warm else None,
                iterations=kmeans.warm_iterations if warm else kmeans.iterations,
                restarts=1 if warm else kmeans.restarts,
                seed=seed,
                backend=self.backend,
                device=method.device,
                **sample,
            )
            means, concentration, assignments, *_ = zip(*found, strict=True)
            state.update_(epoch, means, concentration, assignments)
            seconds = embedded - begin, time.monotonic() - embedded
            if not distributed.rank():
                sizes = "+".join(str(k) for k in state.num_prototypes)
                seen = min(settings.e_step_sample or self._size, self._size)
                logger.info(
                    f"E-step before epoch {epoch + 1}: {sizes} prototypes by {self.backend} "
                    f"k-means of {seen:,} images, objective "
                    f"{', '.join(f'{g.objective:.4f}' for g in found)}; "
                    f"features {seconds[0]:.1f} s, k-means {seconds[1]:.1f} s"
                )
            return _metrics(found, state.names, self._labels) | {
                "e_step/seconds_features": seconds[0],
                "e_step/seconds_kmeans": seconds[1],
            }

    def _room(self, device: torch.device) -> Tensor:
        """Allocates the features (n_local, D): on the device, or in a temporary unnamed file.

        The system deletes such a file with the last reference, even if the process is killed.
        """
        count, dim = len(self._samples), self.prototypes.means[0].shape[1]
        if self.settings.features_dir is None:
            return torch.zeros(count, dim, device=device)
        from solo_ext.core.files import writing

        folder, rows = Path(self.settings.features_dir), max(1, count)
        folder.mkdir(parents=True, exist_ok=True)
        with writing(folder), tempfile.TemporaryFile(dir=folder) as file:
            if hasattr(os, "posix_fallocate"):
                # On a full disk this raises; writing to mapped memory would kill the process.
                os.posix_fallocate(file.fileno(), 0, 4 * dim * rows)
            return torch.from_numpy(np.memmap(file, np.float32, "r+", shape=(rows, dim)))[:count]

    def _features(self, method: Any) -> Tensor:
        """(n_local, D) unit features of this rank's samples."""
        rank_barrier(method.device)
        # DDP synchronises buffers in its own forward pass only, which this pass does not use.
        distributed.broadcast_buffers(*method.embedder)
        samples = self._samples
        if self.bank is None:
            features = self._room(method.device)
            rows = torch.arange(len(samples), device=features.device)
            self._embed(method, samples, rows, features)
            return features
        # This rank's share of the bank holds exactly these samples.
        features, missing = self.bank.value.float(), (~self.bank.filled).nonzero().squeeze(1)
        if distributed.total(len(missing), method.device):
            # The bank lacks samples that no step has seen: all before the first epoch, later those
            # of a dropped last batch.
            features = features.clone()
            self._embed(method, [samples[i] for i in missing.tolist()], missing, features)
        return features

    @torch.no_grad()
    def _embed(self, method: Any, samples: Sequence[int], rows: Tensor, features: Tensor) -> None:
        """Embeds samples (N,) into rows (N,) of the features; barriers keep the ranks in step."""
        from solo_ext.data.loaders import eval_batches, eval_mode

        size, device = _BATCHES_AT_ONCE * self._config.optimizer.batch_size, method.device
        batches = eval_batches(self._config, self._dataset, samples, size, device)
        rank_barrier(device)
        # All ranks have at least this many batches.
        shared = -int(distributed.max_over_ranks(torch.tensor(len(rows) // -size, device=device)))
        precision = method.trainer.precision_plugin
        with eval_mode(*method.embedder), precision.forward_context():
            for number, images in enumerate(batches):
                images = precision.convert_input(images.to(device, non_blocking=True))
                embedded = method.embed(images)
                part = rows[number * size : (number + 1) * size]
                features[part] = F.normalize(full_precision(embedded)[0], dim=1).to(features.device)
                if 0 < number < shared and number % _BARRIER_EVERY == 0:
                    # Without barriers, fast ranks would wait in one collective until it times out.
                    rank_barrier(device)


def _resolved(name: str, device: torch.device | str, key: str) -> str:
    """The k-means backend that ``name`` stands for on a device."""
    from solo_ext.clustering import resolve_backend

    sharded = distributed.world_size() > 1
    return resolve_backend(name, device, sharded=sharded, key=f"{key}.kmeans.backend")


def _metrics(found: list[Granularity], names: list[str], labels: Tensor | None) -> dict[str, float]:
    metrics: dict[str, float] = {}
    for name, g in zip(names, found, strict=True):
        metrics |= {
            f"e_step/objective_{name}": g.objective,
            f"e_step/concentration_min_{name}": float(g.concentration.min()),
            f"e_step/concentration_mean_{name}": float(g.concentration.mean()),
            f"e_step/concentration_max_{name}": float(g.concentration.max()),
            f"e_step/empty_{name}": float((g.sizes == 0).sum()),
            f"e_step/singletons_{name}": float((g.sizes == 1).sum()),
        }
        if labels is not None:
            metrics[f"e_step/nmi_{name}"] = _mutual_information(g.assignments, labels)
    return metrics


def _mutual_information(assignments: Tensor, labels: Tensor) -> float:
    """Normalised mutual information of labels (n,) and clusters (n_local,), computed on rank 0."""
    from sklearn.metrics import normalized_mutual_info_score

    # Compare a subset of a large set: the comparison takes 50 bytes per image.
    every, ranks = -(-len(labels) // LARGE), distributed.world_size()
    rank_barrier(assignments.device)
    found = torch.zeros((), dtype=torch.float64, device=assignments.device)
    clusters = distributed.join_shares(assignments[::every]).cpu()
    if not distributed.rank():
        place = torch.arange(len(clusters))
        own = labels[place // ranks * (every * ranks) + place % ranks]
        found.fill_(normalized_mutual_info_score(own, clusters))
    rank_barrier(assignments.device)
    return float(distributed.sum_over_ranks(found))
