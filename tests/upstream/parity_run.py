"""Each method of ``upstream/methods`` beside ours, in one process of the patched solo-learn.

Run as a program, it writes to the file of its argument what was registered, which patches of ours
replace something there, and, for every case of :data:`CASES`, by how much the two forms differ:
gradients and losses above 1 relative, the rest absolutely. Upstream's form trains first. Ours
starts each of the steps from its state, so that every step is compared by itself, and what a step
writes into queues is compared before the next.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BATCH, STEPS, DIM = 8, 4, 16
NEW = ("hard_negative", "mochi", "pcl", "seed", "protocpc", "protoseed")

Result = dict[str, float]


class Step(NamedTuple):
    """What is compared of a step."""

    state: dict[str, Any]
    loss: float
    gradients: dict[str, Tensor]


class Case(NamedTuple):
    """One comparison: by its losses alone, or by training with both forms."""

    run: Callable[..., Result]
    settings: dict[str, Any]


def apart(ours: Tensor, theirs: Tensor, least: float = 1e-12) -> float:
    """Relative distance, of what is smaller than ``least`` relative to that."""
    return float((ours - theirs).norm() / theirs.norm().clamp(min=least))


def compare(theirs: Callable[..., Tensor], ours: Callable[..., Tensor], *inputs: Tensor) -> Result:
    """Loss and gradients of two functions of the same tensors."""
    values, gradients = [], []
    for function in (theirs, ours):
        leaves = [x.detach().clone().requires_grad_() for x in inputs]
        value = function(*leaves)
        value.backward()
        values.append(value.detach())
        gradients.append(torch.cat([leaf.grad.flatten() for leaf in leaves]))
    assert gradients[0].norm() > 0
    loss = apart(values[1], values[0], least=1)
    return {"loss": loss, "gradient": apart(gradients[1], gradients[0])}


def views(*names: int) -> list[Tensor]:
    """Unit rows, the same in every run."""
    generator = torch.Generator().manual_seed(3)
    return [F.normalize(torch.randn(n, DIM, generator=generator), dim=1) for n in names]


def unit(x: Tensor) -> Tensor:
    """Unit rows: ours normalises inside, so that its gradients have no part along the rows."""
    return F.normalize(x, dim=-1)


def forms(theirs: str, ours: str = "") -> list[Callable[..., Tensor]]:
    """A loss of the host, and ours of the same name or another."""
    import solo.losses

    import solo_ext.losses

    names = (solo.losses, theirs), (solo_ext.losses, ours or theirs)
    return [getattr(module, f"{name}_loss_func") for module, name in names]


def hard_negative_loss(**settings: float) -> Result:
    theirs, ours = forms("hard_negative")
    z1, z2 = views(12, 12)
    # Views of one image are alike, so that the minimum of the estimate is reached at low T.
    return compare(lambda *z: theirs(*z, **settings), lambda *z: ours(*z, **settings), z1, z1 + z2)


def nnclr_loss(symmetric: bool) -> Result:
    theirs, ours = forms("nnclr", "nnclr_symmetric")
    nn_, p = views(12, 12)
    return compare(
        lambda p: theirs(nn_, p, 0.1, symmetric), lambda p: ours(nn_, p, 0.1, symmetric), p
    )


def mochi_loss(**counts: int) -> Result:
    theirs, ours = forms("mochi")
    query, key, queue = views(12, 12, 50)
    with drawn() as draws:
        theirs(query, key, queue.T, 0.2, **counts)
    (once,) = draws

    def again(q: Tensor) -> Tensor:
        with replayed(once):
            return theirs(unit(q), key, queue.T, 0.2, **counts)

    def of_ours(q: Tensor) -> Tensor:
        return ours(q, key, queue, 0.2, counts["num_hard"], draws=mixes(once))

    return compare(again, of_ours, query)


def pcl_loss() -> Result:
    theirs, ours = forms("pcl", "proto_nce")
    query, *tables = views(12, 5, 30)
    phi = [0.05 + torch.rand(len(t)) for t in tables]
    ids = torch.stack([torch.arange(12) * 7 % len(t) for t in tables])

    def mean(q: Tensor) -> Tensor:
        return torch.stack([ours(q, *of) for of in zip(tables, phi, ids, strict=True)]).mean()

    return compare(lambda q: theirs(unit(q), tables, phi, ids), mean, query)


def concentration() -> Result:
    from solo.methods import METHODS

    from solo_ext.clustering import cluster_concentration

    z, prototypes = views(60, 9)
    # A cluster of one row, and an empty one.
    ids = torch.arange(60) % 7
    ids[0] = 7
    distances = (z - prototypes[ids]).norm(dim=1)
    ours = cluster_concentration(distances, ids, 9, temperature=0.2, alpha=10)
    settings = type("Settings", (), {"alpha": 10, "temperature": 0.2})
    theirs = METHODS["pcl"].compute_concentration(settings, z, ids, prototypes)
    return {"state": apart(ours, theirs)}


def seed_loss(rows: int, teacher_temperature: float) -> Result:
    theirs, ours = forms("seed")
    student, teacher, queue = views(12, 12, rows)
    rest = teacher, queue, 0.2, teacher_temperature
    return compare(lambda s: theirs(unit(s), *rest), lambda s: ours(s, *rest), student)


def protocpc_loss(prior: str) -> Result:
    theirs, ours = forms("protocpc")
    logits, probs = views(12, 12)
    probs = (probs / 0.04).softmax(1)
    q = torch.ones(DIM) if prior == "flat" else DIM * views(1)[0][0].softmax(0)
    return compare(lambda s: theirs(s, probs, q, 0.1), lambda s: ours(s, probs, q, 0.1), logits)


def protocpc_step(same_view: bool) -> Result:
    """Two steps of the loss with its prior."""
    from solo.losses import ProtoCPCLoss

    from solo_ext.losses import protocpc_step as ours

    prototypes, *z = views(40, 12, 12, 12, 12)
    student, teacher = torch.stack(z[:2]), torch.stack(z[2:])
    theirs, prior = ProtoCPCLoss(40), torch.ones(40)
    targets = torch.eye(2) if same_view else 1 - torch.eye(2)
    found: Result = {}
    for _ in range(2):
        before, terms = theirs.prior.clone(), []

        def of_theirs(s: Tensor, before: Tensor = before) -> Tensor:
            theirs.prior = before
            return theirs(list(s @ prototypes.T), list(teacher @ prototypes.T), same_view)

        def of_ours(s: Tensor, prior: Tensor = prior, terms: list[Any] = terms) -> Tensor:
            terms.append(ours(s, teacher, prototypes, prior, targets=targets))
            return terms[0].loss

        step = compare(lambda s: of_theirs(unit(s)), of_ours, student)
        prior = terms[0].prior
        step["state"] = apart(prior, theirs.prior)
        found = {k: max(v, found.get(k, 0.0)) for k, v in step.items()}
    assert prior.std() > 0
    return found


# MoCHi draws at random; what upstream's form drew is given to ours.


@contextmanager
def drawn() -> Iterator[list[list[Tensor]]]:
    """Collects what each call of upstream's mixing draws."""
    from solo.losses import mochi

    calls: list[list[Tensor]] = []
    own = mochi.mix_hard_negatives

    def recorded(*given: Any, **named: Any) -> Tensor:
        calls.append([])
        with patched_torch(lambda function, *a, **k: _kept(calls[-1], function(*a, **k))):
            return own(*given, **named)

    mochi.mix_hard_negatives = recorded
    try:
        yield calls
    finally:
        mochi.mix_hard_negatives = own


