"""A relay whose files may have `FILE_BYTES` bytes at most: `python -m tests.live.small_relay`."""

import os
import resource

from rollweave.live.relay_process import main

if __name__ == "__main__":
    limit = int(os.environ["FILE_BYTES"])
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    main()
    os._exit(0)
