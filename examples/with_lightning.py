"""AdaShift with Lightning: `configure_optimizers` returns it, with a schedule if you want one.

pip install -r examples/requirements.txt
python examples/with_lightning.py
"""

from typing import Any

import lightning
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset

from adashift import AdaShift

EPOCHS = 10


class Classifier(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 5))

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        x, y = batch
        loss = cross_entropy(self.model(x), y)
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def on_train_epoch_end(self) -> None:
        print(f"epoch {self.current_epoch + 1}: loss {self.trainer.callback_metrics['loss']:.3f}")

    def configure_optimizers(self) -> Any:
        optimizer = AdaShift(self.parameters(), lr=0.01)  # ten times the rate of Adam
        return [optimizer], [CosineAnnealingLR(optimizer, EPOCHS)]


def main() -> None:
    torch.manual_seed(0)
    x = torch.randn(4096, 20)
    y = nn.Linear(20, 5)(x).argmax(1)
    batches = DataLoader(TensorDataset(x, y.detach()), batch_size=128, shuffle=True)
    trainer = lightning.Trainer(
        max_epochs=EPOCHS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Classifier(), batches)


if __name__ == "__main__":
    main()
