"""Limits on the files that this process may have open."""

from __future__ import annotations

import errno
import os
import resource
from contextlib import suppress

from kvstore_server.errors import ConfigurationError


def allow_descriptors() -> None:
    """Raise this process's limit on open files (1024 by default) as far as it may."""
    with suppress(ValueError, OSError):  # a system may report no limit and still have one
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def check_descriptors(needed: int, what: str) -> None:
    """Raise ConfigurationError unless `needed` more files may be opened for `what`."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        num_open = len(os.listdir("/proc/self/fd"))
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            return  # unknown on this system
        num_open = limit
    if limit != resource.RLIM_INFINITY and num_open + needed > limit:
        raise too_many_descriptors_error(
            f"{what} opens about {needed} files, and this process has {num_open} of {limit} open"
        )


def too_many_descriptors_error(what: str) -> ConfigurationError:
    return ConfigurationError(
        f"{what}; raise the limit (ulimit -Hn, LimitNOFILE=), or close files that are not used"
    )
