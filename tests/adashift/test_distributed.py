"""Two gloo processes give the result of one, and distributed checkpoints are complete."""

import copy
import time
from datetime import timedelta
from math import inf

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.state_dict as dcp_state
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from adashift import AdaShift

PHIS = ["max", "mean", "none"]
SHARDED = {phi: dict(phi=phi) for phi in (*PHIS, "row")}
SHARDED |= {name: {name: True} for name in ("foreach", "fused", "capturable")}
SHARDED["foreach row"] = dict(foreach=True, phi="row")
SHARDED |= {"endless": dict(n=2, m=inf, betas=(0.05, 0.999)), "m=1": dict(m=1)}
WORLD, STEPS, SAVED, LIMIT = 2, 12, 5, 60

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not dist.is_gloo_available(), reason="torch without gloo"),
]


def build(shard=None, **options):
    """A net whose last bias has one element, so that the second process has an empty shard."""
    torch.manual_seed(0)
    layers = torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1)
    net = torch.nn.Sequential(*layers).double()
    if shard is not None:
        fully_shard(net, mesh=shard)
    return net, AdaShift(net.parameters(), **{"lr": 0.05, "n": 2, **options})


def train(net, opt, steps, rank=None):
    """Train on whole batches, or on the part of one process."""
    for t in steps:
        generator = torch.Generator().manual_seed(t)
        x, y = (torch.randn(8, k, generator=generator, dtype=torch.float64) for k in (6, 1))
        if rank is not None:
            x, y = x.chunk(WORLD)[rank], y.chunk(WORLD)[rank]
        opt.zero_grad()
        ((net(x) - y) ** 2).mean().backward()
        opt.step()
    return [getattr(p, "full_tensor", lambda p=p: p)().detach().clone() for p in net.parameters()]


def states(net, opt, flat=False):
    options = dcp_state.StateDictOptions(flatten_optimizer_state_dict=flat)
    return {
        "net": dcp_state.get_model_state_dict(net),
        "opt": dcp_state.get_optimizer_state_dict(net, opt, options=options),
    }


def load(net, opt, saved, flat=False):
    options = dcp_state.StateDictOptions(flatten_optimizer_state_dict=flat)
    dcp_state.set_model_state_dict(net, saved["net"])
    dcp_state.set_optimizer_state_dict(net, opt, saved["opt"], options=options)


def ddp(rank, mesh, folder, name):
    net, opt = build(**SHARDED[name])
    return train(DistributedDataParallel(net), opt, range(STEPS), rank)


def fsdp(rank, mesh, folder, name):
    return train(*build(shard=mesh, **SHARDED[name]), range(STEPS), rank)


def fsdp_resumed(rank, mesh, folder, name):
    net, opt = build(shard=mesh, **SHARDED[name])
    train(net, opt, range(SAVED), rank)
    dcp.save(states(net, opt), checkpoint_id=folder / f"checkpoint-{name}")
    net, opt = build(shard=mesh, **SHARDED[name])
    saved = states(net, opt)
    dcp.load(saved, checkpoint_id=folder / f"checkpoint-{name}")
    load(net, opt, saved)
    return train(net, opt, range(SAVED, STEPS), rank)


JOBS = [(ddp, phi) for phi in PHIS]
JOBS += [(job, name) for job in (fsdp, fsdp_resumed) for name in SHARDED]


def work(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'store'}",  # a port could be in use by another test
        rank=rank,
        world_size=WORLD,
        timeout=timedelta(seconds=LIMIT),
    )
    mesh = init_device_mesh("cpu", (WORLD,))
    results = {f"{job.__name__}-{name}": job(rank, mesh, folder, name) for job, name in JOBS}
    torch.save(results, folder / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The parameters of each process after each job."""
    folder = tmp_path_factory.mktemp("gloo")
    context = mp.spawn(work, args=(folder,), nprocs=WORLD, join=False)
    end = time.monotonic() + LIMIT
    try:
        while not context.join(timeout=1):
            assert time.monotonic() < end, f"the processes did not finish within {LIMIT} s"
    finally:
        for process in context.processes:
            process.kill()
    return [torch.load(folder / f"{rank}.pt") for rank in range(WORLD)]


def alone(name):
    start = train(*build(**SHARDED[name]), [])
    end = train(*build(**SHARDED[name]), range(STEPS))
    assert all((a != b).all() for a, b in zip(start, end, strict=True))
    return end


@pytest.mark.parametrize("phi", PHIS)
def test_ddp_equals_one_process(trained, phi):
    for results in trained:
        torch.testing.assert_close(results[f"ddp-{phi}"], alone(phi), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", SHARDED)
def test_fsdp_equals_one_process(trained, name):
    """φ reduces over the whole parameter, not over the local shard."""
    for results in trained:
        torch.testing.assert_close(results[f"fsdp-{name}"], alone(name), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", SHARDED)
def test_sharded_checkpoint_resumes_bit_identically(trained, name):
    for results in trained:
        one, other = results[f"fsdp_resumed-{name}"], results[f"fsdp-{name}"]
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


OPTIONS = [dict(n=1), dict(n=3), dict(n=3, m=1), dict(n=4, m=2), dict(n=3, phi="none")]


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_distributed_state_dict_resumes_bit_identically(options, steps):
    net, opt = build(**options)
    train(net, opt, range(steps))
    saved = copy.deepcopy(states(net, opt))
    resumed = build(**options)
    load(*resumed, saved)
    one, other = (train(*pair, range(steps, 12)) for pair in ((net, opt), resumed))
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_checkpoint_on_disk_resumes_bit_identically(options, flat, tmp_path):
    """DCP loads only keys that a new optimizer has after one step, so all must exist."""
    for steps in (1, 2, 3, 4, 8):
        net, opt = build(**options)
        train(net, opt, range(steps))
        dcp.save(states(net, opt, flat), checkpoint_id=tmp_path / str(steps), no_dist=True)
        resumed = build(**options)
        saved = states(*resumed, flat)
        dcp.load(saved, checkpoint_id=tmp_path / str(steps), no_dist=True)
        load(*resumed, saved, flat)
        one, other = (train(*pair, range(steps, 12)) for pair in ((net, opt), resumed))
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True)), steps
