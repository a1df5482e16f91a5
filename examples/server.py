"""A language model behind an ASGI app that gives its GPU memory back while nobody asks, and answers the next request with it again.

    python server.py                                        # asks itself, falls asleep, is asked again: the same answer
    python server.py --idle 30 --port 8000                  # serves (needs uvicorn); or: uvicorn server:app
    curl -d '{"prompt": "hello"}' localhost:8000/generate   # the first request after an idle time brings the memory back
    curl -X POST localhost:8000/sleep; curl localhost:8000/is_sleeping; curl -X POST localhost:8000/wake_up

The weights are random, so the answers are noise, but the same noise every time: what comes back is what left. The process, its CUDA
context and every address stay; only the memory goes. --layers and --width make the model larger.
"""

import argparse
import asyncio
import json
import sys
import time

try:
    import torch
    import transformers
except ImportError as error:
    sys.exit(f"server.py needs torch 2.0 or later with CUDA, and transformers: pip install torch transformers ({error})")

import glake

GIB = 1 << 30


class Model:
    """A GPT-2 of any size with random weights, which reads and writes bytes. Its weights are a sealed region: they leave once, and a copy
    stays in host memory, so that the next time they leave without a copy."""

    def __init__(self, layers: int, width: int) -> None:
        torch.manual_seed(0)
        shape = transformers.GPT2Config(vocab_size=256, n_positions=512, n_embd=width, n_layer=layers, n_head=width // 64)
        with glake.region("weights", policy="sealed", host_copy="retain"), torch.device("cuda"):
            self.network = transformers.GPT2LMHeadModel(shape).to(torch.bfloat16).eval().requires_grad_(False)
        glake.trim()
        glake.seal("weights")

    @torch.inference_mode()
    def answer(self, prompt: str, tokens: int) -> str:
        """Returns the most likely continuation of the prompt, byte by byte. Its allocations are freed when it returns."""
        ids = torch.tensor([list(prompt.encode()[-256:] or b" ")], device="cuda")
        done = self.network.generate(ids, max_new_tokens=tokens, do_sample=False, pad_token_id=0, attention_mask=torch.ones_like(ids))
        return bytes(done[0, ids.shape[1] :].tolist()).decode("latin-1")


class Server:
    """The ASGI app. Requests are active; without one for `idle` seconds everything leaves the GPU."""

    def __init__(self, model: Model, idle: float) -> None:
        self.model, self.idle = model, idle
        self.asked = time.monotonic()
        self.one_at_a_time = asyncio.Lock()
        self.watch: asyncio.Task[None] | None = None

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] == "lifespan":
            await self.lifespan(receive, send)
        elif scope["type"] == "http":
            await self.http(scope, receive, send)

    async def lifespan(self, receive, send) -> None:
        while True:
            message = await receive()
            if message["type"] == "lifespan.startup":
                self.watch = asyncio.create_task(self.sleep_when_idle())
            elif self.watch is not None:
                self.watch.cancel()
            await send({"type": f"{message['type']}.complete"})
            if message["type"] == "lifespan.shutdown":
                return

    async def http(self, scope, receive, send) -> None:
        asked = scope["method"], scope["path"]
        try:
            if asked == ("POST", "/generate"):
                answer = await self.generate(json.loads(await body(receive) or b"{}"))
            elif asked == ("POST", "/sleep"):
                answer = await self.sleep()
            elif asked == ("POST", "/wake_up"):
                answer = await asyncio.to_thread(glake.refill)
            elif asked == ("GET", "/is_sleeping"):
                answer = {"is_sleeping": any(region["evicted"] for region in glake.regions())}
            else:
                await reply(send, 404, {"error": f"no {asked[1]} here: POST /generate, /sleep, /wake_up or GET /is_sleeping"})
                return
        except (ValueError, TypeError, KeyError) as error:
            await reply(send, 400, {"error": f'{error}: write {{"prompt": "text", "tokens": 32}}'})
            return
        except glake.Error as error:
            await reply(send, 503, {"error": str(error)})
            return
        await reply(send, 200, answer)

    async def generate(self, wanted: dict) -> dict:
        prompt, tokens = str(wanted["prompt"]), min(int(wanted.get("tokens", 32)), 256)
        async with self.one_at_a_time:
            try:
                return {"text": await asyncio.to_thread(self.model.answer, prompt, tokens)}
            finally:
                self.asked = time.monotonic()

    async def sleep(self) -> dict:
        # What the last answer used is free by now, and need not be kept.
        await asyncio.to_thread(glake.trim)
        return await asyncio.to_thread(glake.shrink)

    async def sleep_when_idle(self) -> None:
        while True:
            await asyncio.sleep(max(0.1, self.asked + self.idle - time.monotonic()))
            awake = any(region["resident"] for region in glake.regions())
            if awake and time.monotonic() - self.asked >= self.idle and not self.one_at_a_time.locked():
                try:
                    report = await self.sleep()
                except glake.Error as error:
                    print(f"not asleep: {error}", file=sys.stderr)
                    self.asked = time.monotonic()
                    continue
                print(f"idle: {report['freed'] / GIB:.2f} GiB given back in {report['seconds'] * 1000:.0f} ms", file=sys.stderr)


