"""Keys of a server and of its clients: the files that hold them, and what each client may do.

A directory of keys has these files, of which a process needs some:

    server.secret   the server's key pair                                          hosts of servers
    server.public   the public keys by which clients know it: one, or two while
                    it is replaced                                                 all
    clients.json    name, public key, role, namespaces, ranks, limits and expiry of
                    each client                                                    hosts of servers
    NAME.secret     the key pair of a client                                       hosts where it runs
    dashboard.token what browsers must know to see the page of a job               the host of the page

Keys are those of CurveZMQ (Curve25519), written in Z85. Files with secrets belong to the user, or to root, and nobody
else can read them; nobody else can write to any of the files, or to the directory. What is laxer is refused, with the
file and the remedy in the message.

zmq is imported where it is used, because launchers do without it.

Invariant: a file appears whole or not at all, and keys that exist are never overwritten.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import secrets
import stat
import tempfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import date, datetime, timezone
from enum import Enum
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

from kvstore_server.errors import ConfigurationError

_log = logging.getLogger(__name__)

KEYS = "KVSTORE_KEYS"
"""The directory of keys; empty: there are none."""
KEY_NAME = "KVSTORE_KEY_NAME"
"""Which client's key to use, if the directory has those of several."""
OFF = "off"
"""As the directory: no keys, even where a launcher would make some."""
SERVER_SECRET, SERVER_PUBLIC, CLIENTS = "server.secret", "server.public", "clients.json"
TOKEN = "dashboard.token"
"""The file with what a browser has to know to see the page of a job, where other hosts can reach it."""
JOB_PREFIX, JOB_SERVERS = "kvtrainer-keys-", "servers"
"""What the names of directories begin with that launchers make, and the file in it with the servers' addresses."""
MAX_CLIENTS = 10_000
_MAX_FILE = 4 << 20
_KEY = re.compile(r"[0-9A-Za-z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_FIELDS = "name", "public", "role", "namespaces", "ranks", "limits", "expires"
"""What `clients.json` may say of a client."""
_PREFERRED = "worker", "admin", "observer"
"""Of several clients' keys, the first of these that is there is used."""


class Role(Enum):
    """What a client may ask for; see `kvstore_server.access`."""

    WORKER = "worker"
    OBSERVER = "observer"
    ADMIN = "admin"


class KeyPair(NamedTuple):
    """Z85, 40 bytes each."""

    public: bytes
    secret: bytes

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.public.decode()}>"  # the secret appears in no log


@dataclass(frozen=True)
class ClientLimits:
    """How much of one server a client may use; infinity: there is no limit.

    Args:
        connections: At a time. A worker has two for each process, or more.
        sessions: At a time; one for each worker process and store.
        namespaces: In which it has sessions, at a time.
        memory: Bytes of the tables in namespaces that it was the first to join.
        requests: Messages a second.
        bytes: Bytes of messages and replies a second.
        time: Seconds a second in which the server handles its messages; a share, 0.5 for example.
    """

    connections: float = math.inf
    sessions: float = math.inf
    namespaces: float = math.inf
    memory: float = math.inf
    requests: float = math.inf
    bytes: float = math.inf
    time: float = math.inf


_MOST = 1 << 62
"""The largest limit that can be given."""
LIMITS = tuple(ClientLimits.__dataclass_fields__)
NO_LIMITS = ClientLimits()


@dataclass(frozen=True)
class KeyHolder:
    """A client of a server.

    Args:
        namespaces: Patterns for `fnmatch` of the jobs that a worker may take part in.
        ranks: The ranks that it may have; None: any.
        expires: The first day, in UTC, on which it is not known any more; None: it stays.
    """

    name: str
    public: bytes
    role: Role
    namespaces: tuple[str, ...] = ("*",)
    ranks: frozenset[int] | None = None
    limits: ClientLimits = NO_LIMITS
    expires: date | None = None

    def may_join(self, namespace: str) -> bool:
        job = namespace.partition("/")[0]
        return any(fnmatchcase(job, pattern) for pattern in self.namespaces)


@dataclass(frozen=True)
class ServerKeys:
    """What a server needs: its key pair, and where its clients are listed."""

    pair: KeyPair
    directory: Path

    def clients(self) -> dict[bytes, KeyHolder]:
        """Read the clients, by public key. Raises ConfigurationError."""
        return read_clients(self.directory)


