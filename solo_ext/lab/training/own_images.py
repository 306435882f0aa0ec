"""From pictures to a config: what ``solo-ext pretrain IMAGES`` chooses, and by which rules.

The rules are those of ``docs/start/choices.md``, in the same order. They begin with the config
``images/<method>``; each sets what the user has not set.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timm
import torch

from solo_ext.config.check import check_run, common_config, validated
from solo_ext.config.compose import compose, parse
from solo_ext.config.schema import MOST_WORKERS, Backbone
from solo_ext.core.errors import ConfigError
from solo_ext.core.files import read_text
from solo_ext.core.machine import cores
from solo_ext.host.backbones import SMALL_SIDE
from solo_ext.host.names import PREFIX
from solo_ext.lab.training.builtin_methods import BUILTIN_KWARGS
from solo_ext.lab.training.names import OF_IMAGES, check_method_of_images
from solo_ext.lab.training.pictures import Pictures, look_at
from solo_ext.lab.training.run_dir import ARGS
from solo_ext.memory.teacher import TeacherKwargs
from solo_ext.methods.registry import capped_prototypes, capped_queue
from solo_ext.pretrained.recognise import recognise_teacher, student_settings

_HELD, _SHARE, _FEWEST_HELD = 2000, 0.1, 10
_MEMORY = 0.1
_TAUGHT = ("seed", "protoseed")
_CROP = re.compile(r"augmentations(\.\d+\.crop_size)?")


@dataclass(frozen=True)
class Machine:
    """What a run may use: processor cores, memory in bytes, and CUDA GPUs.

    >>> Machine(cores=16, memory=2**36, gpus=1, bfloat16=True).gpus
    1
    """

    cores: int
    memory: int
    gpus: int = 0
    bfloat16: bool = False

    @classmethod
    def here(cls) -> Machine:
        """This machine, as far as this process may use it."""
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        return cls(cores(), memory, gpus, bool(gpus) and torch.cuda.is_bf16_supported())


@dataclass(frozen=True)
class Choice:
    """A setting that was chosen, and why; ``key`` is that of the config.

    >>> Choice("max_epochs", 100, "800 images")
    Choice(key='max_epochs', value=100, why='800 images')
    """

    key: str
    value: Any
    why: str


@dataclass(frozen=True)
class Plan:
    """A composed config of a run on a user's images, and the choices that led to it.

    >>> seen = Pictures({"train_path": "/photos"}, "photos", 789, 2, 0, 480, None, {})
    >>> choices = [Choice("max_epochs", 100, "78,900 images in all")]
    >>> print(*Plan({"method": "pcl"}, seen, choices).lines(), sep=chr(10))
    images  789 in /photos, without labels; hidden files passed over: 2
    method  pcl
      max_epochs=100  78,900 images in all
    """

    config: dict[str, Any]
    pictures: Pictures
    choices: list[Choice]

    def lines(self) -> list[str]:
        """The block that says what was chosen, a line each."""
        found, paths = self.pictures, self.pictures.data["train_path"]
        places = paths if isinstance(paths, str) else ", ".join(paths)
        labels = f"{found.classes} classes" if found.classes else "without labels"
        hidden = f"; hidden files passed over: {found.hidden}" if found.hidden else ""
        lines = [f"images  {found.count:,} in {places}, {labels}{hidden}"]
        if found.unreadable:
            first, why = next(iter(found.unreadable.items()))
            are = "1 is" if len(found.unreadable) == 1 else f"{len(found.unreadable)} are"
            lines.append(
                f"        of {found.looked_at} looked at, {are} unreadable and will be left out, "
                f"such as {first!r} ({why})"
            )
        lines.append(f"method  {self.config['method']}")
        words = [f"{choice.key}={_shown(choice.value)}" for choice in self.choices]
        width = max(map(len, words), default=0)
        for word, choice in zip(words, self.choices, strict=True):
            lines.append(f"  {word:<{width}}  {choice.why}")
        return lines


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, bool) or value is None:
        return json.dumps(value)
    return str(value).replace(" ", "")


def plan_run(
    images: Sequence[str],
    method: str | None = None,
    overrides: Sequence[str] = (),
    *,
    teacher: str | None = None,
    machine: Machine | None = None,
) -> Plan:
    """Plans a run on a user's images.

    Args:
        images: folders of any depth, or one file that lists images.
        method: name of a method; if it is ``None`` ``pcl``, or ``protoseed`` with a teacher.
        overrides: ``key=value``; what they set is not chosen.
        teacher: what to distil, as
            :func:`~solo_ext.pretrained.recognise.recognise_teacher` takes it.
        machine: by default this one.

    Raises:
        UserError: no images, too few, or all the same; an unknown method; a wrong override.

    >>> from solo_ext.data.digits import digits_folder
    >>> machine = Machine(cores=2, memory=2**34)
    >>> plan = plan_run([str(digits_folder("train"))], "simclr", ["seed=1"], machine=machine)
    >>> plan.config["augmentations"][0]["crop_size"], plan.config["optimizer"]["batch_size"]
    (32, 128)
    >>> [choice.key for choice in plan.choices][:3]
    ['data.no_labels', 'data.holdout', 'augmentations.0.crop_size']
    """
    # A group of configs, such as `solo_ext/augmentations@augmentations=cifar`, has a package.
    given = {one.package or one.key_or_group: one.value() for one in parse(overrides)}
    # A file of a network that is not recognised is named by its settings.
    settings = given.get("method_kwargs.teacher")
    if teacher is not None and settings is not None:
        problem = "method_kwargs.teacher names one too"
        raise ConfigError("--teacher", teacher, problem, "leave one of them out")
    taught = teacher is not None or isinstance(settings, dict)
    method = method or ("protoseed" if taught else "pcl")
    check_method_of_images(method)
    for key in ("method", "data.train_path", "data.dataset", "data.format"):
        if key in given:
            remedy = "name it by --method" if key == "method" else "or write a config"
            raise ConfigError(key, given[key], "IMAGES and --method say it", remedy)
    if taught != (method in _TAUGHT):
        if not taught:
            remedy = "name one: --teacher timm/<model>, torchvision/<model>, a run or a file"
            raise ConfigError("--method", method, "it learns from a teacher", remedy)
        remedy = f"take {' or '.join(_TAUGHT)}, or leave the teacher out"
        raise ConfigError("--method", method, "it has no teacher", remedy)
    no_labels = given.get("data.no_labels")
    config = compose(f"{OF_IMAGES}/{method}", overrides)
    # The rules read what the overrides have set.
    check_run(config)
    pictures = look_at(images, no_labels if isinstance(no_labels, bool) else None)
    config["data"] |= {k: v for k, v in pictures.data.items() if f"data.{k}" not in given}
    if "name" not in given:
        config["name"] = pictures.name
    taught_by = None if teacher is None else recognise_teacher(teacher, "--teacher")
    if isinstance(settings, dict):
        taught_by = validated(TeacherKwargs, settings, prefix="method_kwargs.teacher")
    rules = _Rules(config, given, pictures, machine or Machine.here(), taught_by)
    return Plan(config, pictures, rules.apply())


class _Rules:
    """Sets what the user has left open, rule by rule; later rules read what earlier ones set."""

    def __init__(
        self,
        config: dict[str, Any],
        given: Mapping[str, Any],
        pictures: Pictures,
        machine: Machine,
        teacher: TeacherKwargs | None = None,
    ) -> None:
        self.taught_by = teacher
        self.config, self.given, self.pictures, self.machine = config, given, pictures, machine
        accelerator = config.get("accelerator")
        self.gpu = bool(machine.gpus) and accelerator in ("auto", "gpu", "cuda")
        self.where = "a GPU" if self.gpu else "a CPU"
        self.choices: list[Choice] = []

    def apply(self) -> list[Choice]:
        for rule in (
            self.labels,
            self.holdout,
            self.crop,
            self.teacher,
            self.backbone,
            self.devices,
            self.batch,
            self.epochs,
            self.optimizer,
            self.precision,
            self.augmentation,
            self.workers,
            self.sizes,
            self.online,
        ):
            rule()
        return self.choices

    @property
    def training(self) -> int:
        """Images that are trained on."""
        return self.pictures.count - round(
            (self.config["data"].get("holdout") or 0) * self.pictures.count
        )

    @property
    def side(self) -> int:
        return int(self.config["augmentations"][0]["crop_size"])

    def is_given(self, key: str) -> bool:
        """Whether the user has set a key, a section that it lies in, or a part of it."""
        return any(
            key == one or key.startswith(f"{one}.") or one.startswith(f"{key}.")
            for one in self.given
        )

    def set(self, key: str, value: Any, why: str, shown: bool = True) -> None:
        if self.is_given(key):
            return
        *sections, last = key.split(".")
        place: Any = self.config
        for section in sections:
            place = (
                place.setdefault(section, {}) if isinstance(place, dict) else place[int(section)]
            )
        place[last] = value
        if shown:
            self.choices.append(Choice(key, value, why))

    def labels(self) -> None:
        found = self.pictures
        if self.is_given("data.no_labels"):
            return
        why = "data.no_labels=false takes folders as classes"
        if found.classes:
            beside = ", and validation images of the same" if "val_path" in found.data else ""
            why = f"folders of {found.classes} classes{beside}"
        self.choices.append(Choice("data.no_labels", not found.classes, why))

    def holdout(self) -> None:
        if self.config["data"].get("val_path"):
            return
        count, classes = self.pictures.count, self.pictures.classes
        share = round(min(_SHARE, _HELD / count), 6)
        held = round(share * count)
        # A part that is measured has neighbours, and of labelled images some of every class.
        if held >= max(_FEWEST_HELD, 2 * classes):
            self.set("data.holdout", share, f"{held} images are measured and not trained on")

    def crop(self) -> None:
        side, most = self.pictures.side, 224 if self.gpu else SMALL_SIDE
        fits = 32 if side <= 48 else 64 if side <= 96 else 128 if side <= 192 else 224
        views = self.config["augmentations"]
        before = self.side
        if any(_CROP.fullmatch(key) for key in self.given):
            return
        crop = min(fits, most)
        why = f"the shorter sides are about {side} pixels" + (
            ", and on a CPU" if fits > most else ""
        )
        for place, view in enumerate(views):
            # Small crops keep their share of the large ones.
            own = (
                crop if view["crop_size"] == before else max(16, crop * view["crop_size"] // before)
            )
            self.set(f"augmentations.{place}.crop_size", own, why, shown=not place)
            if crop <= 32:
                # As in solo-learn's configs for CIFAR.
                self.set(f"augmentations.{place}.gaussian_blur.prob", 0.0, "", shown=False)

    def teacher(self) -> None:
        if self.taught_by is None:
            return
        found = student_settings(self.taught_by, self.side)
        teacher, head = found.method_kwargs["teacher"], found.method_kwargs["head"]
        self.config["method_kwargs"]["teacher"] = teacher
        self.choices.append(
            Choice("method_kwargs.teacher.layout", teacher["layout"], found.description)
        )
        why = "of the same layers as the teacher's" if head == "teacher" else "the teacher has none"
        self.set("method_kwargs.head", head, why)
        if found.crop_size != self.side:
            why = "what the teacher takes"
            for place in range(len(self.config["augmentations"])):
                self.set(f"augmentations.{place}.crop_size", found.crop_size, why, shown=not place)

    def backbone(self) -> None:
        section = self.config["backbone"]
        weights = str(section.get("weights") or "")
        library, _, model = weights.partition("/")
        if library in ("timm", "torchvision") and model:
            # Without the tag of the weights.
            name = f"{PREFIX}{re.split('[.:]', model)[0]}"
            self.set("backbone.name", name, "the network of the weights")
        elif held := _network_of(weights):
            self.set("backbone.name", held.name, "that of the run whose weights it starts from")
            self.set("backbone.kwargs", held.kwargs, "", shown=False)
            return
        elif section["name"].startswith(PREFIX):
            large = self.gpu and self.side >= 128 and self.pictures.count >= 50_000
            why = f"{self.pictures.count:,} images, {self.where}"
            self.set("backbone.name", "timm/resnet50" if large else "timm/resnet18", why)
        if self.is_given("backbone.kwargs"):
            return
        kwargs, name = section.setdefault("kwargs", {}), section["name"]
        if _is_vit(name):
            if self.side != 224:
                kwargs["img_size"] = self.side
            if self.side <= SMALL_SIDE and not weights:
                kwargs["patch_size"] = max(2, self.side // 8)
        elif name.startswith(PREFIX) and self.side <= SMALL_SIDE and (weights or not self.gpu):
            why = "the stem for small images takes four times as long, and this is a CPU"
            self.set("backbone.kwargs.small_stem", False, "that of the weights" if weights else why)

    def devices(self) -> None:
        gpus = self.machine.gpus
        if gpus > 1 and self.gpu and self.pictures.count >= 5000 * gpus:
            self.set("devices", gpus, f"{gpus} GPUs")
            self.set("strategy", "ddp", "", shown=False)
            self.set("sync_batchnorm", True, "", shown=False)

    def batch(self) -> None:
        devices = self.config["devices"]
        devices = max(1, int(devices)) if str(devices).isdecimal() else 1
        share = self.training // devices
        size = 2
        while size < 256 and 2 * size <= share // 8:
            size *= 2
        # A contrastive loss of less than eight images compares hardly anything.
        size = min(max(size, 8), share)
        steps = max(share // size, 1)
        self.set("optimizer.batch_size", size, f"{steps} steps an epoch")

    def epochs(self) -> None:
        seen, least, most = (10**7, 100, 800) if self.gpu else (2 * 10**5, 10, 100)
        epochs = min(max(round(seen / self.training), least), most)
        self.set("max_epochs", epochs, f"{epochs * self.training:,} images in all, on {self.where}")
        total = int(self.config["max_epochs"])
        self.set("scheduler.warmup_epochs", min(10, total // 10), "", shown=False)

    def optimizer(self) -> None:
        optimizer, name = self.config["optimizer"], self.config["backbone"]["name"]
        if (
            _is_vit(name)
            and optimizer["name"] in ("sgd", "lars")
            and not self.is_given("optimizer.name")
        ):
            # solo-learn's settings of MoCo v3 with a vision transformer.
            self.set("optimizer.name", "adamw", "a vision transformer")
            self.set("optimizer.kwargs", {}, "", shown=False)
            self.set("optimizer.lr", 3e-4, "", shown=False)
            self.set("optimizer.weight_decay", 0.1, "", shown=False)
        lr, batch = optimizer["lr"], optimizer["batch_size"]
        if not self.is_given("optimizer.lr"):
            why = f"the method's for a batch of 256; scaled to {lr * batch / 256:.3g} for {batch}"
            self.choices.append(Choice("optimizer.lr", lr, why))

    def precision(self) -> None:
        if self.gpu:
            precision = "bf16-mixed" if self.machine.bfloat16 else "16-mixed"
            self.set("precision", precision, "what the GPU is fast in")
        else:
            self.set("precision", "auto", "bfloat16 where this CPU gains by it")

    def augmentation(self) -> None:
        alike = self.pictures.alike
        if alike is None or max(alike) > SMALL_SIDE or self.pictures.unreadable:
            self.set("data.augmentation", "image", "sizes differ or are large", shown=False)
            return
        per_image = ("rand_augment", "auto_augment", "random_erasing")
        if any(view.get(name) for view in self.config["augmentations"] for name in per_image):
            return
        self.set("data.augmentation", "batch", f"all are of {alike[1]} x {alike[0]} pixels")
        size = self.pictures.count * 3 * alike[0] * alike[1]
        if self.config["data"]["augmentation"] == "batch" and size < _MEMORY * self.machine.memory:
            self.set("data.in_memory", True, f"they take {max(size >> 20, 1):,} MiB")

    def workers(self) -> None:
        cores = min(self.machine.cores, MOST_WORKERS)
        self.set("data.num_workers", cores, f"{self.machine.cores} cores")

    def sizes(self) -> None:
        """Sizes of built-in methods that solo-learn's configs state for more images."""
        kwargs, epochs = self.config["method_kwargs"], int(self.config["max_epochs"])
        batch = int(self.config["optimizer"]["batch_size"])
        for name, size in self._sizes(kwargs, epochs, batch):
            if kwargs[name] != size:
                self.set(
                    f"method_kwargs.{name}", size, "fewer images or epochs than it was made for"
                )
        if self.config["method"] == "mochi":
            warmup = int(self.config["scheduler"]["warmup_epochs"])
            self.set("method_kwargs.mixing.warmup_epochs", warmup, "", shown=False)
        if self.config["method"] == "pcl":
            warmup = max(int(self.config["scheduler"]["warmup_epochs"]), 1)
            self.set("method_kwargs.warmup_epochs", warmup, "prototypes from then on")

    def _sizes(
        self, kwargs: Mapping[str, Any], epochs: int, batch: int
    ) -> Iterable[tuple[str, Any]]:
        images = self.training
        builtin = self.config["method"] in BUILTIN_KWARGS
        if builtin and kwargs.get("queue_size"):
            yield "queue_size", capped_queue(kwargs["queue_size"])(images, batch)
        if builtin and isinstance(kwargs.get("num_prototypes"), int):
            yield "num_prototypes", capped_prototypes(kwargs["num_prototypes"])(images, batch)
        if builtin and isinstance(kwargs.get("num_prototypes"), list):
            sizes = [capped_prototypes(one)(images, batch) for one in kwargs["num_prototypes"]]
            yield "num_prototypes", sizes
        for name in ("warmup_teacher_temperature_epochs", "epoch_queue_starts"):
            if name in kwargs:
                yield name, min(kwargs[name], epochs // 4)
        if "whitening_size" in kwargs:
            size = min(kwargs["whitening_size"], batch)
            yield "whitening_size", size
            yield "proj_output_dim", min(kwargs["proj_output_dim"], size // 2)

    def online(self) -> None:
        data = self.config["data"]
        held = data.get("holdout") or data.get("val_path")
        if held or data["no_labels"]:
            every = max(1, int(self.config["max_epochs"]) // 10)
            why = (
                "measured on images that it does not train on"
                if held
                else "measured on these images"
            )
            self.set("online_eval.every_n_epochs", every, why)


def _network_of(weights: str) -> Backbone | None:
    """The network of a run directory."""
    file = Path(weights).expanduser() / ARGS
    if not weights or not file.is_file():
        return None
    return common_config(json.loads(read_text(file))).backbone


def _is_vit(name: str) -> bool:
    if not name.startswith(PREFIX):
        return name.startswith(("vit", "swin"))
    config = timm.get_pretrained_cfg(name.removeprefix(PREFIX), allow_unregistered=True)
    return "patch_embed" in str(getattr(config, "first_conv", None))
