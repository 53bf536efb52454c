"""The keys of one job, which its launcher makes: servers accept no other client, and all traffic is encrypted.

They lie in a directory in memory that only this user can read, and are gone with the job: the launcher removes it, or
its guardian if the launcher is killed. On other hosts the files come through standard input, so that no list of
processes shows them.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from kvstore_server.errors import ConfigurationError
from kvstore_server.keys import (
    CLIENTS,
    JOB_SERVERS,
    KEY_NAME,
    KEYS,
    OFF,
    SERVER_PUBLIC,
    SERVER_SECRET,
    KeyHolder,
    Role,
    make_keys,
    read_client_keys,
    read_server_keys,
)
from kvtrainer.jobs.guardian import MARK, make_keys_directory

_MAX_SENT = 48 << 10
"""Bytes of files that are sent to a host: with what JSON adds they fit into a pipe, so the launcher never waits."""
_JOB = "job"
"""The name of the client that all processes of a job are."""


class JobKeys:
    """A directory of keys, given or made for one job.

    Args:
        environ: Names the directory, unless it comes from the launcher of a job that this one is started in; where
            none is given, one is made.
        given: A directory, which counts in place of the variable; "off": there are no keys.

    Raises:
        ConfigurationError: A directory that is given has not the keys of a server and of a client, or is not safe.
    """

    def __init__(self, environ: Mapping[str, str], given: str = "") -> None:
        if not given and not environ.get(MARK):
            given = environ.get(KEYS, "").strip()
        self.directory = "" if given == OFF else given
        self.is_own = not given
        if self.is_own:
            try:
                self.directory = make_keys_directory({})
            except OSError as error:
                raise ConfigurationError(
                    f"no directory for the keys of the job can be made: {error}; make room in /dev/shm or the "
                    f"temporary directory, or name a directory of keys ({KEYS})"
                ) from None
            make_keys(Path(self.directory), [KeyHolder(_JOB, b"", Role.ADMIN)])
        if self.directory:
            read_server_keys(self.directory)
            name = "" if self.is_own else environ.get(KEY_NAME, "")
            self._name = read_client_keys(self.directory, name).name

    @property
    def environment(self) -> dict[str, str]:
        """The variables with which processes of this host find the keys."""
        return {KEYS: self.directory, KEY_NAME: self._name} if self.directory else {KEYS: OFF}

    def files_for(self, is_server: bool) -> dict[str, str]:
        """Return the files that a process on another host needs: name → text. Raises ConfigurationError."""
        if not self.directory:
            return {}
        names = [SERVER_PUBLIC, f"{self._name}.secret", *([SERVER_SECRET, CLIENTS] if is_server else [])]
        files = {name: Path(self.directory, name).read_text(encoding="ascii") for name in names}
        nbytes = sum(map(len, files.values()))
        if nbytes > _MAX_SENT:
            raise ConfigurationError(
                f"the keys in {self.directory} have {nbytes} bytes, and up to {_MAX_SENT} are sent to another host; "
                f"list fewer clients in {CLIENTS}, or leave --keys out"
            )
        return files

    def note_servers(self, servers: Sequence[str]) -> None:
        """Note where the servers of the job listen, so that the keys are found by `find_job_keys`."""
        if self.is_own:
            path = Path(self.directory, JOB_SERVERS)
            path.touch(0o600)
            path.write_text("\n".join(servers), encoding="ascii")

    def close(self) -> None:
        if self.is_own:
            shutil.rmtree(self.directory, ignore_errors=True)
