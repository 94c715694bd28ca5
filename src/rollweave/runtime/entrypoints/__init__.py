"""Entry points of the child processes: engine, trainer rank, relay and predictor."""
