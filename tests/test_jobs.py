"""Work spread over processes, and over Dask and Ray clusters that are started for real."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import whatif
from tests.helpers import need
from whatif import WhatifError, load_transform
from whatif.graph.columns import TASK_COLUMNS
from whatif.ingest.ranks.read import read_ranks
from whatif.prediction.baseline import Baseline
from whatif.questions.sweep import parse_vary, sweep
from whatif.runtime.jobs import Jobs, each


def times(number: int, factor: int) -> int:
    return number * factor


def process(_: int) -> int:
    time.sleep(0.2)  # long enough that the other worker takes one as well
    return os.getpid()


@pytest.mark.parametrize(
    ("spelled", "meant"),
    [
        (1, Jobs()),
        ("4", Jobs(4)),
        ("dask", Jobs(1, "dask")),
        ("dask:tcp://host:8786", Jobs(1, "dask", "tcp://host:8786")),
        ("ray:host:6379", Jobs(1, "ray", "host:6379")),
    ],
)
def test_what_jobs_means(spelled: str | int, meant: Jobs) -> None:
    assert Jobs.of(spelled) == meant
    assert meant.here == (spelled == 1)


def test_order_and_processes() -> None:
    need("joblib")
    assert list(each(times, range(5), 3)) == [0, 3, 6, 9, 12]
    assert list(each(times, range(5), 3, jobs=2)) == [0, 3, 6, 9, 12]
    assert os.getpid() not in set(each(process, range(2), jobs=2))


def here(_: int) -> str:
    time.sleep(0.2)
    return os.getcwd()


def test_processes_work_in_the_folder_of_each_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of an earlier call are used again, and did not find the files of a relative path."""
    need("joblib")
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        assert set(each(here, range(2), jobs=2)) == {str(Path.cwd())}
    (tmp_path / "second").rmdir()
    assert list(each(times, range(2), 3, jobs=2)) == [0, 3]


def test_a_missing_package_and_a_silent_cluster_are_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    need("joblib")
    need("ray")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and nobody listens
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(WhatifError, match=f"--jobs ray:{address}: expected a cluster that answers"):
            list(each(times, range(2), 1, jobs=f"ray:{address}"))

    def refusing(**_: object) -> None:
        raise ConnectionError("Failed to connect")  # as Ray does where it asks for a token

    ray = need("ray")
    monkeypatch.setattr(ray, "init", refusing)
    with pytest.raises(WhatifError, match="or name its address, or set RAY_AUTH_MODE"):
        list(each(times, range(2), 1, jobs="ray"))

    def missing(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr("whatif.runtime.jobs.importlib.import_module", missing)
    with pytest.raises(WhatifError, match="--jobs 2 needs the package joblib, which is not installed"):
        list(each(times, range(2), 1, jobs=2))


@pytest.fixture(scope="module", params=["dask", "ray"])
def cluster(request: pytest.FixtureRequest) -> Iterator[str]:
    """What --jobs takes for a cluster of two worker processes on this machine."""
    need("joblib")
    if request.param == "dask":
        distributed = need("distributed")
        with distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None
        ) as started:
            yield f"dask:{started.scheduler_address}"
        return
    ray = need("ray")
    here = {"PYTHONPATH": str(Path(__file__).resolve().parent.parent)}  # workers load this file
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": here})
    yield "ray"
    ray.shutdown()


@pytest.mark.slow
def test_a_cluster_of_two_workers_gives_the_same(cluster: str, own_traces: Path) -> None:
    workers = set(each(process, range(8), jobs=cluster))
    assert len(workers) == 2
    assert os.getpid() not in workers
    baseline = Baseline.of(whatif.read(own_traces / "resnet18_cifar_cpu.json.gz"))
    transforms = [load_transform("distributed")]
    varied = [parse_vary("bucket_mb=1,4", transforms)]
    assert sweep(baseline, transforms, varied, jobs=cluster).points == sweep(baseline, transforms, varied).points
    run = own_traces / "ranks_cpu" / "even"
    there, here = read_ranks([run], jobs=cluster), read_ranks([run], jobs=1)
    assert there.numbers == here.numbers == (0, 1)
    assert all((getattr(there.graph, c) == getattr(here.graph, c)).all() for c in TASK_COLUMNS)
