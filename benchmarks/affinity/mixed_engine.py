"""A paced engine of bench `affinity`: engine e0 takes the time of an H800, and all
others that of an H20, as in bench `phases`.
"""

import os

from benchmarks.phases.paced_engine import MODEL, gpu_of
from benchmarks.scheduling.paced_engine import StepPace, serve

if __name__ == "__main__":
    serve(lambda spec: StepPace(gpu_of(spec), MODEL))
    os._exit(0)
