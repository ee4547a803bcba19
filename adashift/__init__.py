"""AdaShift for PyTorch, with the rules that its paper compares it to and torch.optim lacks."""

from adashift.baselines import AdamNC, SpatialOnly
from adashift.optimizer import AdaShift

__all__ = ["AdaShift", "AdamNC", "SpatialOnly", "__version__"]
__version__ = "0.1.0"
