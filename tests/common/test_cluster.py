"""Tasks on a real Ray cluster: ordered results, replaced workers, and refusal of nodes that differ."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster_tasks import broken, dies, dies_once, doubled, who

from edgekit.common import ray_map as cluster
from edgekit.common.progress import no_progress
from edgekit.common.ray_map import executor_of
from edgekit.errors import EdgekitError, InvalidInput, TargetMissing


def test_missing_ray_names_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    with pytest.raises(TargetMissing, match="edgekit\\[ray\\]"), executor_of("local", (tmp_path,)):
        raise AssertionError


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
    with pytest.raises(InvalidInput, match=said), executor_of(address, (tmp_path,)):
        raise AssertionError


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

    def test_tasks_spread_over_nodes_and_come_back_in_order(self, address: str, tmp_path: Path) -> None:
        told: list[tuple[int, int]] = []
        with executor_of(address, (tmp_path,)) as fan:
            found = fan(who, list(range(12)), lambda done, total, _: told.append((done, total)))
        tasks, processes, nodes = zip(*found, strict=True)  # type: ignore[arg-type]
        assert tasks == tuple(range(12)) and os.getpid() not in processes
        assert len(set(processes)) > 2 and len(set(nodes)) > 1
        assert told[0] == (0, 12) and told[-1] == (12, 12)
        assert list(tmp_path.iterdir()) == []

    def test_refusals_are_returned_and_bugs_are_raised(self, address: str, tmp_path: Path) -> None:
        with executor_of(address, (tmp_path,)) as fan:
            found = fan(doubled, [1, 3], no_progress)
            assert found[0] == 2 and isinstance(found[1], EdgekitError) and "10 bytes are needed" in str(found[1])
            with pytest.raises(ZeroDivisionError):
                fan(broken, [1], no_progress)

    def test_a_lost_worker_is_replaced_and_a_repeated_loss_is_an_error(self, address: str, tmp_path: Path) -> None:
        with executor_of(address, (tmp_path,)) as fan:
            assert fan(dies_once, [tmp_path / "mark"], no_progress) == ["alive"]
            (lost,) = fan(dies, [1], no_progress)
            assert isinstance(lost, EdgekitError) and "its worker was lost 3 times" in str(lost)
