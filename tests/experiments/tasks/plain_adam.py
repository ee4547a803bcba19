"""Adam as a plain loop, to compare tasks and measurements with, and what their tests share."""

from itertools import islice

import numpy as np
import torch


def rows_of(measurement, make, count):
    """Return the first `count` rows of a measurement."""
    theta = torch.nn.Parameter(torch.zeros((), dtype=torch.float64))
    return list(islice(measurement.rows(make([theta])), count))


def column(rows, name):
    return np.array([row[name] for row in rows])


def stepped(make, g, bounds=(-np.inf, np.inf), forget=0):
    """θ from 0 after each gradient; after the first `forget` of them it is put back to 0."""
    theta = torch.nn.Parameter(torch.zeros((), dtype=torch.float64))
    optimizer, path = make([theta]), []
    for t, slope in enumerate(g.tolist(), start=1):
        theta.grad = torch.tensor(slope, dtype=torch.float64)
        optimizer.step()
        theta.data.clamp_(*bounds)
        if t == forget:
            theta.data.zero_()
        path.append(theta.item())
    return np.array(path)


def average(beta, x):
    """Adam's moving average with its bias correction, as a plain loop."""
    y, averages = 0.0, []
    for t, value in enumerate(x.tolist(), start=1):
        y = beta * y + (1 - beta) * value
        averages.append(y / (1 - beta**t))
    return np.array(averages)


def adam_step_sizes(beta2, g):
    return 1 / np.sqrt(average(beta2, g**2))


def adam_updates(beta1, beta2, g):
    """What Adam with lr = 1 and eps = 0 adds to θ."""
    return -average(beta1, g) * adam_step_sizes(beta2, g)