@dataclass(frozen=True)
class ClientKeys:
    """What a client needs: its key pair, and the public keys that a server may have."""

    name: str
    pair: KeyPair
    servers: tuple[bytes, ...]


# ---------------------------------------------------------------- reading


def read_server_keys(directory: str) -> ServerKeys:
    """Read what a server needs. Raises ConfigurationError, which names the file and the remedy."""
    folder = _check_folder(directory)
    keys = ServerKeys(_read_pair(folder / SERVER_SECRET), folder)
    keys.clients()
    return keys


def read_client_keys(directory: str, name: str = "", preferred: Iterable[str] = _PREFERRED) -> ClientKeys:
    """Read what a client needs.

    Args:
        name: Whose key it uses; empty: the first of `preferred` that is there, or the only one.

    Raises:
        ConfigurationError: A file is missing, too lax or damaged; the message names it and the remedy.
    """
    folder = _check_folder(directory)
    public = _read(folder / SERVER_PUBLIC, is_secret=False).split()
    if not 1 <= len(public) <= 2 or not all(map(_KEY.fullmatch, public)):
        raise ConfigurationError(
            f"{folder / SERVER_PUBLIC} does not have one or two public keys of a server; copy it again from where "
            "kvstore-server keygen wrote it"
        )
    if not name:
        there = [path.stem for path in sorted(folder.glob("*.secret")) if path.name != SERVER_SECRET]
        name = next((one for one in preferred if one in there), there[0] if len(there) == 1 else "")
        if not name:
            raise ConfigurationError(
                f"{directory} has the keys of {', '.join(there) or 'no client'}; say which one to use with {KEY_NAME}"
                if there
                else f"{directory} has no key of a client; make one with kvstore-server keygen, and copy NAME.secret"
            )
    check_key_name(name)
    return ClientKeys(name, _read_pair(folder / f"{name}.secret"), tuple(one.encode() for one in public))


def client_keys_from_env(
    environ: Mapping[str, str], preferred: Iterable[str] = _PREFERRED
) -> ClientKeys | None:
    """Return the keys that KVSTORE_KEYS and KVSTORE_KEY_NAME name; None without them. Raises ConfigurationError."""
    directory = environ.get(KEYS, "").strip()
    if not directory or directory == OFF:
        return None
    return read_client_keys(directory, environ.get(KEY_NAME, "").strip(), preferred)


def read_token(directory: str) -> str:
    """Return the token of the page of a job. Raises ConfigurationError."""
    folder = _check_folder(directory)
    token = _read(folder / TOKEN, is_secret=True).strip()
    if not 16 <= len(token) <= 256:
        raise ConfigurationError(
            f"{folder / TOKEN} has no token; remove it, and call kvstore-server keygen again"
        )
    return token


def find_job_keys(servers: Iterable[str]) -> str:
    """Return the directory of keys that a launcher of this user has made for the job with these servers, or "".

    So who may read the keys of a job need not name them to look at it.
    """
    wanted = set(servers)
    for place in dict.fromkeys(("/dev/shm", tempfile.gettempdir())):
        for folder in sorted(Path(place).glob(f"{JOB_PREFIX}*")):
            with suppress(OSError, ValueError, ConfigurationError):
                _check_folder(str(folder))
                if wanted and wanted <= set(_read(folder / JOB_SERVERS, is_secret=True).split()):
                    return str(folder)
    return ""


def read_clients(directory: Path) -> dict[bytes, KeyHolder]:
    """Read the clients of a server, by public key. Raises ConfigurationError."""
    path = directory / CLIENTS
    text = _read(path, is_secret=False)
    try:
        listed = json.loads(text)
        if not isinstance(listed, list) or len(listed) > MAX_CLIENTS:
            raise ValueError(f"it is not a list of at most {MAX_CLIENTS} clients")
        clients = [_client_of(one) for one in listed]
        names = [one.name for one in clients]
        if len({one.public for one in clients}) < len(clients) or len(set(names)) < len(names):
            raise ValueError("a name or a public key stands twice")
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ConfigurationError(
            f"{path} does not list clients: {error}; correct it, or make it again with kvstore-server keygen"
        ) from None
    return {one.public: one for one in clients}


