"""AdaShift for PyTorch, and the baselines of its paper that torch.optim does not provide.

This package holds the optimizers, their reference implementation, the probe and, in analysis/, the
theory. It imports nothing else of this repository and, outside analysis/, needs torch alone.
Training, configuration and figures belong in experiments/.
"""

from adashift.baselines import AdamNC, SpatialOnly
from adashift.optimizer import AdaShift

__all__ = ["AdaShift", "AdamNC", "SpatialOnly", "__version__"]
__version__ = "0.1.0"
