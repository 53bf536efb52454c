"""What a server refuses before it plans or allocates anything."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvstore_server.admission import EngineConfig
from kvstore_server.engine import Engine
from kvstore_server.errors import ConfigurationError
from kvstore_server.memory import memory_limit
from kvstore_server.protocol import messages as m


def registered(config: EngineConfig, numel: int) -> m.ReplyBody:
    engine = Engine(config)
    hello = m.Hello("job", 0, 1, 0, config.num_servers, "", "host:1", b"", (b"peer",))
    [welcome] = engine.handle(b"peer", m.Request(0, 0, 1, hello), 0.0)
    assert isinstance(welcome.reply.body, m.Welcome)
    register = m.Register("big", (("big", (numel,), "float32", 0, False),), False)
    request = m.Request(welcome.reply.body.run, welcome.reply.body.session, 2, register)
    [answer] = engine.handle(b"peer", request, 0.0)
    return answer.reply.body


def test_a_table_that_does_not_fit_into_memory_is_refused_at_once() -> None:
    answer = registered(EngineConfig(num_servers=2, memory_bytes=1 << 30), 1 << 36)
    assert isinstance(answer, m.Failed)
    assert answer.code == ConfigurationError.__name__
    assert (
        "about 137438953472 for each of 2 servers, but server 0 has 1073741824 bytes of memory" in answer.text
    )


def test_a_table_above_the_limit_is_refused_with_the_flag_that_raises_it() -> None:
    answer = registered(EngineConfig(max_table_bytes=1 << 20), 1 << 19)
    assert isinstance(answer, m.Failed)
    assert "accepts tables of up to 1048576 bytes (--max-table-bytes)" in answer.text


def test_a_table_that_fits_is_taken() -> None:
    assert isinstance(registered(EngineConfig(memory_bytes=1 << 20), 1 << 10), m.Registered)


@pytest.mark.parametrize(("content", "is_bound"), [("1000\n", True), ("max\n", False), (None, False)])
def test_a_containers_limit_counts_where_there_is_one(
    tmp_path: Path, content: str | None, is_bound: bool
) -> None:
    file = tmp_path / "memory.max"
    if content is not None:
        file.write_text(content)
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert memory_limit(file) == (1000 if is_bound else total)
