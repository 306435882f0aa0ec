"""The E-step of a method in training: clusters the training set's embeddings into prototypes.

A method owns an :class:`EStep`: it decides when an E-step is due, embeds all images, runs k-means
(:func:`solo_ext.clustering.e_step`) and says what to log. :class:`EStepKwargs` are its settings.
"""

from __future__ import annotations

import contextlib
import platform
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
import torch.nn.functional as F
from annotated_types import MinLen
from omegaconf import DictConfig
from torch import Tensor

from solo_ext.core import distributed
from solo_ext.core.distributed import propagate_rank_errors, rank_barrier
from solo_ext.core.draws import mix
from solo_ext.core.errors import ConfigError, UserError
from solo_ext.core.types import NonNegativeInt, PositiveFloat, PositiveInt, Section
from solo_ext.memory.clusters import ClusterPrototypes
from solo_ext.memory.features import FeatureBank
from solo_ext.memory.state import eval_mode
from solo_ext.methods.registry import logger

if TYPE_CHECKING:
    from solo_ext.clustering import Features, Granularity

PUBLISHED_CLUSTERS = 25000, 50000, 100000
"""Numbers of clusters in PCL's ImageNet runs."""
_BATCHES_AT_ONCE = 4
# Batches between two barriers of the pass; each barrier waits for the device.
_BARRIER_EVERY = 16


class KMeansKwargs(Section):
    """How the prototypes are found.

    Attributes:
        backend: ``auto`` takes the fastest that is installed; a resumed run keeps its backend.
        iterations: Lloyd iterations of the first E-step.
        warm_iterations: Lloyd iterations of later ones, which start from the previous means.
        restarts: cold starts of the first E-step; the best is kept.
    """

    backend: Literal["auto", "torch", "faiss", "flash"] = "auto"
    iterations: PositiveInt = 20
    warm_iterations: PositiveInt = 5
    restarts: PositiveInt = 1


class EStepKwargs(Section):
    """When the embeddings of the training set are clustered, and into what.

    Attributes:
        num_prototypes: K of each granularity; null: in the paper's proportion to the images.
        warmup_epochs: epochs without prototypes.
        alpha: smooths the concentrations of small clusters.
        e_step: ``exact`` embeds the training set anew, ``bank`` reuses the embeddings of training.
        e_step_every: epochs between E-steps.
        e_step_sample: number of images that k-means runs on, drawn anew in every epoch; all images
            are then assigned to the prototypes it finds. Null takes all.
        e_step_features: where ``exact`` keeps the embeddings during the E-step: ``memory`` (of the
            device), or ``disk``: a file, of which one part at a time is read into memory.
        e_step_dir: folder of that file; null is the run directory.
        kmeans: as :class:`KMeansKwargs`.
    """

    num_prototypes: Annotated[list[PositiveInt], MinLen(1)] | None = None
    warmup_epochs: NonNegativeInt = 20
    alpha: PositiveFloat = 10.0
    e_step: Literal["exact", "bank"] = "exact"
    e_step_every: PositiveInt = 1
    e_step_sample: PositiveInt | None = None
    e_step_features: Literal["memory", "disk"] = "memory"
    e_step_dir: str | None = None
    kmeans: KMeansKwargs = KMeansKwargs()


def check_e_step(settings: Any, key: str) -> None:
    """Refuses settings of the E-step that do not fit each other or this machine.

    Args:
        settings: :class:`EStepKwargs`, or the section of the config.
        key: where they stand in the config, for messages.

    Raises:
        ConfigError: naming the first such setting.
    """
    finest = max(settings.num_prototypes)
    if settings.e_step_sample is not None and settings.e_step_sample < finest:
        raise ConfigError(
            f"{key}.e_step_sample",
            settings.e_step_sample,
            f"k-means cannot find {finest} prototypes among fewer images",
            f"allowed: null, which takes all, or numbers from {finest} on",
        )
    if settings.e_step_features == "disk" and settings.e_step == "bank":
        raise ConfigError(
            f"{key}.e_step_features",
            "disk",
            f"with {key}.e_step=bank the embeddings are in memory, and in every checkpoint",
            "take memory, or e_step=exact",
        )
    if settings.kmeans.backend != "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
        _resolved(settings.kmeans.backend, device, settings, key)


