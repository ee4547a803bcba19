import doctest

import pytest
import torch

from adashift import _spatial
from adashift._spatial import get_phi, zero_v

X = torch.tensor([[1.0, 4.0], [9.0, 2.0]])


def rows(x):
    return x.amax(1, keepdim=True)


def test_doctests():
    result = doctest.testmod(_spatial)
    assert result.attempted > 0 and result.failed == 0


@pytest.mark.parametrize(
    ("phi", "expected"), [("max", torch.tensor(9.0)), ("mean", torch.tensor(4.0)), ("none", X)]
)
def test_named_functions(phi, expected):
    assert torch.equal(get_phi(phi)(X), expected)


def test_function_is_returned_unchanged():
    assert get_phi(rows) is rows


@pytest.mark.parametrize("phi", ["maximum", "", None, 3])
def test_unknown_names_raise_and_list_the_choices(phi):
    with pytest.raises(ValueError, match="max, mean, row, none or a function") as error:
        get_phi(phi)
    assert repr(phi) in str(error.value)


@pytest.mark.parametrize(("phi", "shape"), [("max", ()), ("none", (2, 2)), (rows, (2, 1))])
def test_zero_v_has_the_shape_of_phi(phi, shape):
    v = zero_v(phi, X.double())
    assert torch.equal(v, torch.zeros(shape, dtype=torch.float64))
    assert v.dtype == torch.float64


@pytest.mark.parametrize(
    "phi",
    [
        lambda x: x.max(1),  # a named tuple, not a tensor
        lambda x: x.flatten(),
        lambda x: x.expand(5, 2, 2),
        lambda x: 1.0,
    ],
)
def test_result_that_does_not_broadcast_raises(phi):
    with pytest.raises(ValueError, match=r"shape \(2, 2\).*broadcast.*keepdim=True"):
        zero_v(phi, X)
