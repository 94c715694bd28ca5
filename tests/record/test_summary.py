"""The lines of a summary that people read."""

from rollweave.record.summary import weights_line


def test_the_line_on_new_weights_names_stops_and_transfers() -> None:
    counted = {"updates": 0, "transfer_s": 0.0, "stopped_s": 0.0}
    assert weights_line(counted) == ""
    counted = {"updates": 12, "transfer_s": 3.5, "stopped_s": 0.25}
    text = "12 updates of engines, which stopped for 0.25 s; 3.50 s of transfer into engines"
    assert weights_line(counted) == text
    counted |= {"fetch_s": 2.0, "fetched_bytes": 0}
    assert weights_line(counted) == f"{text}, 2.00 s into relays"
    counted["fetched_bytes"] = 4_200_000
    assert weights_line(counted) == f"{text}, 2.00 s into relays (4.2 MB between hosts)"
