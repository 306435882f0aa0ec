"""PCL's clusters: their prototypes, the network that finds an image's cluster, and a protocol.

PCL's E-step clusters the momentum embeddings ``v' = f'(x)`` of the training images, unit rows, at
several granularities (Li et al., ICLR 2021, arXiv 2005.04966, Algorithm 1). A checkpoint holds the
means, the prototypes and the concentrations of the last E-step.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from solo_ext.config.schema import Seed
from solo_ext.core.errors import ConfigError, UserError
from solo_ext.core.precision import full_precision_products
from solo_ext.core.types import PositiveInt
from solo_ext.lab.evaluation.context import EvalContext
from solo_ext.lab.evaluation.features import ALONE, extract_features
from solo_ext.lab.evaluation.models import Model
from solo_ext.lab.evaluation.protocol import Protocol, Row
from solo_ext.memory.clusters import ClusterPrototypes
from solo_ext.pretrained.files import state_digest
from solo_ext.pretrained.loaded import load_head
from solo_ext.pretrained.runs import load_pretrained

_PREFIX = "prototypes."
_CLUSTERING = ("pcl", "metric")
_BLOCK = 2**24
"""Most similarities that are held at a time."""


class Nearest(NamedTuple):
    """The nearest clusters of N embeddings at each of M granularities.

    Attributes:
        clusters: (M, N) number of the nearest cluster, int64.
        distances: (M, N) Euclidean distance to its mean, in [0, 2].
        second: (M, N) Euclidean distance to the mean of the second nearest; infinite if there is
            only one cluster.

    >>> network = ClusterNetwork(nn.Flatten(), [torch.eye(2)], [torch.ones(2)], ["2"])
    >>> network.nearest(torch.tensor([[0.0, 1.0]])).clusters
    tensor([[1]])
    """

    clusters: Tensor
    distances: Tensor
    second: Tensor


class ClusterNetwork(nn.Module):
    """The clusters of a run's last E-step, and the network that embeds images among them.

    The cluster of an image x is ``s = argmin_j |v - c_j|``, where ``v = f'(x) / |f'(x)|`` and
    ``c_j`` are the means of k-means, which are not normalised. These are the distances that the
    E-step minimises and that a concentration averages (Eq. 12 of Li et al., arXiv 2005.04966).

    Attributes:
        names: number of clusters of each granularity as text, see
            :attr:`~solo_ext.memory.clusters.ClusterPrototypes.names`.

    Args:
        network: images (N, 3, H, W) to embeddings (N, D) of any norm.
        means: (K, D) means of each granularity.
        concentration: (K,) concentrations of each granularity.
        names: as the attribute.

    >>> means, phi = torch.tensor([[0.5, 0.0], [0.0, 0.5]]), torch.tensor([0.1, 0.3])
    >>> network = ClusterNetwork(nn.Flatten(), [means], [phi], ["2"])
    >>> found = network.nearest(network(torch.tensor([[[4.0]], [[0.0]]]).expand(2, 1, 2)))
    >>> network.prototypes[0].tolist(), tuple(found.clusters.shape)
    ([[1.0, 0.0], [0.0, 1.0]], (1, 2))
    """

    def __init__(
        self,
        network: nn.Module,
        means: Sequence[Tensor],
        concentration: Sequence[Tensor],
        names: Sequence[str],
    ) -> None:
        super().__init__()
        self.network, self.names = network, list(names)
        for m, (table, phi) in enumerate(zip(means, concentration, strict=True)):
            self.register_buffer(f"means_{m}", table.detach().float())
            self.register_buffer(f"concentration_{m}", phi.detach().float())

    @property
    def means(self) -> list[Tensor]:
        """Means of the clusters, (K, D) each."""
        return [self.get_buffer(f"means_{m}") for m in range(len(self.names))]

    @property
    def prototypes(self) -> list[Tensor]:
        """The normalised means, (K, D) each."""
        return [F.normalize(table, dim=1) for table in self.means]

    @property
    def concentration(self) -> list[Tensor]:
        """Concentration of each cluster, (K,) each; loose clusters have large values."""
        return [self.get_buffer(f"concentration_{m}") for m in range(len(self.names))]

    def forward(self, images: Tensor) -> Tensor:
        """Embeddings (N, D) of images, unit rows in fp32."""
        return F.normalize(self.network(images).float(), dim=1)

    @torch.no_grad()
    def nearest(self, embeddings: Tensor) -> Nearest:
        """The nearest clusters of embeddings (N, D) at every granularity."""
        found = [_two_nearest(embeddings, table) for table in self.means]
        clusters = torch.stack([place for place, _ in found])
        distances = torch.stack([distance for _, distance in found])
        return Nearest(clusters, distances[..., 0], distances[..., 1])


def _two_nearest(rows: Tensor, means: Tensor) -> tuple[Tensor, Tensor]:
    """The nearest mean (N,), and the distances (N, 2) to it and to the second nearest."""
    count, half = min(2, len(means)), means.square().sum(1) / 2
    places, distances = [], []
    with full_precision_products(rows.device):
        for part in torch.split(rows, max(1, _BLOCK // len(means))):
            # |v - c|^2 is least where |c|^2 / 2 - v.c is.
            near = (half - part @ means.T).topk(count, dim=1, largest=False).indices
            # That difference loses the digits of small distances, so compute those of two anew.
            exact = torch.linalg.vector_norm(part.unsqueeze(1) - means[near], dim=2)
            exact, order = exact.sort(dim=1, stable=True)
            places.append(near.gather(1, order)[:, 0])
            distances.append(F.pad(exact, (0, 2 - count), value=torch.inf))
    return torch.cat(places), torch.cat(distances)


def load_clusters(path: Path) -> ClusterNetwork | None:
    """Loads the clusters of a run: of PCL, or of ``metric`` with clusters as classes.

    Args:
        path: a run directory or checkpoint, as
            :func:`~solo_ext.pretrained.runs.load_pretrained` takes it.

    Returns:
        On the CPU; ``None`` if the run's method does not cluster, or has had no E-step yet.

    Raises:
        UserError: the path is no run, or its checkpoint is damaged.

    >>> load_clusters(Path("nowhere"))
    Traceback (most recent call last):
    solo_ext.core.errors.NoSuchRun: 'nowhere': no such run directory or checkpoint
    """
    run = load_pretrained(path)
    # PCL's E-step embeds with the momentum networks, that of `metric` with the trained ones.
    momentum = "momentum_" if any(k.startswith("momentum_projector.") for k in run.weights) else ""
    held = _below(run.weights, _PREFIX)
    if "assignments" not in held or not _tables(held, "means") or _last_e_step(held) < 0:
        return None
    if momentum:
        run = load_pretrained(path, "momentum")
        held = _below(run.weights, _PREFIX)
    means, phi = _tables(held, "means"), _tables(held, "concentration")
    file = f"checkpoint {str(run.checkpoint)!r}"
    try:
        key = f"{momentum}projector."
        head = load_head(_below(run.weights, key), run.features_dim, "relu", key)
        names = ClusterPrototypes([len(table) for table in means], means[0].shape[1]).names
        network = ClusterNetwork(nn.Sequential(run.backbone, head), means, phi, names)
        width = next(m.out_features for m in reversed(head) if isinstance(m, nn.Linear))
        if any(table.shape != (len(p), width) for table, p in zip(means, phi, strict=True)):
            raise ValueError(f"its means are not those of embeddings of {width} dimensions")
    except (ValueError, IndexError, StopIteration) as error:
        raise UserError(f"the clusters of {file} cannot be read: {error}") from None
    return network.eval()


def _below(weights: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {k.removeprefix(prefix): v for k, v in weights.items() if k.startswith(prefix)}


def _tables(held: dict[str, Tensor], name: str) -> list[Tensor]:
    count = sum(key.startswith(f"{name}_") for key in held)
    return [held[f"{name}_{m}"] for m in range(count) if f"{name}_{m}" in held]


def _last_e_step(held: dict[str, Any]) -> int:
    """Epoch of the last E-step, -1 before the first."""
    numbers = held.get("_extra_state")
    return int(numbers[0]) if isinstance(numbers, Tensor) and len(numbers) else -1


def clusters_of(model: Model) -> ClusterNetwork | None:
    """The clusters of a model; ``None`` if it has none.

    A model in training is asked for its clusters, any other's checkpoint is read.

    Raises:
        UserError: the run has replaced its checkpoint since the model was loaded.

    >>> from solo_ext.lab.evaluation.models import EvalRun, open_model
    >>> settings = EvalRun(data={"train_path": "train", "val_path": "val"})
    >>> clusters_of(open_model("pixels", settings)) is None
    True
    """
    if model.method is not None:
        return _in_training(model.method)
    if model.epoch is None or model.cfg.method not in _CLUSTERING:
        # Models of timm and `pixels` are no runs.
        return None
    return load_clusters(Path(model.name))


def _may_cluster(model: Model) -> bool:
    """Whether a model in training will have clusters after its first E-step."""
    return isinstance(getattr(model.method, "prototypes", None), ClusterPrototypes)


def _in_training(method: Any) -> ClusterNetwork | None:
    state = getattr(method, "prototypes", None)
    if not isinstance(state, ClusterPrototypes) or state.epoch < 0:
        return None
    network = nn.Sequential(*method.embedder)
    if any(p.dtype != torch.float32 for p in network.parameters()):
        network = copy.deepcopy(network).float()
    return ClusterNetwork(network, state.means, state.concentration, state.names)


def simplified_silhouette(own: Tensor, second: Tensor) -> Tensor:
    """Simplified silhouette of each of n images: how much nearer its own cluster is than the next.

    ``(b - a) / max(a, b)``, where a is the distance to the image's own mean and b that to the
    second nearest. Unlike the silhouette of all pairs, it takes n K distances and not n^2.

    Args:
        own: (n,) distances a, >= 0.
        second: (n,) distances b, >= a.

    Returns:
        (n,) in [0, 1]: 0 between two clusters, 1 on the mean; 0 where both distances are 0.

    >>> simplified_silhouette(torch.tensor([0.0, 0.5, 1.0]), torch.ones(3))
    tensor([1.0000, 0.5000, 0.0000])

    Source:
        Hruschka, de Castro and Campello, ICDM 2004; after Rousseeuw, 1987.
    """
    larger = torch.maximum(own, second)
    return torch.where(larger > 0, (second - own) / larger, 0.0)


class Clusters(Protocol):
    """Settings of ``eval clusters``: the clusters of a run's last E-step; needs no labels.

    ``samples`` is the number of images that the agreement is computed on.

    >>> Clusters(split="test").samples
    10000
    """

    title: ClassVar[str] = "Clusters of the run"
    needs_labels: ClassVar[bool] = False

    split: Literal["train", "test"] = "train"
    samples: PositiveInt = 10000
    seed: Seed = 0

    def unfit(self, context: EvalContext) -> ConfigError | None:
        if _may_cluster(context.model) or clusters_of(context.model) is not None:
            return super().unfit(context)
        problem = "it has no clusters"
        makers = "only pcl, and metric with method_kwargs.classes=cluster, make some after warm-up"
        return ConfigError("RUN_DIR", context.model.name, problem, makers)

    def run(self, context: EvalContext) -> list[Row]:
        """One row per granularity, in the run's order.

        - ``clusters``: K; ``used``: how many of them have an image;
        - ``smallest``, ``median``, ``largest``: images in a used cluster;
        - ``distance``: mean Euclidean distance of an image to the mean of its cluster, in [0, 2];
        - ``concentration``: mean over the images of their cluster's concentration;
        - ``silhouette``: mean of :func:`simplified_silhouette`, in [0, 1]; ``None`` if K is 1;
        - ``agreement`` with the next granularity, the adjusted mutual information in percent (Vinh,
          Epps and Bailey, JMLR 2010); ``None`` in the last row.

        During training there are no rows before the first E-step.
        """
        from sklearn.metrics import adjusted_mutual_info_score

        network = clusters_of(context.model)
        if network is None:
            return []
        network.to(context.device)
        embedded = self._embedded(context, network).to(context.device)
        found = network.nearest(embedded)
        generator = torch.Generator().manual_seed(self.seed)
        drawn = torch.randperm(len(embedded), generator=generator)[: self.samples]
        rows: list[Row] = []
        for m, name in enumerate(network.names):
            clusters, own = found.clusters[m], found.distances[m]
            sizes = torch.bincount(clusters, minlength=len(network.means[m]))
            used = sizes[sizes > 0].float()
            several = len(sizes) > 1
            silhouette = simplified_silhouette(own, found.second[m]).mean() if several else None
            row: Row = {
                "granularity": name,
                "clusters": len(sizes),
                "used": len(used),
                "smallest": int(used.min()),
                "median": float(used.quantile(0.5)),
                "largest": int(used.max()),
                "distance": float(own.mean()),
                "concentration": float(network.concentration[m][clusters].mean()),
                "silhouette": None if silhouette is None else float(silhouette),
                "agreement": None,
            }
            rows.append(row)
        chosen = found.clusters.cpu()[:, drawn].numpy()
        for m, row in enumerate(rows[:-1]):
            agreement = adjusted_mutual_info_score(chosen[m], chosen[m + 1])
            row["agreement"] = 100.0 * float(agreement)
        return rows

    @classmethod
    def headline(cls, rows: list[Row]) -> dict[str, float]:
        """Silhouette of each granularity, and agreement of each with the next."""
        names = ("silhouette", "agreement")
        return {
            f"{name}_{row['granularity']}": float(row[name])
            for name in names
            for row in rows
            if row[name] is not None
        }

    def _embedded(self, context: EvalContext, network: ClusterNetwork) -> Tensor:
        """Embeddings (n, D) of the split; stored like features if its images can be identified."""
        images = getattr(context, self.split)
        fingerprint = context.fingerprints[self.split == "test"]
        what = f"embeddings of {self.split}"
        if fingerprint is None:
            loader, report = context.loader(images), context.report(what)
            return extract_features(network, loader, device=context.device, progress=report)[0]
        key = {"clusters": context.digest(state_digest(network.state_dict()), fingerprint)}
        return context.stored(network, images, key, what, ALONE)[0]
