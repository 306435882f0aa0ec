"""Every key of a config, for both generations of solo-learn: main's, and a few of our own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import (
    AfterValidator,
    BeforeValidator,
    ByteSize,
    ConfigDict,
    Field,
    SerializeAsAny,
    SerializerFunctionWrapHandler,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_serializer,
    model_validator,
)

from solo_ext.core.errors import ConfigError
from solo_ext.core.machine import cores
from solo_ext.core.types import (
    FolderName,
    LearningRate,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Probability,
    ProbabilityBelowOne,
    Section,
    refused,
)

Free = dict[str, Any]
Seed = Annotated[int, Ge(0), Le(2**32 - 1)]
Share = Annotated[float, Gt(0), Le(1)]
OfUnitPixels = Annotated[float, Ge(0), Le(1)]
"""A channel's mean: pixels are scaled to [0, 1] before they are normalised."""


def _above_zero(time: str) -> str:
    if not any(digit in time for digit in "123456789"):
        raise refused("more than no time")
    return time


def _some(time: dict[str, int]) -> dict[str, int]:
    if not any(time.values()):
        raise refused("more than no time")
    return time


Duration = (
    Annotated[str, Field(pattern=r"^\d+:\d\d:\d\d:\d\d$"), AfterValidator(_above_zero)]
    | Annotated[dict[str, NonNegativeInt], AfterValidator(_some)]
)
"""A time above 0, as DD:HH:MM:SS or as a mapping such as ``{hours: 3}``."""
OnlineProtocol = Literal[
    "knn",
    "linear",
    "lowshot",
    "clustering",
    "retrieval",
    "geometry",
    "linear_augmented",
    "finetune",
    "map",
    "neighbors",
    "views",
    "clusters",
    "transfer",
]
"""Names of the protocols in ``solo_ext.lab``, which this package must not import."""
Batches = NonNegativeInt | Probability | None


def _of_this_machine(workers: Any) -> Any:
    if workers != "auto":
        return workers
    return min(MOST_WORKERS, cores())


MOST_WORKERS = 8
Workers = Annotated[NonNegativeInt, BeforeValidator(_of_this_machine)]
"""``auto``: one process per core, at most :data:`MOST_WORKERS`."""
Folders = FolderName | Annotated[list[FolderName], MinLen(1)]
RunName = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[^\x00-\x1f]+$")]
Format = Literal["image_folder", "h5", "huggingface", "streaming", "webdataset", "dali"]


def _in_words(size: Any, parse: ValidatorFunctionWrapHandler) -> ByteSize:
    try:
        found: ByteSize = parse(size)
    except ValidationError:
        raise refused("a size such as 200gb") from None
    return found


Size = Annotated[ByteSize, WrapValidator(_in_words)]
"""Bytes; text may name a unit, of 1000 (``200gb``) or of 1024 (``200gib``)."""
Strategy = Literal[
    "auto", "ddp", "ddp_find_unused_parameters_false", "ddp_find_unused_parameters_true"
]
"""Strategies whose processes are new programs or started by a launcher; others cannot resume."""


