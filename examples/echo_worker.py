"""A worker that echoes: a port, weights in GPU memory, and neither torch nor a GPU needed, for trying `glake serve` on simulated GPUs.

    python echo_worker.py --port 8001 --weights 2GiB --name chat    # joins the agent of GLAKE_AGENT, or this user's
    curl -d "hello" localhost:8001                                  # the answer, and how long the memory took to come back

Each request uses the weights: all of their bytes are compared with what they were, wherever they have been in between.
"""

import argparse
import ctypes
import hashlib
import http.server
import os
import re
import signal
import sys
import time

import glake

BLOCK = 16 << 20
UNITS = {"MiB": 1 << 20, "GiB": 1 << 30}


def size(text: str) -> int:
    found = re.fullmatch(r"(\d+)(MiB|GiB)", text)
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} is no size: write 512MiB or 2GiB")
    return int(found[1]) * UNITS[found[2]]


class Block:
    """A block of the GPU's memory, as copies take it."""

    def __init__(self) -> None:
        self.address = glake.allocate(BLOCK)
        self.__cuda_array_interface__ = {"data": (self.address, False), "shape": (BLOCK,), "typestr": "|u1", "version": 3}


class Weights:
    """Blocks with bytes of the worker's own in a sealed region: the second time that they leave the GPU, nothing is copied."""

    def __init__(self, name: str, bytes: int) -> None:
        self.content = hashlib.shake_128(name.encode()).digest(4096) * (BLOCK // 4096)
        with glake.region("weights", policy="sealed", host_copy="retain"):
            self.blocks = [Block() for _ in range(-(-bytes // BLOCK))]
        for block in self.blocks:
            glake.copy_(block, self.content, wait=True)
        glake.seal("weights")

    def are_intact(self) -> bool:
        found = bytearray(BLOCK)
        for block in self.blocks:
            glake.copy_(found, block, wait=True)
            if ctypes.string_at((ctypes.c_char * BLOCK).from_buffer(found), BLOCK) != self.content:
                return False
            glake.safepoint()  # another worker may have the memory here
        return True


class Echo(http.server.BaseHTTPRequestHandler):
    """Answers each body with itself, once the weights were used."""

    weights: Weights

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        begun = time.monotonic()
        with glake.active("weights"):
            waited = time.monotonic() - begun
            is_intact = self.weights.are_intact()
        text = body + f"\nwaited {waited:.3f} s for the memory, weights {'intact' if is_intact else 'CHANGED'}\n".encode()
        self.send_response(200 if is_intact else 500)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_arguments: object) -> None:
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description="A worker that echoes, for trying glake serve without a GPU.")
    parser.add_argument("--host", default=os.environ.get("ECHO_HOST", "127.0.0.1"), help="address to listen on (default: ECHO_HOST, else 127.0.0.1)")
    parser.add_argument("--port", type=int, default=8001, help="port to listen on (default: %(default)s)")
    parser.add_argument("--weights", type=size, default="1GiB", help="GPU memory to hold (default: %(default)s)")
    parser.add_argument("--name", help="name at the agent (default: that of GLAKE_WORKER)")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with http.server.ThreadingHTTPServer((options.host, options.port), Echo) as server:
        Echo.weights = Weights(options.name or f"port {options.port}", options.weights)
        try:
            glake.join(options.name)
        except glake.UnavailableError as error:
            print(f"echo_worker.py serves without an agent: {error}", flush=True)
        print(f"listening on http://{options.host}:{server.server_port}", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            pass


if __name__ == "__main__":
    main()
