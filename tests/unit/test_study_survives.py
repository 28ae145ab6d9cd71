"""The real command, killed and terminated at random moments; and on local Dask and Ray clusters."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.test_study import source_in

ROOT = Path(__file__).parents[2]


def command(folder: Path, *more: str, jobs: int = 2) -> list[str]:
    return [
        sys.executable, "-m", "preemptbench", "study", "--only-own", "--runs",
        str(folder / "Tiny.parquet"), "--seeds", "4", "--deadline", "3", "--concurrency", "24",
        "--profile", "rtx4090-llama-3.1-8b", "--jobs", str(jobs), "--out", str(folder / "out"),
        *more,
    ]  # fmt: skip


def start(folder: Path, *more: str, jobs: int = 2) -> subprocess.Popen[str]:
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}
    return subprocess.Popen(
        command(folder, *more, jobs=jobs),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, start_new_session=True,
    )  # fmt: skip


def results(folder: Path) -> dict[str, bytes]:
    """Return the bytes of everything that a study of a folder came to, but for the report, which
    holds the command."""
    out = folder / "out"
    files = [p for part in ("sources", "tables") for p in (out / part).rglob("*") if p.is_file()]
    return {str(p.relative_to(out)): p.read_bytes() for p in files if p.suffix != ".tmp"}


def leftovers(folder: Path) -> list[Path]:
    parts = (folder / "out" / part for part in ("sources", "tables"))
    return [path for part in parts for path in part.rglob(".*.tmp")]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("undisturbed")
    source_in(folder)
    process = start(folder)
    _, talk = process.communicate(timeout=240)
    assert process.returncode == 0, talk
    found = results(folder)
    assert sum("/cells/" in name for name in found) == 4
    assert any(name.startswith("tables") for name in found)
    return found


def _stop(process: subprocess.Popen[str], number: int) -> None:
    """Send the signal to the command; then end what it left, which here only this test started."""
    process.send_signal(number)
    process.wait(timeout=60)
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def test_kill_9_at_random_moments_loses_nothing(
    undisturbed: dict[str, bytes], tmp_path: Path
) -> None:
    source_in(tmp_path)
    moments = random.Random(7)
    for _ in range(4):
        process = start(tmp_path)
        time.sleep(moments.uniform(1.0, 6.0))
        before = {n: b for n, b in results(tmp_path).items() if "/cells/" in n}
        _stop(process, signal.SIGKILL)
        after = results(tmp_path)
        assert before.items() <= after.items()
    cells = next(name for name in undisturbed if "/cells/" in name)
    torn = (tmp_path / "out" / cells).with_name(".seed-9.parquet.abcd_123.tmp")
    torn.parent.mkdir(parents=True, exist_ok=True)
    torn.write_bytes(b"half of it")
    process = start(tmp_path)
    _, talk = process.communicate(timeout=240)
    assert process.returncode == 0, talk
    found = results(tmp_path)
    assert {name: found.get(name) for name in undisturbed} == undisturbed
    assert not leftovers(tmp_path)


def test_sigterm_ends_with_a_message_and_what_is_done_stays(
    undisturbed: dict[str, bytes], tmp_path: Path
) -> None:
    source_in(tmp_path)
    process = start(tmp_path)
    limit_s = time.monotonic() + 120
    while not list((tmp_path / "out").rglob("pilot-*.json")) and time.monotonic() < limit_s:
        time.sleep(0.05)
    process.terminate()
    _, talk = process.communicate(timeout=60)
    assert process.returncode == 143, talk
    assert "terminated: what is finished is kept" in talk
    assert "Traceback" not in talk
    process = start(tmp_path)
    process.communicate(timeout=240)
    found = results(tmp_path)
    assert {name: found.get(name) for name in undisturbed} == undisturbed


@pytest.fixture
def dask_address() -> Iterator[str]:
    distributed = pytest.importorskip("distributed", reason="extra cluster is not installed")
    cluster = distributed.LocalCluster(
        n_workers=1, threads_per_worker=1, dashboard_address=None, host="127.0.0.1"
    )
    with cluster:
        yield cluster.scheduler_address


@pytest.fixture
def ray_address() -> Iterator[str]:
    ray = pytest.importorskip("ray", reason="extra cluster is not installed")
    context = ray.init(
        address="local", num_cpus=2, include_dashboard=False, object_store_memory=100_000_000
    )
    yield context.address_info["address"]
    ray.shutdown()


@pytest.mark.cluster
@pytest.mark.parametrize("backend", ["dask", "ray"])
def test_a_running_cluster_gives_the_same_bytes(
    backend: str, undisturbed: dict[str, bytes], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    address = request.getfixturevalue(f"{backend}_address")
    source_in(tmp_path)
    process = start(tmp_path, "--backend", backend, "--address", address, "--task-timeout", "200")
    _, talk = process.communicate(timeout=300)
    assert process.returncode == 0, talk
    assert results(tmp_path) == undisturbed