@contextmanager
def replayed(call: list[Tensor]) -> Iterator[None]:
    """Makes upstream's mixing draw the same again."""
    left = list(call)
    with patched_torch(lambda function, *a, **k: left.pop(0)):
        yield


@contextmanager
def patched_torch(by: Callable[..., Tensor]) -> Iterator[None]:
    randint, rand = torch.randint, torch.rand
    torch.randint = lambda *a, **k: by(randint, *a, **k)
    torch.rand = lambda *a, **k: by(rand, *a, **k)
    try:
        yield
    finally:
        torch.randint, torch.rand = randint, rand


def _kept(calls: list[Tensor], value: Tensor) -> Tensor:
    calls.append(value)
    return value


def mixes(call: list[Tensor]) -> Any:
    """The draws of one call as ours takes them."""
    from solo_ext.losses import MixDraws

    first, offset, alpha, single, beta = call
    second = (first + offset) % MIXES["num_hard"]
    return MixDraws(torch.stack((first, second), 2), alpha[..., 0], single, beta[..., 0] / 2)


# Training with both forms.


class Recorder:
    """Lightning callback (see :func:`callback`) that records the steps of a run."""

    def __init__(self, take: Callable[[nn.Module, Step], None] | None, steps: list[Step]) -> None:
        self.take, self.given, self.steps = take, steps, []
        self.after: list[dict[str, Any]] = []

    def on_train_batch_start(self, trainer: Any, method: Any, *_: Any) -> None:
        self.after.append(state_of(method))
        if self.take is not None:
            self.take(method, self.given[len(self.steps)])
        self.steps.append(Step(state_of(method), 0.0, {}))

    def on_after_backward(self, trainer: Any, method: Any) -> None:
        gradients = {
            name: p.grad.clone() for name, p in method.named_parameters() if p.grad is not None
        }
        self.steps[-1] = self.steps[-1]._replace(gradients=gradients)

    def on_train_batch_end(self, trainer: Any, method: Any, outputs: Any, *_: Any) -> None:
        self.steps[-1] = self.steps[-1]._replace(loss=float(outputs["loss"]))

    def on_fit_end(self, trainer: Any, method: Any) -> None:
        self.after = [*self.after[1:], state_of(method)]


