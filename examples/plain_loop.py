"""AdaShift in a plain training loop, with a learning-rate schedule and mixed precision.

python examples/plain_loop.py
"""

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from adashift import AdaShift

EPOCHS, BATCH = 10, 128


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    half = torch.float16 if device == "cuda" else torch.bfloat16
    torch.manual_seed(0)
    x = torch.randn(4096, 20)
    y = nn.Linear(20, 5)(x).argmax(1)
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 5)).to(device)

    optimizer = AdaShift(model.parameters(), lr=0.01)  # ten times the rate of Adam
    steps = EPOCHS * len(x) // BATCH
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    scaler = torch.amp.GradScaler(device, enabled=half == torch.float16)
    for epoch in range(EPOCHS):
        losses = []
        for batch in torch.randperm(len(x)).split(BATCH):
            inputs, labels = x[batch].to(device), y[batch].to(device)
            with torch.autocast(device, half):
                loss = cross_entropy(model(inputs), labels)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            losses.append(loss.detach())
        print(f"epoch {epoch + 1}: loss {torch.stack(losses).mean():.3f}")


if __name__ == "__main__":
    main()
