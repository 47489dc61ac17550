"""What the benchmarks compute by themselves."""

from __future__ import annotations

from benchmarks.broker import make_group, raw_bytes
from benchmarks.fleet import RATE, Versions, saturation
from common.trajectory import VersionRun


def test_versions_of_a_response_follow_the_changes_under_it() -> None:
    versions = Versions()
    versions.since, versions.versions = [0.0, 10.0, 11.0, 30.0], [0, 1, 2, 3]
    assert versions.runs(5.0, 15.0, 100) == (VersionRun(0, 0), VersionRun(1, 50), VersionRun(2, 60))
    assert versions.runs(11.0, 12.0, 7) == (VersionRun(2, 0),)
    assert versions.runs(5.0, 15.0, 1) == (VersionRun(0, 0),)  # a change between two tokens that it does not have


def test_saturation_is_where_all_larger_fleets_are_below_linear() -> None:
    def points(*shares: float) -> list[dict[str, float]]:
        return [{"generators": 2**i, "groups_per_s": share * RATE * 2**i} for i, share in enumerate(shares)]

    assert saturation(points(1, 0.8, 1, 0.95)) is None  # one noisy point is no saturation
    assert saturation(points(1, 0.8, 1, 0.85, 0.5)) == 8
    assert saturation(points(0.5, 0.4)) == 1


def test_group_of_the_benchmark_has_32_kib_of_tokens_and_logprobs() -> None:
    assert raw_bytes(make_group("0", 8, 512)) == 32 * 1024 + 128 * 4