def state_of(method: nn.Module) -> dict[str, Any]:
    state = {k: v.clone() for k, v in method.state_dict().items()}
    for name in ("prototypes", "concentrations", "assignments"):
        held = getattr(method, name, None)
        if held is not None and not isinstance(held, nn.Module):
            state[f"pcl.{name}"] = [x.clone() for x in held]
    return state


class Images(torch.utils.data.Dataset):
    """Two random views of each image, with its index."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.views = torch.randn(2, BATCH * STEPS, 3, 16, 16, generator=generator)

    def __len__(self) -> int:
        return self.views.shape[1]

    def __getitem__(self, index: int) -> Any:
        return index, list(self.views[:, index]), index % 3


def config(method: str, kwargs: dict[str, Any], epochs: int) -> Any:
    from omegaconf import OmegaConf

    return OmegaConf.create(
        {
            "name": "parity",
            "method": method,
            "method_kwargs": kwargs,
            "backbone": {
                "name": "timm/resnet10t",
                "kwargs": {"channels": [8, 8, 8, 8], "small_stem": False},
            },
            "data": {
                **{"dataset": "custom", "train_path": ".", "num_classes": 3},
                **{"num_large_crops": 2, "num_small_crops": 0, "format": "image_folder"},
            },
            "augmentations": [{"crop_size": 16, "num_crops": 2}],
            "momentum": {"base_tau": 0.9, "final_tau": 1.0},
            "optimizer": {
                **{"name": "sgd", "batch_size": BATCH, "lr": 0.1, "classifier_lr": 0.1},
                "weight_decay": 0.0,
            },
            "scheduler": {"name": "none"},
            "max_epochs": epochs,
            "devices": "1",
        }
    )


def fit(method: Any, recorder: Recorder | None, epochs: int) -> Any:
    from lightning.pytorch import Trainer
    from lightning.pytorch.callbacks import Callback, LambdaCallback

    hooks = (
        "on_train_batch_start",
        "on_after_backward",
        "on_train_batch_end",
        "on_fit_end",
    )
    callbacks: list[Callback] = []
    if recorder is not None:
        callbacks.append(LambdaCallback(**{name: getattr(recorder, name) for name in hooks}))
    trainer = Trainer(
        **{"accelerator": "cpu", "max_epochs": epochs, "logger": False, "callbacks": callbacks},
        **{"enable_checkpointing": False, "enable_progress_bar": False},
        enable_model_summary=False,
    )
    loader = torch.utils.data.DataLoader(Images(), batch_size=BATCH)
    trainer.fit(method, loader)
    return trainer


def train_both(
    name: str,
    theirs: dict[str, Any],
    ours: dict[str, Any],
    take: Callable[[nn.Module, Step], None],
    differ: Callable[[dict[str, Any], dict[str, Any]], float],
    prepare: Callable[[nn.Module, list[list[Tensor]]], None] = lambda method, draws: None,
    host: str | None = None,
    epochs: int = 1,
) -> Result:
    """By how much losses and gradients of the steps differ, and by ``differ`` the state after them.

    ``theirs`` and ``ours`` are ``method_kwargs``. ``take`` gives our method the state of a step
    that the host names otherwise; ``prepare`` changes it before it trains, by what the host's MoCHi
    drew.
    """
    from solo.methods import METHODS

    def copy(method: nn.Module, step: Step) -> None:
        state = method.state_dict()
        method.load_state_dict(state | {k: v for k, v in step.state.items() if k in state})
        with torch.no_grad():
            take(method, step)

    with drawn() if name == "mochi" else none() as draws:
        torch.manual_seed(1)
        first = Recorder(None, [])
        fit(METHODS[host or name](config(host or name, theirs, epochs)), first, epochs)
        origin = name if host else f"solo_ext/{name}"
        method = METHODS[origin](config(name, ours, epochs))
        prepare(method, draws)
        second = Recorder(copy, first.steps)
        fit(method, second, epochs)
    found = {"loss": 0.0, "gradient": 0.0, "state": 0.0, "steps": float(len(second.steps))}
    pairs = zip(first.steps, second.steps, first.after, second.after, strict=True)
    for a, b, after_a, after_b in pairs:
        found["loss"] = max(found["loss"], abs(a.loss - b.loss) / abs(a.loss))
        found["gradient"] = max(found["gradient"], gradients_apart(a, b))
        found["state"] = max(found["state"], differ(after_a, after_b))
    return found


@contextmanager
def none() -> Iterator[list[list[Tensor]]]:
    yield []


def gradients_apart(theirs: Step, ours: Step) -> float:
    """Relative distance of the gradients of everything that learns."""
    parts: list[list[Tensor]] = [[], []]
    for name, gradient in ours.gradients.items():
        other = theirs.gradients.get(name)
        if name == "prototypes.weight":
            # Upstream's are weight-normalised: theirs has no part along the row.
            v = theirs.state["prototypes.weight_v"]
            unit = F.normalize(v, dim=1)
            gradient = gradient - (gradient * unit).sum(1, keepdim=True) * unit
            other = theirs.gradients["prototypes.weight_v"] * v.norm(dim=1, keepdim=True)
        assert other is not None, name
        parts[0].append(gradient.flatten())
        parts[1].append(other.flatten())
    assert len(parts[0]) > 5
    return apart(torch.cat(parts[0]), torch.cat(parts[1]))


def no_state(method: nn.Module, step: Step) -> None:
    """Everything is in the state dict, by the same names."""


def take_moco(method: Any, step: Step) -> None:
    for view, queue in enumerate(method.queues):
        queue.value.copy_(step.state["queue"][view].T)


def moco_apart(theirs: dict[str, Any], ours: dict[str, Any]) -> float:
    both = [ours[f"queues.{view}.value"].T for view in range(2)]
    momentum = [k for k in theirs if k.startswith("momentum_")]
    rows = float((torch.stack(both) - theirs["queue"]).abs().max())
    return max(rows, *(float((ours[k] - theirs[k]).abs().max()) for k in momentum))


def take_pcl(method: Any, step: Step) -> None:
    take_moco(method, step)
    if step.state["pcl.prototypes"]:
        tables = step.state["pcl.prototypes"]
        phi, ids = step.state["pcl.concentrations"], torch.stack(step.state["pcl.assignments"])
        method.prototypes.update_(0, tables, phi, ids)


def without_e_step(method: Any, draws: Any) -> None:
    method.e_step.start = lambda of: None
    method.e_step.is_due = lambda epoch: False


def given_draws(method: Any, draws: list[list[Tensor]]) -> None:
    from solo_ext.losses import Mixing

    # Theirs begins with the first view's queries, ours with the first view's queue.
    order = iter([draws[i + 1 - 2 * (i % 2)] for i in range(len(draws))])
    method._mixing.draw = lambda *_: Mixing(MIXES["num_hard"], mixes(next(order)))


def take_neighbours(method: Any, step: Step) -> None:
    method.support_set.value.copy_(step.state["queue"])


def unwarned(method: Any, draws: Any) -> None:
    method._warn = lambda: None


def take_seed(method: Any, step: Step) -> None:
    method.queues[0].value.copy_(step.state["queue"])


def take_prior(method: Any, step: Step) -> None:
    method.prior.value.copy_(step.state["protocpc_loss_func.prior"])
    method.prototypes.weight.copy_(F.normalize(step.state["prototypes.weight_v"], dim=1))


def tables_apart(theirs: str, ours: str) -> Callable[[dict[str, Any], dict[str, Any]], float]:
    return lambda a, b: float((b[ours] - a[theirs]).abs().max())


def make_teacher(folder: Path) -> None:
    """A run of upstream's SimCLR, as its Checkpointer writes it."""
    from omegaconf import OmegaConf
    from solo.methods import METHODS

    cfg = config("simclr", {**HEAD, "temperature": 0.2}, 1)
    torch.manual_seed(7)
    trainer = fit(METHODS["simclr"](cfg), None, 1)
    trainer.save_checkpoint(folder / "parity-ep=0.ckpt")
    (folder / "args.json").write_text(json.dumps(OmegaConf.to_container(cfg)))


