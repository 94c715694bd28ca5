"""Bench `coserve`: a serving engine that lends its slack to a training run."""
