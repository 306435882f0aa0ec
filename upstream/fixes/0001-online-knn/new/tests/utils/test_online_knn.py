import torch
from solo.methods import BarlowTwins
from solo.utils.knn import WeightedKNNClassifier

from ..methods.utils import gen_base_cfg, gen_trainer, prepare_dummy_dataloaders


def test_knn_forward():
    knn = WeightedKNNClassifier(k=1, distance_fx="euclidean")

    # nothing is computed until compute is called
    features = torch.eye(4)
    assert knn(train_features=features, train_targets=torch.arange(4)) is None
    assert len(knn.train_features) == 1

    knn(test_features=features, test_targets=torch.arange(4))
    assert knn.compute() == (100, 100)


def test_knn_absent_classes():
    for distance_fx in ["cosine", "euclidean"]:
        knn = WeightedKNNClassifier(k=2, distance_fx=distance_fx)
        knn.update(
            train_features=torch.eye(10),
            train_targets=torch.arange(10),
            test_features=torch.eye(10)[6:],
            test_targets=torch.arange(10)[6:],
        )
        acc1, acc5 = knn.compute()
        assert acc1 == 100
        assert acc5 == 100


def test_knn_eval():
    cfg = gen_base_cfg("barlow_twins", batch_size=2, num_classes=100)
    cfg.method_kwargs = {
        "proj_hidden_dim": 16,
        "proj_output_dim": 16,
        "lamb": 5e-3,
        "scale_loss": 0.025,
    }
    cfg.data.dataset = "cifar10"
    cfg.knn_eval = {"enabled": True, "k": 2}
    model = BarlowTwins(cfg)

    trainer = gen_trainer(cfg)
    train_dl, val_dl = prepare_dummy_dataloaders(
        "cifar10",
        num_large_crops=cfg.data.num_large_crops,
        num_classes=cfg.data.num_classes,
        batch_size=cfg.optimizer.batch_size,
    )
    trainer.fit(model, train_dl, val_dl)
    assert 0 <= trainer.callback_metrics["val_knn_acc1"] <= 100