def _client_of(listed: Any) -> KeyHolder:
    if not isinstance(listed, dict) or set(listed) - set(_FIELDS):
        raise ValueError(f"{listed!r:.80} is not an object of {', '.join(_FIELDS)}")
    name, public, role = (listed.get(key, "") for key in ("name", "public", "role"))
    if not all(isinstance(one, str) for one in (name, public, role)) or not _KEY.fullmatch(public):
        raise ValueError(f"client {name!r:.70} has no public key of 40 characters")
    patterns, ranks = listed.get("namespaces", ["*"]), listed.get("ranks")
    if not isinstance(patterns, list) or not all(isinstance(one, str) for one in patterns):
        raise ValueError(f"the namespaces of {name!r:.70} are not a list of patterns")
    if ranks is not None and not (isinstance(ranks, list) and all(type(one) is int for one in ranks)):
        raise ValueError(f"the ranks of {name!r:.70} are not a list of numbers")
    if _NAME.fullmatch(name) is None:
        raise ValueError(f"{name!r:.70} is no name")
    if role not in [one.value for one in Role]:
        raise ValueError(f"the role of {name!r} is {role!r:.40}, and not worker, observer or admin")
    limits = listed.get("limits", {})
    if not isinstance(limits, dict):
        raise ValueError(f"the limits of {name!r} are not an object")
    allowed = None if ranks is None else frozenset(ranks)
    expires = listed.get("expires")
    return KeyHolder(
        name,
        public.encode(),
        Role(role),
        tuple(patterns),
        allowed,
        make_limits(limits),
        None if expires is None else parse_date(expires),
    )


def parse_date(text: object) -> date:
    """Return the day that a text like 2027-03-01 names. Raises ValueError."""
    if not isinstance(text, str) or re.fullmatch(r"[0-9]{4}-[0-9]{2}-[0-9]{2}", text) is None:
        raise ValueError(f"{text!r:.40} is not a day like 2027-03-01")
    return date.fromisoformat(text)


def today() -> date:
    """Return the present day in UTC."""
    return datetime.now(timezone.utc).date()


def make_limits(values: Mapping[str, object]) -> ClientLimits:
    """Return limits, each a positive number. Raises ValueError."""
    for name, value in values.items():
        if name not in LIMITS:
            raise ValueError(f"{name!r:.40} is no limit; there are {', '.join(LIMITS)}")
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not 0 < value <= _MOST:  # type: ignore[operator]
            raise ValueError(f"the limit {name} is {value!r:.40}, and not a positive number")
    return ClientLimits(**values)  # type: ignore[arg-type]


def _check_folder(directory: str) -> Path:
    folder = Path(directory)
    try:
        found = folder.stat()
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"the directory of keys cannot be used: {error}") from None
    if not stat.S_ISDIR(found.st_mode):
        raise ConfigurationError(f"{directory} is not a directory of keys")
    # In a directory with the sticky bit, as Kubernetes mounts secrets, nobody can replace what belongs to others.
    is_sticky = found.st_mode & stat.S_ISVTX and found.st_uid == 0
    if found.st_uid not in (os.geteuid(), 0) or (found.st_mode & 0o022 and not is_sticky):
        raise ConfigurationError(
            f"others may write to {directory} (owner {found.st_uid}, mode {found.st_mode & 0o7777:04o}), and so "
            f"replace keys; it must belong to user {os.geteuid()}, with mode 0700: chmod 700 {directory}"
        )
    return folder


def _read(path: Path, is_secret: bool) -> str:
    """Read a file of keys, whose owner and mode are checked on the open file."""
    try:
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
            data = file.read(_MAX_FILE + 1)
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"a file of keys cannot be read: {error}; make keys with kvstore-server keygen, and copy what this "
            "host needs"
        ) from None
    lax = found.st_mode & (0o077 if is_secret else 0o022)
    # Kubernetes gives secrets to the group of a container that does not run as root.
    of_our_group = (
        found.st_uid == 0 != os.geteuid()
        and lax == stat.S_IRGRP
        and found.st_gid in (os.getegid(), *os.getgroups())
    )
    if found.st_uid not in (os.geteuid(), 0) or (lax and not of_our_group):
        what = "read or replace" if is_secret else "replace"
        raise ConfigurationError(
            f"others can {what} {path} (owner {found.st_uid}, mode {found.st_mode & 0o7777:04o}); it must belong to "
            f"user {os.geteuid()}, with mode 0600: chmod 600 {path}. If somebody may have read it, make new keys"
        )
    try:
        if not stat.S_ISREG(found.st_mode) or len(data) > _MAX_FILE:
            raise ValueError("it is too long, or no file")
        return data.decode("ascii")
    except ValueError as error:
        raise ConfigurationError(f"{path} is not a file of keys: {error}") from None


