"""No downloaded file can execute code, and no secret is written to disk."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LOADERS = {"pickle", "cPickle", "dill", "joblib", "cloudpickle", "shelve", "marshal"}
SECRETS = {
    "WANDB_API_KEY": "0123456789abcdef0123456789abcdef01234567",
    "AWS_SECRET_ACCESS_KEY": "hush-this-is-the-cloud",
    "GITHUB_TOKEN": "ghp_hushThisIsTheForge",
    "DATABASE_URL": "postgres://user:hush-password@host/db",
}


def called(node):
    """The dotted name of the called function."""
    return ast.unparse(node.func) if isinstance(node, ast.Call) else ""


def dangers(source):
    """Calls that let a file execute code."""
    for node in ast.walk(ast.parse(source)):
        name, words = called(node), {}
        if isinstance(node, ast.Call):
            words = {k.arg: ast.unparse(k.value) for k in node.keywords}
        module, _, last = name.rpartition(".")
        if last in ("load", "loads", "Unpickler") and module in LOADERS:
            yield name
        if name == "torch.load" and words.get("weights_only") != "True":
            yield name
        if name == "np.load" and words.get("allow_pickle") != "False":
            yield name
        if module == "yaml" and last.startswith(("load", "full_load", "unsafe_load")):
            yield name
        if last in ("extractall", "extract", "unpack_archive", "read_pickle"):
            yield name
        if name in ("eval", "exec", "os.system", "os.popen") or words.get("shell") == "True":
            yield name


def test_no_file_can_execute_code():
    ours = [(ROOT / folder).rglob("*.py") for folder in ("adashift", "experiments", ".ci")]
    paths = [ROOT / "run.py", *(path for folder in ours for path in folder)]
    found = {path: list(dangers(path.read_text())) for path in paths}
    assert {path: calls for path, calls in found.items() if calls} == {}
    assert len(found) > 40


@pytest.mark.parametrize(
    "line",
    [
        "pickle.load(f)", "torch.load(f)", "torch.load(f, weights_only=False)", "np.load(f)",
        "yaml.load(f)", "tar.extractall()", "os.system('x')", "subprocess.run(x, shell=True)",
        "pd.read_pickle(f)", "eval(x)",
    ],
)  # fmt: skip
def test_a_dangerous_call_is_found(line):
    assert len(list(dangers(line))) == 1


def test_every_data_file_has_a_checksum():
    """test_data.py shows that downloads are verified; this, that each has an MD5 or SHA-256."""
    from experiments.data import cifar10, mnist, tiny_imagenet, translation
    from experiments.data.files import FileSet

    modules = (cifar10, mnist, tiny_imagenet, translation)
    sets = [v for m in modules for v in vars(m).values() if isinstance(v, FileSet)]
    assert len(sets) >= 5
    for checksum in [c for files in sets for c in files.checksums.values()]:
        assert re.fullmatch(r"md5:[0-9a-f]{32}|sha256:[0-9a-f]{64}", checksum)


def test_no_secret_from_the_environment_is_written(tmp_path, monkeypatch, capfd):
    from experiments.config.compose import compose
    from experiments.records.run import Run
    from experiments.training.execute import execute

    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    names = ["experiment=counterexample_stochastic", "optimizer=adam", "scale=smoke"]
    run = Run(compose([*names, "tracking=offline", f"results={tmp_path}"]))
    assert execute(run, announce=print) == "finished"
    paths = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert any(path.suffix == ".wandb" for path in paths)
    written = b"".join(path.read_bytes() for path in paths) + "".join(capfd.readouterr()).encode()
    assert b"counterexample_stochastic" in written
    for value in SECRETS.values():
        assert value.encode() not in written
    assert b"git@" not in written and b"remote" not in run.folder.joinpath("run.json").read_bytes()


def test_the_docker_image_does_not_run_as_root():
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    (user,) = [line.split()[1] for line in lines if line.startswith("USER")]
    assert user not in ("root", "0")
    assert not any(re.search(r"(KEY|TOKEN|PASSWORD|SECRET)=", line) for line in lines)


CLEAN = '{"name": "x", "version": "1", "vulns": []}'
UNKNOWN = '{"name": "x", "skip_reason": "not found"}'
BAD = '{"name": "x", "version": "1", "vulns": [{"id": "GHSA-1"}]}'


@pytest.mark.parametrize(
    ("script", "status", "words"),
    [
        (f"echo '{{\"dependencies\": [{CLEAN}, {UNKNOWN}]}}' > $OUT", 0, "no known vulnerability"),
        (f"echo '{{\"dependencies\": [{UNKNOWN}]}}' > $OUT", 0, "none of 1 packages could be"),
        ("echo 'no route to host' >&2; exit 1", 0, "could not run: no route to host"),
        (f"echo '{{\"dependencies\": [{CLEAN}, {BAD}]}}' > $OUT; exit 1", 1, "x 1: GHSA-1"),
    ],
)
def test_the_audit_fails_on_vulnerabilities_and_passes_without_a_network(
    tmp_path, script, status, words
):
    tool = tmp_path / "pip-audit"
    tool.write_text(f'#!/bin/sh\nwhile [ "$1" != "-o" ]; do shift; done; OUT=$2\n{script}\n')
    tool.chmod(0o755)
    command = [sys.executable, str(ROOT / ".ci/audit.py"), str(tool)]
    answer = subprocess.run(command, capture_output=True, text=True)
    assert answer.returncode == status and words in answer.stdout, answer.stderr


def test_the_audit_passes_without_its_tool(tmp_path):
    command = [sys.executable, str(ROOT / ".ci/audit.py"), str(tmp_path / "pip-audit")]
    answer = subprocess.run(command, capture_output=True, text=True)
    assert answer.returncode == 0 and "the audit could not run" in answer.stdout