HEAD = {"proj_hidden_dim": 32, "proj_output_dim": DIM}
MOCO = {**HEAD, "temperature": 0.2, "queue_size": 2 * BATCH}
MIXES = {"num_hard": 6, "num_pair_mixes": 10, "num_query_mixes": 5}
NEAR = {"temperature": 0.2, "pred_hidden_dim": 32, **HEAD}
PROTOTYPES = {"num_prototypes": 40, "prior_momentum": 0.9}
# Of two batches: two steps meet random rows, two a queue that is full.
SIZES = {"filled": 2 * BATCH, "not filled": 8 * BATCH}
RESIZED = {name: {"queue_size": size} for name, size in SIZES.items()}

LOSSES = {
    **{
        f"hard_negative loss T={T} tau_plus={tau} beta={beta}": Case(
            hard_negative_loss, {"temperature": T, "tau_plus": tau, "beta": beta}
        )
        for T in (0.1, 0.2, 0.5)
        for tau in (0.0, 0.1)
        for beta in (0.0, 0.5, 2.0)
    },
    "nnclr loss": Case(nnclr_loss, {"symmetric": False}),
    "nnclr loss symmetric": Case(nnclr_loss, {"symmetric": True}),
    "mochi loss": Case(mochi_loss, MIXES),
    "pcl loss": Case(pcl_loss, {}),
    "pcl concentration": Case(concentration, {}),
    **{
        f"seed loss K={rows} T={T}": Case(seed_loss, {"rows": rows, "teacher_temperature": T})
        for rows in (5, 50)
        for T in (0.01, 0.1)
    },
    "protocpc loss flat prior": Case(protocpc_loss, {"prior": "flat"}),
    "protocpc loss": Case(protocpc_loss, {"prior": "not flat"}),
    "protocpc step other view": Case(protocpc_step, {"same_view": False}),
    "protocpc step same view": Case(protocpc_step, {"same_view": True}),
}