def _read_pair(path: Path) -> KeyPair:
    words = _read(path, is_secret=True).split()
    expires = words.pop() if len(words) == 3 else None
    if len(words) != 2 or not all(map(_KEY.fullmatch, words)):
        raise ConfigurationError(
            f"{path} does not have a public and a secret key; make keys again with kvstore-server keygen"
        )
    pair = KeyPair(*[word.encode() for word in words])
    import zmq

    try:
        is_over = expires is not None and parse_date(expires) <= today()
    except ValueError as error:
        raise ConfigurationError(f"{path}: {error}; copy the file again, or make new keys") from None
    if is_over:
        raise ConfigurationError(
            f"the key in {path} has expired on {expires}; get a new one: where {CLIENTS} is, remove this client from "
            "it, remove its file, and call kvstore-server keygen again"
        )
    with suppress(zmq.ZMQError, ValueError):
        if zmq.curve_public(pair.secret) == pair.public:
            return pair
    raise ConfigurationError(
        f"the two keys in {path} do not belong together; copy the file again, or make new keys"
    )


# ---------------------------------------------------------------- making


def check_key_name(name: str) -> None:
    """Raise ConfigurationError unless a text can be the name of a client."""
    if _NAME.fullmatch(name) is None or name == "server":
        raise ConfigurationError(
            f"{name!r:.70} cannot be the name of a client: 1 to 64 letters, digits, dots, dashes and underscores, and "
            "not 'server'"
        )


def make_pair() -> KeyPair:
    """Return a new key pair. Raises ConfigurationError if libzmq has no CURVE."""
    import zmq

    check_curve()
    return KeyPair(*zmq.curve_keypair())


def check_curve() -> None:
    """Raise ConfigurationError if this libzmq cannot encrypt, or is older than 4.3.5."""
    import zmq

    if not zmq.has("curve"):
        raise ConfigurationError(
            "keys need a libzmq with CURVE, and this one has been built without it; install pyzmq's wheel from PyPI"
        )
    if zmq.zmq_version_info() < (4, 3, 5):
        raise ConfigurationError(
            f"keys need libzmq 4.3.5 or newer, which can keep unknown clients from blocking a server; this is "
            f"{zmq.zmq_version()}"
        )


def make_keys(directory: Path, clients: Iterable[KeyHolder]) -> list[str]:
    """Make the keys of a server, unless they are there, and those of clients; `public` of these is set here.

    The directory is made with mode 0700 if it does not exist.

    Returns:
        The names of the clients that are new; those that exist stay as they are.

    Raises:
        ConfigurationError: A name is not valid, or the directory cannot be used or written.
    """
    wanted = list(clients)
    for one in wanted:
        check_key_name(one.name)
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_folder(str(directory))
        if not (directory / SERVER_SECRET).exists():
            pair = make_pair()
            _write(directory / SERVER_SECRET, _text_of(pair))
            _write(directory / SERVER_PUBLIC, f"{pair.public.decode()}\n", 0o644)
        if not (directory / TOKEN).exists():
            _write(directory / TOKEN, f"{secrets.token_urlsafe(24)}\n")
        known = read_clients(directory) if (directory / CLIENTS).exists() else {}
        names = {one.name for one in known.values()}
        new = [one for one in wanted if one.name not in names]
        listed = list(known.values())
        for one in new:
            pair = make_pair()
            _write(directory / f"{one.name}.secret", _text_of(pair, one.expires))
            listed.append(replace(one, public=pair.public))
        if new or not known:
            _write(directory / CLIENTS, json.dumps(list(map(_as_json, listed)), indent=1) + "\n", 0o644)
    except OSError as error:
        raise ConfigurationError(
            f"keys cannot be written: {error}; make room there, or name a directory that you may write to"
        ) from None
    return [one.name for one in new]


