"""Tasks on a real Ray cluster: every result, replaced workers, and refusal of nodes that differ."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster_tasks import broken, dies, dies_once, doubled, who

from edgekit.common import ray_map as cluster
from edgekit.common.ray_map import results_on_ray
from edgekit.errors import EdgekitError, InvalidInput, TargetMissing


def test_missing_ray_names_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    with pytest.raises(TargetMissing, match="edgekit\\[ray\\]"):
        next(results_on_ray("local", (tmp_path,), doubled, [1]))


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("127.0.0.1:1", "no connection to"),
        ("ray://127.0.0.1:1", "no connection to"),
        ("host", "HOST:PORT"),
        ("host:port", "HOST:PORT"),
        ("host:99999", "HOST:PORT"),
    ],
    ids=str,
)
def test_an_address_without_a_cluster_is_refused_at_once(tmp_path: Path, address: str, said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        next(results_on_ray(address, (tmp_path,), doubled, [1]))


def test_a_folder_that_a_node_does_not_see_is_named(tmp_path: Path) -> None:
    (tmp_path / "seen").touch()
    ours, missing = cluster.check_marks([tmp_path / "seen", tmp_path / "unseen"])
    assert missing == [tmp_path / "unseen"] and ours


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A cluster of three nodes, each with two workers, on this machine."""
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    known = {"num_cpus": 2, "object_store_memory": 80 << 20}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[1] / "helpers"))
        patch.setenv("EDGEKIT_HOME", str(tmp_path_factory.mktemp("home")))
        nodes = Cluster(initialize_head=True, head_node_args={**known, "include_dashboard": False})
        try:
            for _ in range(2):
                nodes.add_node(**known)
            yield str(nodes.address)
        finally:
            nodes.shutdown()


@pytest.mark.slow
class TestCluster:
    """With Ray itself."""

    def test_tasks_spread_over_nodes_and_each_comes_back_once(self, address: str, tmp_path: Path) -> None:
        found = dict(results_on_ray(address, (tmp_path,), who, list(range(12))))
        assert sorted(found) == list(range(12))
        tasks, processes, nodes = zip(*found.values(), strict=True)  # type: ignore[arg-type]
        assert tasks == tuple(found) and os.getpid() not in processes
        assert len(set(processes)) > 2 and len(set(nodes)) > 1
        assert list(tmp_path.iterdir()) == []

    def test_refusals_are_returned_and_bugs_are_raised(self, address: str, tmp_path: Path) -> None:
        found = dict(results_on_ray(address, (tmp_path,), doubled, [1, 3]))
        assert found[0] == 2 and isinstance(found[1], EdgekitError) and "10 bytes are needed" in str(found[1])
        with pytest.raises(ZeroDivisionError):
            list(results_on_ray(address, (tmp_path,), broken, [1]))

    def test_a_lost_worker_is_replaced_and_a_repeated_loss_is_an_error(self, address: str, tmp_path: Path) -> None:
        assert list(results_on_ray(address, (tmp_path,), dies_once, [tmp_path / "mark"])) == [(0, "alive")]
        ((_, lost),) = results_on_ray(address, (tmp_path,), dies, [1])
        assert isinstance(lost, EdgekitError) and "its worker was lost 3 times" in str(lost)