def trained(name: str, theirs: dict[str, Any], ours: dict[str, Any], **more: Any) -> Case:
    more = {"take": no_state, "differ": lambda a, b: 0.0, **more}
    return Case(train_both, {"name": name, "theirs": theirs, "ours": ours, **more})


WEIGHTED = {**HEAD, "temperature": 0.5, "tau_plus": 0.1}
PLAIN = {"proj_batch_norm": False}
METHODS_CASES = {
    "hard_negative": trained(
        "hard_negative", {**WEIGHTED, "beta": 1.0}, {**WEIGHTED, "beta": 1.0, **PLAIN}
    ),
    "hard_negative beta=0": trained(
        "hard_negative", {**WEIGHTED, "beta": 0.0}, {**WEIGHTED, "beta": 0.0, **PLAIN}
    ),
    **{
        f"nnclr symmetric={symmetric} queue {filled}": trained(
            "nnclr_symmetric",
            {**NEAR, **size, "symmetric": symmetric},
            {**NEAR, **size, "symmetric": symmetric},
            host="nnclr",
            take=take_neighbours,
            prepare=unwarned,
            differ=tables_apart("queue", "support_set.value"),
        )
        for symmetric in (False, True)
        for filled, size in RESIZED.items()
    },
    **{
        f"mochi queue {filled}": trained(
            "mochi",
            {**MOCO, **size, **MIXES, "warmup_epochs": 0},
            {**MOCO, **size, **PLAIN, "mixing": {**MIXES, "warmup_epochs": 0}},
            take=take_moco,
            differ=moco_apart,
            prepare=given_draws,
        )
        for filled, size in RESIZED.items()
    },
    "mochi warm-up": trained(
        "mochi",
        {**MOCO, **MIXES, "warmup_epochs": 1},
        {**MOCO, **PLAIN, "mixing": {**MIXES, "warmup_epochs": 1}},
        take=take_moco,
        differ=moco_apart,
    ),
    **{
        f"pcl queue {filled}": trained(
            "pcl",
            {**MOCO, **size, "num_prototypes": [3, 6], "warmup_epochs": 1},
            {**MOCO, **size, "num_prototypes": [3, 6], "warmup_epochs": 1, "symmetric": True},
            take=take_pcl,
            differ=moco_apart,
            prepare=without_e_step,
            epochs=2,
        )
        for filled, size in RESIZED.items()
    },
    **{
        f"seed queue {filled}": trained(
            "seed",
            {**HEAD, **size, "teacher_temperature": 0.05},
            {**size, "proj_hidden_dim": 32, "teacher_temperature": 0.05},
            take=take_seed,
            differ=tables_apart("queue", "queues.0.value"),
        )
        for filled, size in RESIZED.items()
    },
    "protocpc": trained(
        "protocpc",
        {**HEAD, **PROTOTYPES, "freeze_prototypes_epochs": 0},
        {**HEAD, **PROTOTYPES, "freeze_prototypes_epochs": 0},
        take=take_prior,
        differ=tables_apart("protocpc_loss_func.prior", "prior.value"),
    ),
    "protoseed": trained(
        "protoseed",
        {**HEAD, **PROTOTYPES},
        {**PROTOTYPES, "head": "mlp", "proj_hidden_dim": 32},
        take=take_prior,
        differ=tables_apart("protocpc_loss_func.prior", "prior.value"),
    ),
}
CASES = {**LOSSES, **METHODS_CASES}


