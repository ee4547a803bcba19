import doctest
import io

import numpy as np
import pytest
import torch

from adashift import _moments
from adashift._moments import pearson
from adashift.analysis import correlation
from adashift.analysis.correlation import CHUNK_STEPS, CorrelationStudy, RunningCorrelation

LAGS, SHAPE = 3, (5, 8)


@pytest.mark.parametrize("module", [_moments, correlation])
def test_doctests(module):
    result = doctest.testmod(module)
    assert result.attempted > 0 and result.failed == 0


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def normal(steps, *shape):
    return torch.randn(steps, *shape, generator=seeded())


def columnwise(x, y):
    """Return numpy's correlation of each column of x with the same column of y, or with y."""
    y = np.broadcast_to(y.reshape(len(y), -1), x.shape)
    return np.array([np.corrcoef(a, b)[0, 1] for a, b in zip(x.T, y.T, strict=True)])


# --- RunningCorrelation


@pytest.mark.parametrize("offset", [0.0, 1e6])
def test_running_correlation_equals_numpy(offset):
    x, noise = normal(500, 7).double() + offset, torch.randn(500, 7, generator=seeded(1))
    y = 0.3 * x + noise
    running = RunningCorrelation((7,))
    for a, b in zip(x, y, strict=True):
        running.update(a, b)
    assert running.count == 500
    np.testing.assert_allclose(running.value(), columnwise(x.numpy(), y.numpy()), atol=1e-9)


def test_constant_elements_have_no_correlation():
    running = RunningCorrelation((2,))
    for t in range(5):
        running.update(torch.tensor([t, 0.1]), torch.tensor([t**2, t]))
    assert running.value().isnan().tolist() == [False, True]


def test_y_may_be_a_scalar():
    running = RunningCorrelation((2,))
    for t in range(4):
        running.update(torch.tensor([t, -t]), torch.tensor(3.0 * t))
    assert running.value().tolist() == pytest.approx([1, -1])


def test_running_correlation_resumes_bit_identically():
    x, y = normal(40, 3), normal(40, 3).flip(0)
    whole, first, second = (RunningCorrelation((3,)) for _ in range(3))
    for a, b in zip(x, y, strict=True):
        whole.update(a, b)
    for a, b in zip(x[:17], y[:17], strict=True):
        first.update(a, b)
    second.load_state_dict(first.state_dict())
    for a, b in zip(x[17:], y[17:], strict=True):
        second.update(a, b)
    assert second.count == whole.count
    assert torch.equal(second.value(), whole.value())


def test_checkpoint_of_another_shape_raises():
    with pytest.raises(ValueError, match=r"\(5, 3\) in the checkpoint and \(5, 4\) here"):
        RunningCorrelation((4,)).load_state_dict(RunningCorrelation((3,)).state_dict())


def test_pearson_of_zero_variance_is_nan():
    assert pearson(*torch.zeros(3, 2)).isnan().all()


# --- CorrelationStudy


def stored(g, before, study):
    """Return every correlation by numpy: (kind, n, β2) → elements."""
    g, squares = g.flatten(1).double().numpy(), torch.cat([before, g]).flatten(1).double().numpy()
    squares, steps, table = squares**2, len(g), {}
    pairs = study.state_dict()["tensors"]
    for n in range(1, study.lags + 1):
        late, early = g[n:], g[: steps - n]
        table["temporal", n, None] = columnwise(late, early)
        table["spatial", n, None] = columnwise(late[:, pairs["i"]], early[:, pairs["j"]])
    for beta2 in study.beta2s:
        v = averaged(squares, beta2)[len(before) :]
        max_v = averaged(squares.max(1), beta2)[len(before) :]
        for n in range(study.lags + 1):
            late = squares[len(before) + n :]
            table["non", n, beta2] = columnwise(late, v[: steps - n])
            table["max", n, beta2] = columnwise(late, max_v[: steps - n])
    return table


def averaged(x, beta2):
    v, history = 0.0, []
    for s in x:
        v = beta2 * v + (1 - beta2) * s
        history.append(v)
    return np.array(history)


def heavy_tailed(steps):
    return normal(steps, *SHAPE) * torch.exp(2 * torch.randn(steps, *SHAPE, generator=seeded(1)))


@pytest.mark.parametrize("warm", [0, 7])
@pytest.mark.parametrize(
    "gradients",
    [
        normal(LAGS + 3, *SHAPE),
        normal(CHUNK_STEPS - 1, *SHAPE),
        normal(CHUNK_STEPS, *SHAPE),
        normal(2 * CHUNK_STEPS + 1, *SHAPE),
        normal(1000, *SHAPE) + 0.5,
        1e-6 * heavy_tailed(600),
    ],
    ids=["short", "31", "32", "65", "offset", "heavy"],
)
def test_study_equals_numpy_on_stored_gradients(gradients, warm):
    study = CorrelationStudy(SHAPE, LAGS, (0.0, 0.5, 0.9, 0.999), pairs=6, generator=seeded())
    before = 3 * gradients[:warm].flip(0)
    for g in before:
        study.warm_up(g)
    for g in gradients:
        study.update(g)
    expected = stored(gradients, before, study)
    rows = study.results()
    assert {(r.kind, r.n, r.beta2) for r in rows} == set(expected)
    for r in rows:
        values = expected[r.kind, r.n, r.beta2]
        assert r.mean == pytest.approx(values.mean(), abs=1e-6), r
        assert r.std == pytest.approx(values.std(), abs=1e-6), r
        assert r.elements == len(values)


