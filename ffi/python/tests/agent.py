"""The agent's end of the socket, for tests: frames in, frames out."""

import json
import os
import pathlib
import socket
import struct
import tempfile
import time

LONG = 60


class Agent:
    """An agent that listens, and serves one worker at a time."""

    def __init__(self):
        self._folder = tempfile.TemporaryDirectory()
        self.path = str(pathlib.Path(self._folder.name, "agent.sock"))
        self.listen()

    def listen(self):
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(self.path)
        self._listener.listen(8)
        self._listener.settimeout(LONG)

    def accept(self):
        """Waits for a worker and returns its hello."""
        self.worker, _ = self._listener.accept()
        self.worker.settimeout(LONG)
        self._bytes, self.sent, self.received = b"", 0, 0
        frame = self.read()
        assert frame["op"] == "hello" and frame["seq"] == 0, frame
        return frame

    def welcome(self, epoch=1, wait=False):
        hello = self.accept()
        self.send({"v": 1, "seq": 0, "ack": 0, "op": "welcome", "epoch": epoch, "received": 0, "worker": 1, "wait": wait})
        return hello

    def read(self):
        while len(self._bytes) < 4 or len(self._bytes) < 4 + struct.unpack("<I", self._bytes[:4])[0]:
            # The activity page comes with the first bytes.
            more, descriptors, _, _ = socket.recv_fds(self.worker, 65536, 4)
            for descriptor in descriptors:
                os.close(descriptor)
            if not more:
                raise EOFError("the worker has closed the connection")
            self._bytes += more
        length = 4 + struct.unpack("<I", self._bytes[:4])[0]
        frame, self._bytes = json.loads(self._bytes[4:length]), self._bytes[length:]
        self.received = max(self.received, frame["seq"])
        return frame

    def hear(self, op):
        """Returns the next message of this kind, skipping others."""
        end = time.monotonic() + LONG
        while time.monotonic() < end:
            frame = self.read()
            if frame["op"] == op:
                return frame
        raise AssertionError(f"{op} never came")

    def send(self, frame):
        body = json.dumps(frame).encode()
        self.worker.sendall(struct.pack("<I", len(body)) + body)

    def say(self, op, **fields):
        self.sent += 1
        self.send({"v": 1, "seq": self.sent, "ack": self.received, "op": op, **fields})

    def close(self):
        self.worker.close()
        self._listener.close()
        os.unlink(self.path)
