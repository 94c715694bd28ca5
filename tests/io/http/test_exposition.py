"""Metrics have Prometheus' text format."""

from rollweave.io.http.exposition import Sample, exposition


def test_the_samples_of_a_metric_stand_together() -> None:
    samples = [
        Sample("gauge", "busy_slots", 2.0, {"engine": 'a"\\\n', "kind": "x"}),
        Sample("histogram", "wait_s_bucket", 3, {"le": "0.5"}),
        Sample("counter", "steps", 1e20),
        Sample("gauge", "busy_slots", 0.5),
        Sample("histogram", "wait_s_sum", float("inf")),
    ]
    assert exposition(samples).splitlines() == [
        "# TYPE rollweave_busy_slots gauge",
        'rollweave_busy_slots{engine="a\\"\\\\\\n",kind="x"} 2',
        "rollweave_busy_slots 0.5",
        "# TYPE rollweave_wait_s histogram",
        'rollweave_wait_s_bucket{le="0.5"} 3',
        "rollweave_wait_s_sum inf",
        "# TYPE rollweave_steps counter",
        "rollweave_steps 1e+20",
    ]
    assert exposition([]) == ""