async def body(receive) -> bytes:
    parts = []
    while True:
        message = await receive()
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(parts)


async def reply(send, status: int, answer: dict) -> None:
    text = json.dumps(answer).encode() + b"\n"
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(text)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": text})


async def ask(app, method: str, path: str, wanted: dict | None = None) -> dict:
    """Sends one request to an app in this process."""
    sent, request = [], [{"type": "http.request", "body": json.dumps(wanted or {}).encode()}]

    async def receive():
        return request.pop()

    async def send(message):
        sent.append(message)

    await app({"type": "http", "method": method, "path": path, "headers": []}, receive, send)
    answer = json.loads(b"".join(message.get("body", b"") for message in sent[1:]))
    if sent[0]["status"] != 200:
        raise RuntimeError(f"{method} {path}: {sent[0]['status']} {answer}")
    return answer


async def rehearse(app, times: int) -> None:
    """Asks, sleeps, asks again; ends the program with an error where an answer differs."""
    question = {"prompt": "The memory of a GPU", "tokens": 32}
    await ask(app, "POST", "/generate", question)

    async def asked() -> tuple[dict, float]:
        begin = time.perf_counter()
        return await ask(app, "POST", "/generate", question), time.perf_counter() - begin

    first, awake = await asked()
    print(f"awake   {used():6.2f} GiB on the GPU   answered in {awake * 1000:7.1f} ms")
    for _ in range(times):
        report = await ask(app, "POST", "/sleep")
        print(
            f"asleep  {used():6.2f} GiB on the GPU   after {report['seconds'] * 1000:10.1f} ms, "
            f"{report['freed'] / GIB:.2f} GiB given back, {report['copied'] / GIB:.2f} GiB copied"
        )
        again, took = await asked()
        print(f"awake   {used():6.2f} GiB on the GPU   answered in {took * 1000:7.1f} ms")
        if again != first:
            sys.exit(f"the answer changed: {first} became {again}")
    print("the same answer every time")


def used() -> float:
    free, total = torch.cuda.mem_get_info()
    return (total - free) / GIB


def made(layers: int, width: int, idle: float):
    try:
        glake.enable("serverless")
    except glake.Error as error:
        sys.exit(f"server.py needs an NVIDIA GPU with its driver and a CUDA build of torch: {error}")
    return glake.asgi.Gate(Server(Model(layers, width), idle))


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--layers", type=int, default=24)
    arguments.add_argument("--width", type=int, default=2048, help="a multiple of 64")
    arguments.add_argument("--idle", type=float, default=10.0, help="seconds without a request before the memory goes")
    arguments.add_argument("--port", type=int, help="serve there, with uvicorn, instead of asking itself")
    arguments.add_argument("--times", type=int, default=3, help="how often it falls asleep where it asks itself")
    chosen = arguments.parse_args()
    app = made(chosen.layers, chosen.width, chosen.idle)
    if chosen.port is None:
        asyncio.run(rehearse(app, chosen.times))
        return
    try:
        import uvicorn
    except ImportError:
        sys.exit("server.py --port needs uvicorn: pip install uvicorn")
    uvicorn.run(app, port=chosen.port)


if __name__ == "__main__":
    main()
elif __name__ == "server":
    app = made(24, 2048, 10.0)