def check_prototypes(settings: Any, key: str, num_samples: int) -> None:
    """Refuses more prototypes than samples, with both numbers in the ConfigError."""
    if max(settings.num_prototypes) > num_samples:
        raise ConfigError(
            f"{key}.num_prototypes",
            list(settings.num_prototypes),
            f"the training set has {num_samples} images",
            f"allowed: numbers up to {num_samples}",
        )


def warn_of_late_start(cfg: DictConfig, settings: Any, key: str) -> None:
    """Warns if the run ends before the first E-step."""
    if settings.warmup_epochs >= cfg.max_epochs:
        logger.warning(
            f"{key}.warmup_epochs={settings.warmup_epochs} of max_epochs={cfg.max_epochs}: "
            "the prototypes will never be used"
        )


class EStep:
    """Clusters a method's embeddings of the training set before an epoch (PCL, Algorithm 1).

    The method has ``embed``, from images to embeddings (N, D) of any scale, and ``embedder``, the
    networks that this uses.

    Args:
        settings: when to cluster, and how.
        key: where they stand in the config, for messages.
        prototypes: where the result goes; a module of the method, so that checkpoints hold it.
        bank: the embeddings of training, with ``e_step: bank``; a module of the method, too.
        temperature: mean of the concentrations.
    """

    def __init__(
        self,
        settings: EStepKwargs,
        key: str,
        prototypes: ClusterPrototypes,
        bank: FeatureBank | None,
        temperature: float = 1.0,
    ) -> None:
        self.settings, self.key, self.temperature = settings, key, temperature
        self.prototypes, self.bank = prototypes, bank

    def start(self, method: Any) -> None:
        """Sizes the state by the training set and decides on a k-means backend.

        Raises:
            ConfigError: too few samples, a backend that is not there, or no room for the
                embeddings.
            UserError: a checkpoint of another training set.
        """
        from solo_ext.config.check import common_config
        from solo_ext.data.indexed import labels_of, training_set

        self._config = common_config(method.cfg)
        self._dataset = dataset = training_set(method.trainer, self._config)
        self._size, self._labels = len(dataset), labels_of(dataset)
        # solo-learn's own script skips our checks of the data before the run.
        check_prototypes(self.settings, self.key, self._size)
        for held in (self.prototypes.assignments.T, () if self.bank is None else self.bank.value):
            if len(held) not in (0, self._size):
                raise UserError(
                    f"the checkpoint is of a training set of {len(held)} images, this one has "
                    f"{self._size}; resume with the data of the checkpoint"
                )
        if self.bank is not None and not len(self.bank.value):
            self.bank.resize_(self._size)
        self.prototypes.backend = self.kept_backend(method.device)
        if self.settings.e_step_features == "disk":
            # A folder without room is refused now, and not epochs later.
            with propagate_rank_errors(method.device), self._table(method, len(self._ids())):
                pass

    def kept_backend(self, device: torch.device) -> str:
        """The k-means backend that the config names, else the one that the run started with.

        Raises:
            ConfigError: the config names one that is not installed.
        """
        named, kept = self.settings.kmeans.backend, self.prototypes.backend
        if named == "auto" and kept:
            try:
                return _resolved(kept, device, self.settings, self.key)
            except ConfigError as error:
                logger.warning(
                    f"k-means backend of this run, {kept!r}: {error.problem}; taking auto"
                )
        return _resolved(named, device, self.settings, self.key)

    def is_due(self, epoch: int) -> bool:
        """Whether ``epoch`` begins with an E-step."""
        since = epoch - self.settings.warmup_epochs
        fresh = self.prototypes.epoch < 0
        return bool(since >= 0 and (fresh or since % self.settings.e_step_every == 0))

    def run(self, method: Any) -> dict[str, float]:
        """Embeds, clusters, and puts the result into the prototypes.

        Every rank embeds (or takes from the bank) every world-size-th sample, and k-means works on
        the same shares. An error on one rank ends all of them.

        Returns:
            What to log: per granularity objective, concentration, empty and singleton clusters,
            and normalised mutual information with the labels where there are labels; seconds.

        Raises:
            ConfigError: the disk has no room for the embeddings.
            RankError: another rank failed.
        """
        from solo_ext.clustering import e_step

        state, settings, kmeans = self.prototypes, self.settings, self.settings.kmeans
        begin, epoch, warm = time.monotonic(), method.current_epoch, state.epoch >= 0
        seed, ids = method.cfg.get("seed") or 0, self._ids()
        sample = {}
        if settings.e_step_sample is not None:
            sample = {"sample": settings.e_step_sample, "sample_seed": mix(seed, epoch)}
        with propagate_rank_errors(method.device):
            # V' = f'(X): momentum features of all training data.
            with self._features(method, ids) as features:
                embedded = time.monotonic()
                # C^m = k-means(V', k_m), phi^m = concentration(C^m, V'), m = 1 .. M.
                found = e_step(
                    features,
                    ids.to(method.device),
                    self._size,
                    state.num_prototypes,
                    temperature=self.temperature,
                    alpha=settings.alpha,
                    init=state.means if warm else None,
                    iterations=kmeans.warm_iterations if warm else kmeans.iterations,
                    restarts=1 if warm else kmeans.restarts,
                    seed=seed,
                    backend=state.backend,
                    **sample,
                )
            state.update_(
                [g.means for g in found],
                [g.prototypes for g in found],
                [g.concentration for g in found],
                torch.stack([g.assignments for g in found]),
            )
            state.epoch = epoch
            seconds = embedded - begin, time.monotonic() - embedded
            if not distributed.rank():
                sizes = "+".join(str(k) for k in state.num_prototypes)
                seen = min(settings.e_step_sample or self._size, self._size)
                logger.info(
                    f"E-step before epoch {epoch + 1}: {sizes} prototypes by {state.backend} "
                    f"k-means of {seen:,} images, objective "
                    f"{', '.join(f'{g.objective:.4f}' for g in found)}; "
                    f"features {seconds[0]:.1f} s, k-means {seconds[1]:.1f} s"
                )
            return _metrics(found, state.names, self._labels) | {
                "e_step/seconds_features": seconds[0],
                "e_step/seconds_kmeans": seconds[1],
            }

    def _ids(self) -> Tensor:
        """Indices of the samples that this rank embeds."""
        return torch.arange(distributed.rank(), self._size, distributed.world_size())

    @contextlib.contextmanager
    def _features(self, method: Any, ids: Tensor) -> Iterator[Features]:
        """(n_local, D) unit features of the samples ``ids``."""
        rank_barrier(method.device)
        # DDP synchronises buffers in its own forward pass only, which this pass does not use.
        distributed.broadcast_buffers(*method.embedder)
        if self.bank is not None:
            yield self._banked(method, self.bank, ids)
            return
        with self._table(method, len(ids)) as features:
            self._embed(method, ids, features)
            yield features

    def _banked(self, method: Any, bank: FeatureBank, ids: Tensor) -> Tensor:
        own = ids.to(bank.value.device)
        features = bank.value[own].float()
        if bank.filled.all():
            return features
        # The bank lacks samples that training has not seen: all of them before its first epoch,
        # later those of a dropped last batch.
        missing = (~bank.filled[own]).nonzero().squeeze(1)
        embedded = torch.zeros_like(features[missing])
        self._embed(method, ids[missing.cpu()], embedded)
        features[missing] = embedded
        return features

    @contextlib.contextmanager
    def _table(self, method: Any, count: int) -> Iterator[Features]:
        """Zeros (count, D) for the embeddings, in memory or in a file."""
        dim = self.prototypes.means[0].shape[1]
        if self.settings.e_step_features == "memory":
            yield torch.zeros(count, dim, device=method.device)
            return
        from solo_ext.clustering import FeatureFile

        given = self.settings.e_step_dir
        folder = Path(given or method.trainer.default_root_dir).expanduser()
        try:
            file = FeatureFile(folder, count, dim, method.device)
        except OSError as error:
            raise ConfigError(
                f"{self.key}.e_step_dir",
                given,
                f"{4 * count * dim / 1e9:.1f} GB in {str(folder)!r} on {platform.node()}: "
                f"{error.strerror or error}",
                "make room there, or name a folder on a disk of this machine",
            ) from error
        with contextlib.closing(file):
            yield file

    @torch.no_grad()
    def _embed(self, method: Any, ids: Tensor, features: Features) -> None:
        """Embeds the samples ``ids`` into ``features``; barriers keep ranks at about one pace."""
        from solo_ext.data.indexed import indexed_eval_loader

        size = _BATCHES_AT_ONCE * self._config.optimizer.batch_size
        loader: Any = ()
        if len(ids):
            loader = indexed_eval_loader(self._config, self._dataset, ids.tolist(), size)
        place = torch.full((self._size,), -1)
        place[ids] = torch.arange(len(ids))
        rank_barrier(method.device)
        most = torch.tensor(-(-len(ids) // size), device=method.device)
        barriers = int(distributed.max_over_ranks(most)) // _BARRIER_EVERY
        with eval_mode(*method.embedder), method.trainer.precision_plugin.forward_context():
            for number, (indices, images) in enumerate(loader, 1):
                embedded = method.embed(images.to(method.device))
                features[place[indices].to(features.device)] = F.normalize(embedded.float(), dim=1)
                if number % _BARRIER_EVERY == 0:
                    # Without barriers, fast ranks would wait in one collective until it times out.
                    rank_barrier(method.device)
                    barriers -= 1
        for _ in range(barriers):
            rank_barrier(method.device)


def _resolved(name: str, device: torch.device | str, settings: Any, key: str) -> str:
    """The k-means backend that ``name`` stands for on a device; errors name the config's key."""
    from solo_ext.clustering import resolve_backend

    in_file = settings.e_step_features == "disk" and settings.e_step_sample is None
    shared = distributed.world_size() > 1
    try:
        return resolve_backend(name, device, sharded=shared, in_file=in_file)
    except ConfigError as error:
        named = f"{key}.kmeans.backend"
        raise ConfigError(named, error.value, error.problem, error.remedy) from None


def _metrics(found: list[Granularity], names: list[str], labels: Tensor | None) -> dict[str, float]:
    metrics: dict[str, float] = {}
    for name, g in zip(names, found, strict=True):
        metrics |= {
            f"e_step/objective_{name}": g.objective,
            f"e_step/concentration_min_{name}": float(g.concentration.min()),
            f"e_step/concentration_mean_{name}": float(g.concentration.mean()),
            f"e_step/concentration_max_{name}": float(g.concentration.max()),
            f"e_step/empty_{name}": g.empty,
            f"e_step/singletons_{name}": g.singletons,
        }
        if labels is not None:
            metrics[f"e_step/nmi_{name}"] = _mutual_information(g.assignments.cpu(), labels)
    return metrics


def _mutual_information(a: Tensor, b: Tensor) -> float:
    """``2 (H(A) + H(B) - H(A, B)) / (H(A) + H(B))`` of two groupings (n,); 1 for one group each."""
    apart, joint = _entropy(a) + _entropy(b), _entropy(a * (b.max() + 1) + b)
    return 2 * (1 - joint / apart) if apart else 1.0


def _entropy(groups: Tensor) -> float:
    share = torch.unique(groups, return_counts=True)[1].double() / len(groups)
    return float(torch.special.entr(share).sum())
