"""A TCP proxy that understands ZeroMQ's framing, so that it can lose, double and delay whole messages.

One side looks like the server to clients; what they send is parsed (ZMTP 3, no encryption) into messages: a message is
a run of frames whose last one has no MORE flag; commands (PING and the like) pass untouched. Everything keeps its
order. The wire carries, after a greeting of 64 bytes, per frame: flags (1 = MORE, 2 = LONG, 4 = COMMAND), size in one
byte or (LONG) eight big-endian bytes, payload.
"""

import asyncio
import random
import threading
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass

_GREETING_BYTES = 64
_MORE, _LONG, _COMMAND = 1, 2, 4


@dataclass
class Toxics:
    """What happens to messages, both ways. `stalled`: nothing passes, as when a cable is out."""

    drop: float = 0.0
    duplicate: float = 0.0
    delay_s: float = 0.0
    stalled: bool = False


class ToxicProxy:
    """Listens on a free loopback port (`address`) and forwards to `upstream_port`; set `toxics` at any time."""

    def __init__(self, upstream_port: int, *, seed: int = 0) -> None:
        self.toxics = Toxics()
        self.num_dropped = 0
        self.num_duplicated = 0
        self._upstream_port = upstream_port
        self._random = random.Random(seed)
        self._writers: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="toxic proxy", daemon=True)
        self._thread.start()
        self._server = self._in_loop(asyncio.start_server(self._serve, "127.0.0.1", 0)).result(5.0)
        self.port = int(self._server.sockets[0].getsockname()[1])
        self.address = f"tcp://127.0.0.1:{self.port}"

    def cut(self) -> None:
        """Break every connection; what is in flight is lost. New ones are let in at once."""
        self._loop.call_soon_threadsafe(self._abort_all)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._server.close)
        self.cut()
        self._in_loop(self._cancel_all()).result(5.0)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _in_loop(self, coroutine) -> "Future":  # type: ignore[no-untyped-def,type-arg]
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def _abort_all(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    async def _cancel_all(self) -> None:
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        upstream: asyncio.StreamWriter | None = None
        try:
            # A stalled network answers no connection attempt either: the upstream is reached once it passes again.
            await self._until_it_passes()
            up_reader, upstream = await asyncio.open_connection("127.0.0.1", self._upstream_port)
            self._writers.add(upstream)
            pumps = [asyncio.ensure_future(self._pump(*ends)) for ends in ((reader, upstream), (up_reader, writer))]
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
        except OSError:
            return
        finally:
            for end in (writer, upstream):
                if end is not None:
                    self._writers.discard(end)
                    end.transport.abort()

    async def _until_it_passes(self) -> None:
        while self.toxics.stalled:
            await asyncio.sleep(0.02)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, asyncio.IncompleteReadError):
            await _pass_greeting(reader, writer)
            while True:
                message, is_command = await _message(reader)
                toxics = self.toxics
                copies = 1 if is_command else self._copies(toxics)
                if toxics.delay_s:
                    await asyncio.sleep(toxics.delay_s)
                await self._until_it_passes()
                for _ in range(copies):
                    writer.write(message)
                await writer.drain()

    def _copies(self, toxics: Toxics) -> int:
        fate = self._random.random()
        if fate < toxics.drop:
            self.num_dropped += 1
            return 0
        if fate < toxics.drop + toxics.duplicate:
            self.num_duplicated += 1
            return 2
        return 1


async def _pass_greeting(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Each side sends its greeting in pieces and waits for the other's between them, so pieces pass as they come."""
    missing = _GREETING_BYTES
    while missing:
        piece = await reader.read(missing)
        if not piece:
            raise asyncio.IncompleteReadError(piece, missing)
        writer.write(piece)
        missing -= len(piece)


async def _message(reader: asyncio.StreamReader) -> tuple[bytes, bool]:
    """All bytes of the next message, and whether it is a command."""
    parts: list[bytes] = []
    while True:
        flags = await reader.readexactly(1)
        size = await reader.readexactly(8 if flags[0] & _LONG else 1)
        parts += [flags, size, await reader.readexactly(int.from_bytes(size, "big"))]
        if not flags[0] & _MORE:
            return b"".join(parts), bool(flags[0] & _COMMAND)
