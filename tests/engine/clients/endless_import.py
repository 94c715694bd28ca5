"""A child process whose imports never end."""

import signal

print("importing", flush=True)
signal.pause()