def applied() -> dict[str, tuple[bool, str]]:
    """Applies each patch of ours; whether it replaced something, or why it could not."""
    from solo_ext import host
    from solo_ext.host.patches import PATCHES

    host.load()
    for patch in PATCHES.values():
        patch.apply()
    return {patch.name: (bool(patch.undo), patch.error) for patch in PATCHES.values()}


def main(output: str) -> None:
    """Runs all cases, applies our patches after them, and writes what was found."""
    from solo_ext.plugin import register

    register()
    import solo
    from solo.methods import METHODS

    folder = Path(output).parent / "teacher"
    folder.mkdir()
    make_teacher(folder)
    results: dict[str, Any] = {}
    for name, case in CASES.items():
        settings = dict(case.settings)
        if settings.get("name") in ("seed", "protoseed"):
            settings["theirs"] = {**settings["theirs"], "teacher_dir": str(folder)}
            settings["ours"] = {**settings["ours"], "teacher": {"path": str(folder)}}
        results[name] = case.run(**settings)
    registered = {
        name: [METHODS[name].__module__, METHODS[f"solo_ext/{name}"].__module__] for name in NEW
    }
    losses = {name: getattr(solo.losses, f"{name}_loss_func").__module__ for name in NEW[:-1]}
    found = {"methods": registered, "losses": losses, "results": results, "patches": applied()}
    Path(output).write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