def rotate_server_key(directory: Path) -> bool:
    """Replace the key of a server in two steps, between which clients accept both keys.

    The first call makes the next key, and lists its public key beside the present one in `server.public`, which is then
    copied to all clients. The second one lets servers use it from their next start on.

    Returns:
        True if a next key was made, False if it has become the present one.

    Raises:
        ConfigurationError: The directory has no keys, or cannot be written.
    """
    coming = directory / "server.next"
    present = read_server_keys(str(directory)).pair
    try:
        listed = (directory / SERVER_PUBLIC).read_text(encoding="ascii").split()
        if not coming.exists() or _read_pair(coming).public.decode() not in listed:
            pair = make_pair()
            _write(coming, _text_of(pair))
            _write(directory / SERVER_PUBLIC, f"{present.public.decode()}\n{pair.public.decode()}\n", 0o644)
            return True
        pair = _read_pair(coming)
        # The former one stays until the next call, for servers that are yet to be started again.
        coming.replace(directory / SERVER_SECRET)
        _write(directory / SERVER_PUBLIC, f"{pair.public.decode()}\n{present.public.decode()}\n", 0o644)
        return False
    except OSError as error:
        raise ConfigurationError(
            f"keys cannot be written: {error}; make room there, or name a directory that you may write to"
        ) from None


def _as_json(client: KeyHolder) -> dict[str, Any]:
    listed: dict[str, Any] = {
        "name": client.name,
        "public": client.public.decode(),
        "role": client.role.value,
        "namespaces": list(client.namespaces),
    }
    if client.ranks is not None:
        listed["ranks"] = sorted(client.ranks)
    if client.limits != NO_LIMITS:
        listed["limits"] = {name: value for name, value in asdict(client.limits).items() if value < math.inf}
    if client.expires is not None:
        listed["expires"] = client.expires.isoformat()
    return listed


def _text_of(pair: KeyPair, expires: date | None = None) -> str:
    last = "" if expires is None else f"{expires.isoformat()}\n"
    return f"{pair.public.decode()}\n{pair.secret.decode()}\n{last}"


def _write(path: Path, text: str, mode: int = 0o600) -> None:
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with open(fd, "w", encoding="ascii") as file:
            os.fchmod(fd, mode)
            file.write(text)
            file.flush()
            os.fsync(fd)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


# ---------------------------------------------------------------- the server's view


class ClientTable:
    """The clients of a running server; `refresh` reads them again when their file has changed, or a day begins.

    So a key is given or taken away without a restart. A file that cannot be used changes nothing, and is logged.
    """

    def __init__(self, keys: ServerKeys, today: Callable[[], date] = today) -> None:
        """Raises ConfigurationError if the file cannot be used."""
        self._path, self._today = keys.directory / CLIENTS, today
        self._stamp = self._read_stamp()
        self.by_key: dict[bytes, KeyHolder] = {}
        """Those that have not expired."""
        self._set(keys.clients())

    def _set(self, listed: dict[bytes, KeyHolder]) -> None:
        self._listed, self._day = listed, self._today()
        self.by_key = {
            key: one for key, one in listed.items() if one.expires is None or self._day < one.expires
        }
        for key in listed.keys() - self.by_key.keys():
            _log.warning("the key of client %r has expired on %s", listed[key].name, listed[key].expires)

    def refresh(self) -> None:
        """Read the file again if it has changed, and leave out who has expired since. Never raises."""
        stamp = self._read_stamp()
        if stamp == self._stamp:
            if self._day != self._today():
                self._set(self._listed)
            return
        self._stamp = stamp
        try:
            self._set(read_clients(self._path.parent))
        except ConfigurationError as error:
            _log.error("the clients stay as they were: %s", error)
        else:
            _log.info("read %s again: %d clients", self._path, len(self.by_key))

    def _read_stamp(self) -> tuple[int, int, int]:
        try:
            found = self._path.stat()
        except OSError:
            return 0, 0, 0
        return found.st_ino, found.st_mtime_ns, found.st_size