def test_calling_results_early_changes_nothing():
    gradients = normal(100, *SHAPE)
    studies = [CorrelationStudy(SHAPE, LAGS, pairs=6, generator=seeded()) for _ in range(2)]
    for g in gradients:
        for study in studies:
            study.update(g)
        studies[1].results()
    for a, b in zip(studies[0].results(), studies[1].results(), strict=True):
        assert a.mean == pytest.approx(b.mean, abs=1e-12)


@pytest.mark.parametrize("saved_after", [1, LAGS, CHUNK_STEPS - 1, CHUNK_STEPS, 70])
def test_study_resumes_bit_identically(saved_after):
    gradients = normal(150, *SHAPE)
    whole, first = (CorrelationStudy(SHAPE, LAGS, generator=seeded()) for _ in range(2))
    second = CorrelationStudy(SHAPE, LAGS, generator=seeded(5))  # the pairs are part of the state
    for study in (whole, first):
        study.warm_up(gradients[0])
    for g in gradients:
        whole.update(g)
    for g in gradients[:saved_after]:
        first.update(g)
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second.load_state_dict(torch.load(file))
    for g in gradients[saved_after:]:
        second.update(g)
    assert second.results() == whole.results()


def test_too_few_steps_and_constant_elements_have_no_correlation():
    study = CorrelationStudy((4,), lags=2, generator=seeded())
    assert all(np.isnan(r.mean) and r.elements == 0 for r in study.results())
    for g in normal(50, 4):
        study.update(torch.cat([g[:2], torch.tensor([0.0, 0.1])]))
    elements = {(r.kind, r.n): r.elements for r in study.results()}
    assert elements["temporal", 1] == elements["non", 1] == elements["max", 1] == 2


@pytest.fixture(scope="module")
def independent():
    """Correlations of 8,590 independent gradients, as many as in the paper, after warm-up."""
    random = seeded()
    study = CorrelationStudy((128,), lags=10, generator=random)
    for _ in range(8000):
        study.warm_up(torch.randn(128, generator=random))
    for _ in range(8590):
        study.update(torch.randn(128, generator=random))
    return {(r.kind, r.n, r.beta2): r for r in study.results()}


@pytest.mark.parametrize(("beta2", "value"), [(0.9, 0.43589), (0.999, 0.04471)])
def test_correlation_of_adam_depends_on_beta2(independent, beta2, value):
    assert independent["non", 0, beta2].mean == pytest.approx(value, abs=0.004)


@pytest.mark.parametrize("n", [1, 10])
def test_correlation_is_positive_as_captioned_and_negative_as_computed(independent, n):
    # v_t contains g_{t-n}² as Adam's v_t contains g_t²: equal except for n steps (erratum E13)
    assert independent["non", 0, 0.999].mean > 0.04
    assert -0.012 < independent["non", n, 0.999].mean < -0.003
    assert abs(independent["non", n, 0.9].mean) < 0.004
    assert abs(independent["max", n, 0.999].mean) < 0.003
    for kind in ("temporal", "spatial"):
        assert abs(independent[kind, n, None].mean) < 0.004
        assert independent[kind, n, None].std == pytest.approx(8590**-0.5, rel=0.2)


def test_v_that_starts_at_0_hides_the_correlation():
    random = seeded()
    study = CorrelationStudy((128,), lags=1, beta2s=[0.999], generator=random)
    for _ in range(8590):
        study.update(torch.randn(128, generator=random))
    means = {r.n: r.mean for r in study.results() if r.kind == "non"}
    assert means[0] == pytest.approx(0.0055, abs=0.003)
    assert means[1] == pytest.approx(-0.0012, abs=0.003)


def test_invalid_input_raises_with_a_fix():
    with pytest.raises(ValueError, match="lags is 0"):
        CorrelationStudy((4,), lags=0)
    with pytest.raises(ValueError, match=r"beta2 is 1\.0"):
        CorrelationStudy((4,), beta2s=[1.0])
    with pytest.raises(ValueError, match="1 elements; a pair"):
        CorrelationStudy((1,))
    study = CorrelationStudy((4,))
    with pytest.raises(ValueError, match=r"shape \(5,\); expected \(4,\)"):
        study.update(torch.zeros(5))
    study.update(torch.zeros(4))
    with pytest.raises(RuntimeError, match=r"after 1 steps.*before the first update"):
        study.warm_up(torch.zeros(4))


def test_pairs_have_different_elements():
    study = CorrelationStudy((2,), pairs=1000, generator=seeded())
    pairs = study.state_dict()["tensors"]
    assert (pairs["i"] != pairs["j"]).all()
