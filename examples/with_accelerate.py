"""AdaShift with Accelerate: `prepare` takes it as it takes every torch optimizer.

pip install -r examples/requirements.txt
accelerate launch examples/with_accelerate.py
"""

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from adashift import AdaShift

EPOCHS = 10


def main() -> None:
    accelerator = Accelerator()
    torch.manual_seed(0)
    x = torch.randn(4096, 20)
    y = nn.Linear(20, 5)(x).argmax(1)
    batches = DataLoader(TensorDataset(x, y.detach()), batch_size=128, shuffle=True)
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 5))

    optimizer = AdaShift(model.parameters(), lr=0.01)  # ten times the rate of Adam
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * len(batches))
    model, optimizer, batches, scheduler = accelerator.prepare(model, optimizer, batches, scheduler)
    for epoch in range(EPOCHS):
        losses = []
        for inputs, labels in batches:
            loss = cross_entropy(model(inputs), labels)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            losses.append(loss.detach())
        accelerator.print(f"epoch {epoch + 1}: loss {torch.stack(losses).mean():.3f}")


if __name__ == "__main__":
    main()
