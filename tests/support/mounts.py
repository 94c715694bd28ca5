"""The user's right to mount file systems."""

import subprocess


def can_mount() -> bool:
    """Return whether this user may mount a tmpfs in a separate namespace."""
    try:
        mount = ["unshare", "-Urm", "mount", "-t", "tmpfs", "none", "/mnt"]
        return subprocess.run(mount, capture_output=True, check=False).returncode == 0
    except OSError:
        return False
