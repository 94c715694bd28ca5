"""A relay that may write at most `FILE_BYTES` bytes to a file: `python -m
tests.runtime.small_relay`.
"""

import os
import resource

from rollweave.runtime.entrypoints.relay import main

if __name__ == "__main__":
    limit = int(os.environ["FILE_BYTES"])
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    main()
    os._exit(0)
