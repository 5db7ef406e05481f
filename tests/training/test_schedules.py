import pytest

from collab_compress.training import SCHEDULES


@pytest.mark.parametrize(
    ("name", "points"),
    [
        # (progress, value) read off figure 2 of "Scheduled DropHead", with warmup a tenth of training and p = 0.2
        ("constant", [(0.0, 0.2), (0.05, 0.2), (0.5, 0.2), (1.0, 0.2)]),
        ("curriculum", [(0.0, 0.0), (0.25, 0.05), (0.5, 0.1), (1.0, 0.2)]),
        ("anti-curriculum", [(0.0, 0.2), (0.25, 0.15), (0.5, 0.1), (1.0, 0.0)]),
        ("scheduled", [(0.0, 0.2), (0.05, 0.1), (0.1, 0.0), (0.55, 0.1), (1.0, 0.2)]),
    ],
)
def test_points_of_the_figure(name, points):
    for progress, value in points:
        assert 0.2 * SCHEDULES[name](progress, 0.1) == pytest.approx(value)


@pytest.mark.parametrize("name", sorted(SCHEDULES))
@pytest.mark.parametrize("warmup", [0.0, 0.06, 0.99])
def test_values_stay_between_zero_and_one(name, warmup):
    for step in range(101):
        assert 0 <= SCHEDULES[name](step / 100, warmup) <= 1
