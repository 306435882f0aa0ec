"""The E-step of a method in training: features of the whole training set to prototypes."""

from __future__ import annotations

import contextlib
import logging
import platform
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn

from solo_ext.clustering.agreement import normalized_mutual_information
from solo_ext.clustering.e_step import Granularity, e_step
from solo_ext.clustering.feature_file import FeatureFile, Features
from solo_ext.core import distributed
from solo_ext.core.distributed import propagate_rank_errors, rank_barrier
from solo_ext.core.draws import mix
from solo_ext.core.errors import UserError
from solo_ext.data.fixed_pass import indexed_eval_loader, labels_of, training_set
from solo_ext.memory.features import FeatureBank
from solo_ext.memory.prototypes import ClusterPrototypes
from solo_ext.memory.state import eval_mode
from solo_ext.methods.e_step_kwargs import check_room, kept_backend

logger = logging.getLogger(__name__)
_BATCHES_AT_ONCE = 4
# Batches between meetings of the ranks while they embed. A meeting waits for the device.
_MEET_EVERY = 16


class Clustered(Protocol):
    """A method in training whose embeddings can be clustered."""

    cfg: DictConfig
    prototypes: ClusterPrototypes
    bank: FeatureBank | None

    @property
    def embedder(self) -> list[nn.Module]:
        """The networks behind :meth:`embed`."""
        ...

    def embed(self, X: Tensor) -> Tensor:
        """Embeddings (N, D) of images, of any scale."""
        ...

    @property
    def trainer(self) -> Any: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def current_epoch(self) -> int: ...


