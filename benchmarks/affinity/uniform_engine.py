"""A paced engine of bench `affinity` on uniform hardware: each takes the time of an
H800.
"""

import os

from benchmarks.phases.paced_engine import COMPUTE, MODEL
from benchmarks.scheduling.paced_engine import StepPace, serve

if __name__ == "__main__":
    serve(lambda spec: StepPace(COMPUTE, MODEL))
    os._exit(0)