class Backbone(Section):
    """``backbone``: solo-learn's own name or ``timm/<model>``, and its constructor's arguments.

    Attributes:
        weights: what a run starts from: a run directory, a checkpoint, an export, a file of MoCo
            v2, SwAV, DINO, DINOv2, timm or torchvision, ``timm/<model>`` or
            ``torchvision/<model>``; null: random weights.

    >>> Backbone(name="timm/vit_tiny_patch16_224", kwargs={"drop_path_rate": 0.1}).kwargs
    {'drop_path_rate': 0.1}
    >>> Backbone(name="resnet18").model_dump()
    {'name': 'resnet18', 'kwargs': {}}
    """

    name: str
    kwargs: Free = {}
    weights: FolderName | None = None

    @model_serializer(mode="wrap")
    def _without_null(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        # Digests of runs and features cover this section: those of earlier versions stay valid.
        return {k: v for k, v in dump(self).items() if k != "weights" or v is not None}


class HuggingFace(Section):
    """``data.huggingface``: what to read of a data set; null chooses from what the data set has.

    >>> HuggingFace(name="plain_text", image="img").image
    'img'
    """

    name: str | None = None
    revision: str | None = None
    train_split: str | None = None
    val_split: str | None = None
    image: str | None = None
    label: str | None = None
    cache_dir: str | None = None


class Streaming(Section):
    """``data.streaming``: how the shards of ``streaming`` and the tars of ``webdataset`` are read.

    Attributes:
        cache_dir: folder for copies of shards from S3 or GCS and for the index of tars; null: the
            cache folder.
        cache_limit: largest total size of the copies from one address, such as ``200gb``; null
            keeps all.
        shuffle_shards: number of shards that a batch is drawn from, an equal share from each.
        download_retry: number of retries of a failed request to S3.
        download_timeout: seconds that a request to S3 may take, and for which GCS is tried again.
        anonymous: whether storage is accessed without credentials, as public buckets allow.
        image: column of the images, or in tars their file extension; null detects it.
        label: column of the labels, or in tars a file extension or a key of ``json``; null detects
            it.

    >>> Streaming(cache_limit="200gb").cache_limit
    200000000000
    """

    cache_dir: FolderName | None = None
    cache_limit: Size | None = None
    shuffle_shards: PositiveInt = 32
    download_retry: NonNegativeInt = 3
    download_timeout: PositiveFloat = 60.0
    anonymous: bool = False
    image: str | None = None
    label: str | None = None


class Mix(Section):
    """``data.mix``: mixes each view with another image's, and keeps at least ``min_share`` of it.

    >>> Mix(name="cutmix")
    Mix(name='cutmix', min_share=0.9, prob=1.0)
    """

    name: Literal["mixup", "cutmix"]
    min_share: Annotated[float, Ge(0), Lt(1)] = 0.9
    prob: Probability = 1.0


class Images(Section):
    """``data``: accepts solo-learn's own runs too: any data set name, and paths are optional.

    ``num_classes`` and ``num_*_crops`` are filled in.

    Attributes:
        train_path: folder or file of the images; several folders of images without labels.
        num_workers: processes that load images; ``auto`` is one per core, at most 8.

    >>> Images(dataset="custom", train_path="images", num_workers=0).path("train")
    'images'
    """

    dataset: str
    train_path: Folders | None = None
    val_path: FolderName | None = None
    format: Format = "image_folder"
    huggingface: HuggingFace | None = None
    streaming: Streaming | None = None
    unreadable: Literal["refuse", "skip"] = "refuse"
    num_workers: Workers = "auto"  # type: ignore[assignment] # a number once it is validated
    start_method: Literal["fork", "spawn", "forkserver"] | None = None
    no_labels: bool = False
    fraction: Literal[-1] | Share = -1
    holdout: Annotated[float, Gt(0), Lt(1)] | None = None
    augmentation: Literal["image", "batch"] = "image"
    in_memory: bool | Literal["device"] = False
    mix: Mix | None = None
    num_classes: PositiveInt | None = None
    num_large_crops: NonNegativeInt | None = None
    num_small_crops: NonNegativeInt | None = None

    def path(self, split: str) -> str | list[str] | None:
        """``train_path`` or ``val_path``, for the split ``train`` or ``val``."""
        return self.train_path if split == "train" else self.val_path


class Data(Images):
    """``data``: the images of a pretraining run.

    ``num_classes`` and ``num_*_crops`` are filled in, not written by hand.

    >>> data = Data(dataset="cifar10", train_path="datasets/cifar10", fraction=0.1)
    >>> data.format, data.fraction, data.path("val")
    ('image_folder', 0.1, None)
    """

    dataset: Literal["cifar10", "cifar100", "stl10", "imagenet", "imagenet100", "custom"]
    train_path: Folders


class DALI(Section):
    """``dali``: read if ``data.format`` is ``dali``.

    The names are solo-learn main's, where ``encode_indexes_into_labels`` is false by default.

    >>> DALI(device="cpu")
    DALI(device='cpu', encode_indexes_into_labels=True)
    """

    device: Literal["cpu", "gpu"] = "gpu"
    encode_indexes_into_labels: bool = True


class RandomResizedCrop(Section):
    """``rrc``: area of the crop, as a share of the image.

    >>> RandomResizedCrop(crop_min_scale=0.2)
    RandomResizedCrop(enabled=True, crop_min_scale=0.2, crop_max_scale=1.0)
    """

    enabled: bool = True
    crop_min_scale: Share = 0.08
    crop_max_scale: Share = 1.0


class Chance(Section):
    """A transform that is applied with a probability.

    solo-learn's own configs also have ``enabled`` here, which nothing reads. It is dropped, unless
    it contradicts the probability: false with a probability above 0 is refused as an unknown key.

    >>> Chance(prob=0.2), Chance(prob=0.2, enabled=True)
    (Chance(prob=0.2), Chance(prob=0.2))
    """

    prob: Probability = 0.0

    @model_validator(mode="before")
    @classmethod
    def _without_enabled(cls, given: Any) -> Any:
        if not isinstance(given, dict) or not isinstance(given.get("enabled"), bool):
            return given
        wrong = not given["enabled"] and given.get("prob")
        return given if wrong else {k: v for k, v in given.items() if k != "enabled"}


class ColorJitter(Chance):
    """``color_jitter``: strengths, as for torchvision's ``ColorJitter``.

    >>> ColorJitter(prob=0.8, brightness=0.4, contrast=0.4, saturation=0.2, hue=0.1).strengths
    (0.4, 0.4, 0.2, 0.1)
    """

    brightness: NonNegativeFloat = 0.0
    contrast: NonNegativeFloat = 0.0
    saturation: NonNegativeFloat = 0.0
    hue: Annotated[float, Field(ge=0, le=0.5)] = 0.0

    @property
    def strengths(self) -> tuple[float, float, float, float]:
        """The strengths in the order of torchvision's arguments."""
        return self.brightness, self.contrast, self.saturation, self.hue


class RandAugment(Section):
    """``rand_augment``: operations per view, and their strength from 0 to 30.

    >>> RandAugment(magnitude=7)
    RandAugment(num_ops=2, magnitude=7)
    """

    num_ops: Annotated[int, Gt(0), Le(100)] = 2
    magnitude: Annotated[int, Ge(0), Le(30)] = 9


class AutoAugment(Section):
    """``auto_augment``: the data set that the policy was searched on.

    >>> AutoAugment(policy="cifar10")
    AutoAugment(policy='cifar10')
    """

    policy: Literal["imagenet", "cifar10", "svhn"]


class RandomErasing(Section):
    """``random_erasing``: a box of the view becomes the mean colour.

    Attributes:
        prob: probability that a box is erased.
        min_scale: smallest area of the box, as a share of the view.
        max_scale: largest area of the box, as a share of the view.
        max_ratio: largest ratio of the longer to the shorter side; 1 is a square.

    >>> RandomErasing(prob=0.25, max_ratio=1)
    RandomErasing(prob=0.25, min_scale=0.02, max_scale=0.33, max_ratio=1.0)
    """

    prob: Probability = 0.5
    min_scale: Share = 0.02
    max_scale: Share = 0.33
    max_ratio: Annotated[float, Ge(1), Le(100)] = 3.3


class View(Section):
    """The random transforms that make a training view of an image.

    >>> View(horizontal_flip={"prob": 0.5}).horizontal_flip
    Chance(prob=0.5)
    """

    rrc: RandomResizedCrop = RandomResizedCrop()
    rand_augment: RandAugment | None = None
    auto_augment: AutoAugment | None = None
    random_erasing: RandomErasing | None = None
    color_jitter: ColorJitter = ColorJitter()
    grayscale: Chance = Chance()
    gaussian_blur: Chance = Chance()
    solarization: Chance = Chance()
    equalization: Chance = Chance()
    horizontal_flip: Chance = Chance()


class Crop(Section):
    """The fixed view of an evaluation: its side in pixels and its normalisation.

    ``mean`` and ``std`` are of pixels scaled to [0, 1].

    >>> Crop(crop_size=32, mean=[0.5, 0.5, 0.5]).std is None
    True
    """

    crop_size: PositiveInt
    mean: Annotated[list[OfUnitPixels], Field(min_length=3, max_length=3)] | None = None
    std: Annotated[list[Share], Field(min_length=3, max_length=3)] | None = None


class Augmentation(View, Crop):
    """One entry of ``augmentations``: a pipeline, and how many crops it makes.

    >>> two = Augmentation(crop_size=32, num_crops=2, rrc={"crop_min_scale": 0.2})
    >>> two.num_crops, two.rrc.crop_max_scale
    (2, 1.0)
    """

    num_crops: Annotated[int, Gt(0), Le(100)]


class Batch(Section):
    """``optimizer``: the key that loaders read.

    >>> Batch(batch_size=256)
    Batch(batch_size=256)
    """

    batch_size: PositiveInt


class Optimizer(Batch):
    """``optimizer``: ``lr`` and ``classifier_lr`` are for batch 256, and scaled by batch / 256.

    >>> Optimizer(name="sgd", batch_size=512, lr=0.03, kwargs={"momentum": 0.9}).weight_decay
    0.0
    """

    name: str
    lr: LearningRate
    weight_decay: NonNegativeFloat = 0.0
    classifier_lr: LearningRate = 0.1
    exclude_bias_n_norm_wd: bool = False
    kwargs: Free = {}


class SGD(Section):
    """``optimizer.kwargs`` of ``sgd``; null: torch's default, but ``fused: true`` on a GPU.

    >>> SGD(nesterov=True)
    SGD(fused=None, momentum=0.9, nesterov=True, dampening=None)
    """

    fused: bool | None = None
    momentum: ProbabilityBelowOne = 0.9
    nesterov: bool | None = None
    dampening: Probability | None = None


class LARS(SGD):
    """``optimizer.kwargs`` of ``lars``, with solo-learn's names; LARS has no fused kernel.

    >>> LARS(eta=0.02).momentum
    0.9
    """

    fused: None = None
    eta: PositiveFloat = 1e-3
    clip_lr: bool = False
    exclude_bias_n_norm: bool = False
    eps: PositiveFloat | None = None


class Adam(Section):
    """``optimizer.kwargs`` of ``adam(w)``; null: torch's default, but ``fused: true`` on a GPU.

    >>> Adam(betas=[0.9, 0.95]).betas
    [0.9, 0.95]
    """

    fused: bool | None = None
    betas: Annotated[list[ProbabilityBelowOne], Field(min_length=2, max_length=2)] | None = None
    eps: PositiveFloat | None = None
    amsgrad: bool | None = None


OPTIMIZER_KWARGS: dict[str, type[Section]] = {"sgd": SGD, "lars": LARS, "adam": Adam, "adamw": Adam}


class Scheduler(Section):
    """``scheduler``: warm-up and cosine decay, milestones, or a constant rate.

    >>> Scheduler(name="warmup_cosine", warmup_epochs=5).interval
    'step'
    """

    name: Literal["warmup_cosine", "step", "none"]
    lr_decay_steps: list[PositiveInt] | None = None
    min_lr: NonNegativeFloat = 0.0
    warmup_start_lr: NonNegativeFloat = 3e-5
    warmup_epochs: NonNegativeFloat = 10
    interval: Literal["step", "epoch"] = "step"


class Momentum(Section):
    """``momentum``: exponential moving average of methods with a momentum backbone.

    >>> Momentum(base_tau=0.996)
    Momentum(base_tau=0.996, final_tau=1.0, classifier=False)
    """

    base_tau: Probability = 0.99
    final_tau: Probability = 1.0
    classifier: bool = False


class Checkpoint(Section):
    """``checkpoint``: when to save, also within an epoch: every n steps or minutes; 0 means never.

    >>> Checkpoint(every_n_minutes=10).dir
    'trained_models'
    """

    enabled: bool = True
    dir: FolderName = "trained_models"
    frequency: PositiveInt = 1
    keep_prev: bool = False
    every_n_steps: NonNegativeInt = 0
    every_n_minutes: NonNegativeFloat = 30


class AutoResume(Section):
    """``auto_resume``: continues the unfinished run of the same config.

    >>> AutoResume(enabled=True)
    AutoResume(enabled=True, max_hours=36.0)
    """

    enabled: bool = False
    max_hours: PositiveFloat = 36


class KNNEval(Section):
    """``knn_eval``: solo-learn's kNN on the augmented views of training, during training.

    >>> KNNEval(enabled=True, k=200)
    KNNEval(enabled=True, k=200, distance_func='cosine')
    """

    enabled: bool = False
    k: PositiveInt = 20
    distance_func: Literal["cosine", "euclidean"] = "cosine"


class OnlineEval(Section):
    """``online_eval``: the protocols of ``solo-ext eval``, every n epochs; 0 means never.

    Without ``protocols``, a run measures ``knn``, and one without labels ``views`` and
    ``geometry``. ``settings`` are the protocols' settings, by protocol and name.

    >>> OnlineEval(every_n_epochs=10, protocols=["knn"], settings={"knn": {"k": [1, 20]}}).protocols
    ['knn']
    """

    every_n_epochs: NonNegativeInt = 0
    protocols: Annotated[list[OnlineProtocol], MinLen(1)] | None = None
    settings: dict[str, Free] = {}


class Performance(Section):
    """``performance``: channels-last memory layout, unless it is disabled, and ``torch.compile``.

    ``compile``: true compiles backbone and heads with inductor; a name selects another backend.
    ``graphs``: a GPU records a training step and replays it as a CUDA graph.

    >>> Performance(graphs=True)
    Performance(disable_channel_last=False, compile=False, graphs=True)
    """

    disable_channel_last: bool = False
    compile: bool | Literal["aot_eager", "eager"] = False
    graphs: bool = False


class Wandb(Section):
    """``wandb``: Weights & Biases, off by default.

    >>> Wandb(enabled=True, entity="lab").project
    'solo-learn'
    """

    enabled: bool = False
    entity: str | None = None
    project: str = "solo-learn"
    offline: bool = False


TRAINER: dict[str, Any] = {
    "check_val_every_n_epoch": PositiveInt | None,
    "gradient_clip_algorithm": Literal["norm", "value"] | None,
    "gradient_clip_val": NonNegativeFloat | None,
    "limit_train_batches": PositiveInt | Share | None,
    "limit_val_batches": Batches,
    "log_every_n_steps": NonNegativeInt | None,
    "max_steps": Literal[-1] | PositiveInt,
    "max_time": Duration | None,
    "min_epochs": NonNegativeInt | None,
    "min_steps": NonNegativeInt | None,
    "num_sanity_val_steps": Annotated[int, Ge(-1)] | None,
    "overfit_batches": Literal[0],
    "profiler": Literal["simple", "advanced", "pytorch", "xla"] | None,
    "reload_dataloaders_every_n_epochs": NonNegativeInt,
    "val_check_interval": PositiveInt | Share | Duration | None,
}
"""Types of ``Trainer`` arguments whose own annotations allow values that the Trainer refuses."""


class CommonConfig(Section):
    """The keys that solo-learn's own runs share with ours: the model, its images, their fixed view.

    :func:`solo_ext.config.check.common_config` reads them from a host's config or a saved run.

    >>> CommonConfig(
    ...     backbone={"name": "resnet18"},
    ...     data={"dataset": "cifar10"},
    ...     augmentations=[{"crop_size": 32}],
    ...     optimizer={"batch_size": 256},
    ... ).data.format
    'image_folder'
    """

    name: str | None = None
    method: str | None = None
    backbone: Backbone
    method_kwargs: Free | SerializeAsAny[Section] = {}
    data: Images
    augmentations: Annotated[Sequence[Crop], MinLen(1)]
    optimizer: Batch
    dali: DALI | None = None


class RunConfig(CommonConfig):
    """The config of a pretraining run, as :func:`solo_ext.config.check.check_run` returns it.

    ``precision: auto`` is ``bf16-mixed`` on a CPU that is faster with it, else ``32-true``. Any
    other key is an argument of Lightning's ``Trainer``.

    >>> config = RunConfig(
    ...     name="pcl-cifar10",
    ...     method="pcl",
    ...     backbone={"name": "resnet18"},
    ...     data={"dataset": "cifar10", "train_path": "datasets"},
    ...     augmentations=[{"crop_size": 32, "num_crops": 2}],
    ...     optimizer={"name": "sgd", "lr": 0.03, "batch_size": 256},
    ...     scheduler={"name": "warmup_cosine"},
    ...     max_epochs=200,
    ... )
    >>> config.seed, config.precision, config.checkpoint.frequency
    (5, '32-true', 1)
    """

    model_config = ConfigDict(extra="allow")

    name: RunName
    method: str
    momentum: Momentum | None = None
    data: Data
    augmentations: Annotated[list[Augmentation], MinLen(1)]
    optimizer: Optimizer
    scheduler: Scheduler
    checkpoint: Checkpoint = Checkpoint()
    auto_resume: AutoResume = AutoResume()
    knn_eval: KNNEval = KNNEval()
    online_eval: OnlineEval = OnlineEval()
    performance: Performance = Performance()
    wandb: Wandb = Wandb()
    loggers: list[Literal["csv", "mlflow", "tensorboard", "wandb"]] = []
    seed: Seed = 5
    on_nonfinite: Literal["stop", "skip"] = "stop"
    max_epochs: PositiveInt
    accumulate_grad_batches: PositiveInt = 1
    num_nodes: PositiveInt = 1
    devices: PositiveInt | str | Annotated[list[NonNegativeInt], MinLen(1)] = 1
    accelerator: str = "auto"
    strategy: Strategy = "auto"
    precision: str | int = "32-true"
    resume_from_checkpoint: FolderName | None = None
    debug_augmentations: bool = False
    patches: list[str] = []
    auto_umap: Free | None = None
    # One of solo-learn's configs has these two keys of an earlier version; nothing reads them.
    augmentations_cfg: str | None = None
    wandb_cfg: str | None = None

    @property
    def on_cpu(self) -> bool:
        """Whether the run trains on the CPU: by request, or by ``auto`` without a CUDA GPU."""
        import torch

        auto = self.accelerator == "auto" and not torch.cuda.is_available()
        return self.accelerator == "cpu" or auto

    @property
    def world_size(self) -> int:
        """Number of processes; ``devices: auto`` counts the machine's accelerators.

        Raises:
            ConfigError: ``devices`` is text that is not a number or list of devices.

        >>> RunConfig.model_construct(devices="0,1", num_nodes=2).world_size
        4
        """
        return self._devices_of_a_node() * self.num_nodes

    def _devices_of_a_node(self) -> int:
        devices = self.devices
        if not isinstance(devices, str):
            return devices if isinstance(devices, int) else len(devices)
        if devices.strip() in ("auto", "-1"):
            import torch

            return 1 if self.accelerator == "cpu" else max(torch.cuda.device_count(), 1)
        # "2" means two devices; "0,1" and "3," are lists of devices.
        words = [word.strip() for word in devices.split(",") if word.strip()]
        if words and all(w.isdecimal() for w in words):
            if "," in devices:
                return len(words)
            if int(devices):
                return int(devices)
        remedy = "give a number, a list, or auto"
        raise ConfigError("devices", devices, "not a number of devices", remedy)
