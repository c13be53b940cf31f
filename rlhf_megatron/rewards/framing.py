"""Messages over a stream socket: eight bytes of length, then the message."""

import socket
import struct

_HEADER = struct.Struct("!Q")
_CHUNK = 1 << 16


def pack(message: bytes) -> bytes:
    """The bytes of one framed message."""
    return _HEADER.pack(len(message)) + message


def send(sock: socket.socket, message: bytes) -> None:
    """Sends one message; blocks until the kernel has taken it."""
    sock.sendall(pack(message))


def receive(sock: socket.socket) -> bytes | None:
    """Receives one message; blocks. None at the end of the stream."""
    header = _receive_exactly(sock, _HEADER.size)
    return None if header is None else _receive_exactly(sock, _HEADER.unpack(header)[0])


def _receive_exactly(sock: socket.socket, size: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < size:
        part = sock.recv(min(_CHUNK, size - len(parts)))
        if not part:
            return None
        parts += part
    return bytes(parts)


class Inbox:
    """Cuts a stream that arrives in arbitrary pieces into messages."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, piece: bytes) -> list[bytes]:
        """Adds received bytes and returns the messages that are now whole."""
        self._bytes += piece
        messages = []
        while len(self._bytes) >= _HEADER.size:
            end = _HEADER.size + _HEADER.unpack_from(self._bytes)[0]
            if len(self._bytes) < end:
                break
            messages.append(bytes(self._bytes[_HEADER.size : end]))
            del self._bytes[:end]
        return messages
