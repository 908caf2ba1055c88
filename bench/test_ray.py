"""The bench of Ray, in small: each part runs, and counts what it says. On a cluster of two nodes."""

import pytest

from bench import ray, raychanges
from bench.raymodel import SLEEPS
from bench.raynodes import Nodes
from bench.rounds import Plan

pytest.importorskip("ray", reason="the ray environment has it")

PLAN = Plan(rounds=1, seconds=0.2)


def test_throughput(ray_nodes: Nodes) -> None:
    (lines,) = ray.throughput(ray_nodes, PLAN, [SLEEPS]).values()
    assert len(lines) == 4
    for line in lines:
        (run,) = line.rounds
        assert run.rate > 0
        assert min(run.server, run.instances) > 0
    assert "goal 0.8" in "\n".join(ray.throughput_lines(lines))


def test_a_node_is_killed(ray_nodes: Nodes) -> None:
    (loss,) = raychanges.losses(ray_nodes, 1, PLAN.seconds)
    assert 1 <= len(loss.failed) <= raychanges.IN_ACTOR
    assert (loss.lost, loss.hung, loss.twice) == (0, 0, 0)
    assert loss.meanwhile > 0
    assert "0 calls lost that were not in the actor, goal 0; 0 hung, goal 0" in "\n".join(
        raychanges.loss_lines([loss])
    )


def test_a_burst(ray_nodes: Nodes) -> None:
    burst = raychanges.burst(ray_nodes, back=False)
    assert burst.failed == []
    assert burst.answered > 0
    assert "0 failed calls, goal 0" in "\n".join(raychanges.burst_lines(burst))


def test_hop(ray_nodes: Nodes) -> None:
    """Last, because of what Ray Serve leaves on the nodes."""
    measured = ray.hop(ray_nodes, PLAN, [64])
    assert list(measured) == ["thread", "process", "ray", ray.SERVE]
    assert all(0 < found[0][0].p50 <= found[0][0].p99 for found in measured.values())
    assert ray.SERVE in "\n".join(ray.hop_lines(measured, [64]))