def start_prototypes(method: Clustered, settings: Any, key: str) -> None:
    """Sizes the state by the training set and settles on a k-means backend.

    Args:
        method: that starts to train.
        settings: :class:`solo_ext.methods.e_step_kwargs.EStepKwargs`.
        key: of the settings in the config.

    Raises:
        ConfigError: too few samples, a backend that is not there, or no room for the embeddings.
        UserError: a checkpoint of another training set.
    """
    size = len(training_set(method.trainer, method.cfg))
    state, bank = method.prototypes, method.bank
    # Also where solo-learn's own script started the run, without our checks before it.
    cast(Any, method).check_size(method.cfg, size)
    for held in (state.assignments.T, () if bank is None else bank.value):
        if len(held) not in (0, size):
            raise UserError(
                f"the checkpoint is of a training set of {len(held)} images, this one has {size}; "
                "resume with the data of the checkpoint"
            )
    if bank is not None and not len(bank.value):
        bank.resize_(size)
    state.backend = kept_backend(settings, key, state.backend, method.device)
    if settings.e_step_features == "disk":
        # Of all nodes in the run directory, which they share.
        nodes = method.trainer.num_nodes if settings.e_step_dir else 1
        here = -(-size // nodes)
        check_room(settings, key, _folder(method, settings), 4 * here * _width(method))


def e_step_is_due(method: Clustered, settings: Any) -> bool:
    """Whether the epoch that begins is to begin with an E-step."""
    since = method.current_epoch - settings.warmup_epochs
    fresh = method.prototypes.epoch < 0
    return bool(since >= 0 and (fresh or since % settings.e_step_every == 0))


def refresh_prototypes(method: Clustered, settings: Any, temperature: float) -> dict[str, float]:
    """Runs the E-step and puts its result into ``method.prototypes``.

    Args:
        method: in training.
        settings: :class:`solo_ext.methods.e_step_kwargs.EStepKwargs`.
        temperature: mean of the concentrations.

    Every rank embeds, or takes from the bank, every world-size-th sample; k-means shares them out
    likewise. An error on one rank ends all of them.

    Returns:
        What to log: per granularity objective, concentration, empty and singleton clusters, and
        normalised mutual information with the labels where there are labels; seconds.

    Raises:
        UserError: there is no room for the embeddings on the disk.
        RankError: another rank failed.
    """
    with propagate_rank_errors(method.device):
        return _refreshed(method, settings, temperature)


def _refreshed(method: Clustered, settings: Any, temperature: float) -> dict[str, float]:
    begin = time.monotonic()
    state = method.prototypes
    dataset = training_set(method.trainer, method.cfg)
    ids = torch.arange(distributed.rank(), len(dataset), distributed.world_size())
    seed = method.cfg.get("seed") or 0
    warm = state.epoch >= 0
    with _features(method, settings, dataset, ids) as features:
        embedded = time.monotonic()
        found = e_step(
            features,
            ids.to(method.device),
            len(dataset),
            state.num_prototypes,
            temperature=temperature,
            alpha=settings.alpha,
            init=state.means if warm else None,
            iterations=settings.kmeans.warm_iterations if warm else settings.kmeans.iterations,
            restarts=1 if warm else settings.kmeans.restarts,
            seed=seed,
            backend=state.backend,
            sample=settings.e_step_sample,
            sample_seed=mix(seed, method.current_epoch),
        )
    state.update_(
        [g.means for g in found],
        [g.prototypes for g in found],
        [g.concentration for g in found],
        torch.stack([g.assignments for g in found]),
    )
    state.epoch = method.current_epoch
    done = time.monotonic()
    seconds = {
        "e_step/seconds_features": embedded - begin,
        "e_step/seconds_kmeans": done - embedded,
    }
    metrics = _metrics(found, state.names, labels_of(dataset)) | seconds
    _report(method, metrics, min(settings.e_step_sample or len(dataset), len(dataset)))
    return metrics


@contextlib.contextmanager
def _features(method: Clustered, settings: Any, dataset: Any, ids: Tensor) -> Iterator[Features]:
    """(n_local, D) unit features of the samples ``ids``."""
    rank_barrier(method.device)
    # DDP brings buffers into line at its next forward pass only, which this one is not.
    distributed.broadcast_buffers(*method.embedder)
    if settings.e_step_features == "disk":
        with _file(method, settings, len(ids)) as file:
            _embed(method, dataset, ids, file)
            yield file
    elif method.bank is None:
        features = torch.zeros(len(ids), _width(method), device=method.device)
        _embed(method, dataset, ids, features)
        yield features
    else:
        yield _banked(method, method.bank, dataset, ids)


def _banked(method: Clustered, bank: FeatureBank, dataset: Any, ids: Tensor) -> Tensor:
    if bank.filled.all():
        return bank.value.float() if distributed.world_size() == 1 else _taken(bank, ids)
    features = _taken(bank, ids)
    # Samples that training has not met: all before its first epoch, the remainder of a batch later.
    missing = (~bank.filled[ids.to(method.device)]).nonzero().squeeze(1)
    embedded = features.new_zeros(len(missing), features.shape[1])
    _embed(method, dataset, ids[missing.cpu()], embedded)
    features[missing] = embedded
    return features


def _taken(bank: FeatureBank, ids: Tensor) -> Tensor:
    return bank.value[ids.to(bank.value.device)].float()


@contextlib.contextmanager
def _file(method: Clustered, settings: Any, count: int) -> Iterator[FeatureFile]:
    folder = _folder(method, settings)
    try:
        file = FeatureFile(folder, count, _width(method), method.device)
    except OSError as error:
        raise UserError(
            f"embeddings for the E-step in {str(folder)!r} on {platform.node()}: "
            f"{error.strerror or error}; make room there, or name another folder as e_step_dir"
        ) from error
    with contextlib.closing(file):
        yield file


def _folder(method: Clustered, settings: Any) -> Path:
    return Path(settings.e_step_dir or method.trainer.default_root_dir).expanduser()


def _width(method: Clustered) -> int:
    return int(method.cfg.method_kwargs.proj_output_dim)


@torch.no_grad()
def _embed(method: Clustered, dataset: Any, ids: Tensor, features: Features) -> None:
    """Fills ``features`` with those of the samples ``ids``, on all ranks at about one pace."""
    cfg: Any = OmegaConf.to_container(method.cfg, resolve=True)
    batch_size = _BATCHES_AT_ONCE * cfg["optimizer"]["batch_size"]
    loader = indexed_eval_loader(cfg, dataset, ids.tolist(), batch_size) if len(ids) else ()
    place = torch.full((len(dataset),), -1)
    place[ids] = torch.arange(len(ids))
    rank_barrier(method.device)
    most = torch.tensor(-(-len(ids) // batch_size), device=method.device)
    meetings = int(distributed.max_over_ranks(most)) // _MEET_EVERY
    with (
        eval_mode(*method.embedder),
        method.trainer.precision_plugin.forward_context(),
    ):
        for number, (indices, images) in enumerate(loader, 1):
            embedded = method.embed(images.to(method.device))
            features[place[indices].to(features.device)] = F.normalize(embedded.float(), dim=1)
            if number % _MEET_EVERY == 0:
                # Else a rank that is slower would keep the others in one collective for long.
                rank_barrier(method.device)
                meetings -= 1
    for _ in range(meetings):
        rank_barrier(method.device)


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
            metrics[f"e_step/nmi_{name}"] = normalized_mutual_information(g.assignments, labels)
    return metrics


def _report(method: Clustered, metrics: dict[str, float], seen: int) -> None:
    if distributed.rank():
        return
    sizes = "+".join(str(k) for k in method.prototypes.num_prototypes)
    objectives = ", ".join(
        f"{value:.4f}" for key, value in metrics.items() if key.startswith("e_step/objective_")
    )
    logger.info(
        f"E-step before epoch {method.current_epoch + 1}: {sizes} prototypes by "
        f"{method.prototypes.backend} k-means of {seen:,} images, objective {objectives}; features "
        f"{metrics['e_step/seconds_features']:.1f} s, k-means "
        f"{metrics['e_step/seconds_kmeans']:.1f} s"
    )
