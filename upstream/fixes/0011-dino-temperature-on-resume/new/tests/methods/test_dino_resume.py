from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback
from solo.methods import DINO

from .utils import gen_base_cfg, prepare_dummy_dataloaders


class Recorder(Callback):
    """Saves a checkpoint within the second epoch, and remembers the temperature of each step."""

    def __init__(self, path=None):
        self.path = path
        self.temperatures = []

    def on_train_batch_end(self, trainer, model, outputs, batch, batch_idx):
        loss = model.dino_loss_func
        self.temperatures.append(loss.teacher_temp_schedule[loss.epoch])
        if self.path is not None and trainer.global_step == 3:
            trainer.save_checkpoint(self.path)


def test_dino_resume(tmp_path):
    cfg = gen_base_cfg("dino", batch_size=2, num_classes=10, momentum=True)
    cfg.data.dataset = "cifar10"
    cfg.max_epochs = 3
    cfg.method_kwargs = {
        "proj_hidden_dim": 16,
        "proj_output_dim": 16,
        "num_prototypes": 8,
        "warmup_teacher_temperature": 0.04,
        "teacher_temperature": 0.08,
        "warmup_teacher_temperature_epochs": 3,
    }
    train_dl, _ = prepare_dummy_dataloaders(
        "cifar10", num_large_crops=2, num_classes=10, batch_size=2
    )

    def fit(path=None, ckpt_path=None):
        recorder = Recorder(path)
        trainer = Trainer(
            accelerator="cpu",
            max_epochs=3,
            limit_train_batches=2,
            logger=False,
            enable_checkpointing=False,
            callbacks=[recorder],
        )
        trainer.fit(DINO(cfg), train_dl, ckpt_path=ckpt_path)
        return recorder.temperatures

    temperatures = fit(path=tmp_path / "dino.ckpt")
    assert [round(t, 2) for t in temperatures] == [0.04, 0.04, 0.06, 0.06, 0.08, 0.08]
    assert fit(ckpt_path=tmp_path / "dino.ckpt") == temperatures[3:]
