"""`glass serve` under load, over real sockets, compared with llama.cpp's servers on the same file.

Rows: tokens a second of many clients over one at a time, and the time to the first token; the same
load on llama.cpp's servers (the wheel's, where `xllamacpp` is installed, and one built for this
machine, which `--llama-server` names); answers with the same seed alone and batched; bad requests;
clients that vanish, read slowly or say nothing; memory after many short requests. `--gguf` takes a
file instead of the 25 M model that is made here; `--part` runs some.
`--device cuda` serves a model of Qwen2.5-0.5B's shape in bfloat16 to 256 clients (`--clients`,
`--new`, `--temperature`) in four processes, and prints their tokens a second.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from bench.clock import Row, installed, said
from bench.generate import HALF_BILLION, MEDIUM, TINY

SHAPES = {"0.5B": HALF_BILLION, "25M": MEDIUM, "tiny": TINY}
#: Processes that the clients of `--device` are spread over.
PROCESSES = 4
#: Crowds of idle connections, one after another: the first ones warm up.
CROWDS = 8
#: Tokens of context that each client of llama.cpp's servers has.
LLAMA_CONTEXT = 256
#: Short requests that one connection carries.
ON_ONE_CONNECTION = 100
PARTS = ("throughput", "company", "bad", "leaving", "short")
ROOT = Path(__file__).parents[1]
WORDS = [
    "the",
    "model",
    "reads",
    "a",
    "text",
    "and",
    "predicts",
    "what",
    "follows",
    "it",
    "token",
    "by",
    "token",
    "in",
    "order",
]
#: A program that serves a file by llama.cpp, and prints its address.
LLAMA = """
import sys, time
import xllamacpp
params = xllamacpp.CommonParams()
params.model.path = sys.argv[1]
params.n_parallel, params.n_ctx = int(sys.argv[2]), int(sys.argv[2]) * int(sys.argv[3])
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = int(sys.argv[4])
params.n_threads_http, params.warmup, params.port = 8, True, 0
params.verbosity = 0
params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_ENABLED
server = xllamacpp.Server(params)
print(server.listening_address, flush=True)
time.sleep(100_000)
"""


def options(parser: argparse.ArgumentParser) -> None:
    """The sizes."""
    parser.add_argument("--part", action="append", choices=PARTS)
    parser.add_argument("--gguf", type=Path, help="serve this file instead of a 25 M model")
    parser.add_argument("--llama-server", type=Path, help="llama-server, built for this machine")
    parser.add_argument("--shape", choices=SHAPES, help="the model; --device: 0.5B, else 25M")
    parser.add_argument("--clients", type=int, help="32; 256 with --device")
    parser.add_argument("--new", type=int, help="new tokens of an answer: 64; 512 with --device")
    parser.add_argument("--temperature", type=float, default=0.0, help="of --device")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--answers", type=int, default=1_000)
    parser.add_argument("--bad", type=int, default=10_000)
    parser.add_argument("--killed", type=int, default=50)
    parser.add_argument("--idle", type=int, default=1_000)
    parser.add_argument("--short", type=int, default=100_000)
    parser.add_argument("--threads", type=int, default=2)


def run(device: str = "cpu", *, quick: bool = False, asked: argparse.Namespace) -> Iterator[Row]:
    """Every figure that was asked for."""
    if quick:
        asked.clients, asked.new, asked.rounds, asked.answers = 4, 4, 1, 8
        asked.shape = "tiny" if device != "cpu" else asked.shape
        asked.bad, asked.killed, asked.idle, asked.short = 100, 4, 20, 200
    on_device = device != "cpu"
    asked.clients = asked.clients or (256 if on_device else 32)
    asked.new = asked.new or (512 if on_device else 64)
    if on_device:
        yield from device_throughput(asked)
        return
    parts = asked.part or PARTS
    with tempfile.TemporaryDirectory(prefix="glass-bench-") as place:
        shape = asked.shape or ("tiny" if quick else "25M")
        file = asked.gguf or make_model(Path(place), SHAPES[shape])
        with glass_server(file, asked) as server:
            if "throughput" in parts:
                yield from throughput(server, file, asked)
            for name, part in (
                ("company", company),
                ("bad", bad_requests),
                ("leaving", leaving),
                ("short", short_requests),
            ):
                if name in parts:
                    yield from part(server, asked)


# --- servers --------------------------------------------------------------------------------------


def make_model(folder: Path, sizes: dict[str, int]) -> Path:
    """A Qwen2 with random weights and a tokenizer of the documentation's words, as GGUF."""
    from glassformer.adapters.any_model import export
    from glassformer.adapters.load import load

    home = make_folder(folder / "hf", sizes)
    export(load(home), folder / "model.gguf", to="gguf", dtype="f32")
    return folder / "model.gguf"


def make_folder(home: Path, sizes: dict[str, int], dtype: torch.dtype = torch.float32) -> Path:
    """The same as a Hugging Face folder."""
    from tokenizers import (
        AddedToken,
        Regex,
        Tokenizer,
        decoders,
        models,
        normalizers,
        pre_tokenizers,
    )
    from tokenizers.trainers import BpeTrainer
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from glassformer.adapters.tokenizers.files import QWEN_WORDS

    marks = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    made = Tokenizer(models.BPE())
    made.normalizer = normalizers.NFC()
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN_WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    pieces = sizes["vocab_size"] - len(marks)
    trainer = BpeTrainer(
        vocab_size=pieces,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [p.read_text(encoding="utf-8") for p in sorted((ROOT / "src").rglob("*.py"))]
    texts += [p.read_text(encoding="utf-8") for p in sorted((ROOT / "docs").glob("*.md"))]
    made.train_from_iterator(texts, trainer)
    parts = json.loads(made.to_str())
    names = parts["model"]["vocab"]
    names |= {f"<{number}>": number for number in range(len(names), pieces)}  # what was not learned
    made = Tokenizer.from_str(json.dumps(parts))
    made.add_special_tokens([AddedToken(mark, normalized=False, special=True) for mark in marks])
    vocab = made.get_vocab_size()
    config = Qwen2Config(
        vocab_size=vocab,
        hidden_size=sizes["d_model"],
        intermediate_size=sizes["d_ff"],
        num_hidden_layers=sizes["n_layers"],
        num_attention_heads=sizes["n_heads"],
        num_key_value_heads=sizes["n_kv_heads"],
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        eos_token_id=vocab - 1,
        pad_token_id=vocab - 3,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    Qwen2ForCausalLM(config).to(dtype).save_pretrained(home)
    made.save(str(home / "tokenizer.json"))
    settings = {
        "tokenizer_class": "Qwen2Tokenizer",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "bos_token": None,
        "add_bos_token": False,
        "chat_template": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    }
    (home / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return home


#: A program with many clients in the middle of their streams, to be killed.
CROWD = """
import asyncio, json, sys
from bench.serve import prompt, send

async def main(port, count):
    async def one(number):
        asked = {"model": "m", "prompt": prompt(number), "max_tokens": 200, "stream": True}
        reader, writer = await send(port, json.dumps(asked).encode())
        await reader.readuntil(b"data: ")
        return reader, writer
    work = [asyncio.create_task(one(n)) for n in range(count)]
    await asyncio.wait(work, return_when=asyncio.FIRST_COMPLETED)
    await asyncio.sleep(0.3)
    print("streaming", flush=True)
    await asyncio.sleep(1_000)

asyncio.run(main(*map(int, sys.argv[1:])))
"""


class Server:
    """A server in a process of its own."""

    def __init__(self, process: "subprocess.Popen[Any]", address: str, model: str) -> None:
        self.process, self.model = process, model
        self.port = int(address.rstrip("/").removesuffix("/v1").rpartition(":")[2])

    @property
    def resident(self) -> int:
        """Bytes of memory in use."""
        text = Path(f"/proc/{self.process.pid}/status").read_text(encoding="utf-8")
        line = next(line for line in text.splitlines() if line.startswith("VmRSS"))
        return int(line.split()[1]) * 1024

    @property
    def cpu(self) -> float:
        """Seconds of processor time so far: a figure that a busy machine changes little."""
        text = Path(f"/proc/{self.process.pid}/stat").read_text(encoding="utf-8")
        user, system = text.rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")

    def body(self, **fields: Any) -> bytes:
        """A completion request."""
        return json.dumps({"model": self.model, "temperature": 0, **fields}).encode()


@contextlib.contextmanager
def _started(command: list[str], model: str, **more: Any) -> Iterator[Server]:
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **more)
    try:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        assert address.startswith("http"), f"no server: {address}"
        yield Server(process, address, model)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()


@contextlib.contextmanager
def glass_server(file: Path, asked: argparse.Namespace) -> Iterator[Server]:
    """Ours."""
    command = [sys.executable, "-m", "glassformer", "serve", f"m={file}", "--port", "0"]
    context = max(256, asked.new + 128)
    command += ["--slots", str(asked.clients), "--context", str(context)]
    command += ["--threads", str(asked.threads), "--queue", "4096", "--device", asked.device]
    with _started(command, "m") as server:
        yield server


@contextlib.contextmanager
def llama_servers(file: Path, asked: argparse.Namespace) -> Iterator[dict[str, Server]]:
    """llama.cpp's: of the wheel, where it is installed, and the one that was named."""
    with contextlib.ExitStack() as stack:
        found: dict[str, Server] = {}
        if installed("xllamacpp"):
            sizes = [str(asked.clients), str(LLAMA_CONTEXT), str(asked.threads)]
            command = [sys.executable, "-c", LLAMA, str(file), *sizes]
            started = _started(command, "m", stderr=subprocess.DEVNULL)
            found["llama.cpp's wheel"] = stack.enter_context(started)
        if asked.llama_server:
            found["llama.cpp, built here"] = stack.enter_context(_named_server(file, asked))
        yield found


@contextlib.contextmanager
def _named_server(file: Path, asked: argparse.Namespace) -> Iterator[Server]:
    """A `llama-server` with as many slots as clients, and flash attention on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    slots, threads = asked.clients, str(asked.threads)
    command = [str(asked.llama_server), "-m", str(file), "--host", "127.0.0.1", "--port", str(port)]
    command += ["-np", str(slots), "-c", str(slots * LLAMA_CONTEXT), "-t", threads, "-tb", threads]
    command += ["-fa", "on", "--log-disable"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(600):
            if process.poll() is not None:
                raise SystemExit(f"{asked.llama_server} ended with {process.returncode}")
            with contextlib.suppress(OSError):
                if asyncio.run(post(port, b"", path="/health", method="GET"))[0] == 200:
                    break
            time.sleep(0.1)
        yield Server(process, f"http://127.0.0.1:{port}", "m")
    finally:
        process.terminate()
        process.wait(20)


# --- a client -------------------------------------------------------------------------------------


async def send(
    port: int, body: bytes, *, path: str = "/v1/completions", method: str = "POST"
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Send one request on a connection of its own."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request_head(port, body, "close", path=path, method=method) + body)
    await writer.drain()
    return reader, writer


def request_head(
    port: int, body: bytes, connection: str, *, path: str = "/v1/completions", method: str = "POST"
) -> bytes:
    """The lines before a body."""
    head = f"{method} {path} HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\nconnection: {connection}\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode("latin-1")


async def post(port: int, body: bytes, **how: str) -> tuple[int, bytes]:
    """Return the status and the body of an answer."""
    reader, writer = await send(port, body, **how)
    try:
        data = await reader.read()
    finally:
        writer.close()
    head, _, rest = data.partition(b"\r\n\r\n")
    if b"transfer-encoding: chunked" in head.lower():
        rest = b"".join(_chunks(rest))
    return int(head.split()[1]), rest


def _chunks(data: bytes) -> Iterator[bytes]:
    while data:
        size, _, data = data.partition(b"\r\n")
        count = int(size, 16)
        yield data[:count]
        data = data[count + 2 :]


async def together(work: list[Callable[[], Awaitable[Any]]], *, at_once: int) -> list[Any]:
    """Run coroutines, so many at a time; results in their order."""
    gate = asyncio.Semaphore(at_once)

    async def one(make: Callable[[], Awaitable[Any]]) -> Any:
        async with gate:
            return await make()

    return await asyncio.gather(*(one(make) for make in work))


def prompt(number: int, *, words: int = 24) -> str:
    """A text that differs from the others from its first word on."""
    chance = random.Random(number)
    return " ".join(chance.choice(WORDS) for _ in range(words))


# --- the figures ----------------------------------------------------------------------------------


def throughput(server: Server, file: Path, asked: argparse.Namespace) -> Iterator[Row]:
    """Tokens a second of many clients and of one at a time, interleaved with llama.cpp's."""
    with llama_servers(file, asked) as peers:
        sides = {"glass serve": server} | peers
        rates: dict[tuple[str, int], list[float]] = {}
        work: dict[tuple[str, int], list[float]] = {}
        firsts: dict[str, list[float]] = {name: [] for name in sides}
        for turn in range(asked.rounds + 1):
            for name, side in sides.items():
                for at_once in (1, asked.clients):
                    count = asked.clients if at_once > 1 else max(asked.clients // 4, 1)
                    begin = turn * 10_000 + at_once * 1_000
                    spent = side.cpu
                    rate, first = asyncio.run(_load(side, count, at_once, begin, asked.new))
                    if turn:  # the first one warms up
                        rates.setdefault((name, at_once), []).append(rate)
                        each = 1e3 * (side.cpu - spent) / (count * asked.new)
                        work.setdefault((name, at_once), []).append(each)
                        firsts[name] += first if at_once > 1 else []
        case = f"{file.stem}, prompts of 24 words, {asked.new} new, {asked.threads} threads"
        crowd = asked.clients
        for name in sides:
            alone, many = (statistics.median(rates[name, n]) for n in (1, asked.clients))
            late = sorted(firsts[name])
            p99 = late[min(len(late) - 1, int(len(late) * 0.99))]
            cheap = {n: statistics.median(work[name, n]) for n in (1, asked.clients)}
            yield said(
                "serve",
                case,
                f"{name}: one client {alone:.0f} tokens/s, {cheap[1]:.2f} ms of CPU a token",
            )
            yield said(
                "serve",
                case,
                f"{name}: {asked.clients} clients {many:.0f} tokens/s, {many / alone:.2f} x one; "
                f"first token p50 {statistics.median(late):.2f} s, p99 {p99:.2f} s; "
                f"{cheap[crowd]:.2f} ms of CPU a token, one {cheap[1] / cheap[crowd]:.2f} x that",
            )
        for peer in peers:
            for n in (1, asked.clients):
                pairs = zip(rates["glass serve", n], rates[peer, n], strict=True)
                share = statistics.median(ours / other for ours, other in pairs)
                pairs = zip(work["glass serve", n], work[peer, n], strict=True)
                less = statistics.median(other / ours for ours, other in pairs)
                words = f"{n} clients: {share:.2f} x the tokens/s of {peer}, "
                yield said("serve", case, f"{words}{less:.2f} x its tokens a CPU second")


def device_throughput(asked: argparse.Namespace) -> Iterator[Row]:
    """Tokens a second of many clients, each with one answer after another."""
    shape = asked.shape or "0.5B"
    with tempfile.TemporaryDirectory(prefix="glass-bench-") as place:
        dtype = torch.bfloat16 if asked.device != "cpu" else torch.float32
        home = make_folder(Path(place), SHAPES[shape], dtype)
        case = f"{shape}, {asked.device}, {asked.clients} clients, {asked.new} new"
        with (
            glass_server(home, asked) as server,
            ProcessPoolExecutor(PROCESSES, mp_context=get_context("spawn")) as pool,
        ):
            for turn in range(asked.rounds + 1):
                each = asked.clients // PROCESSES
                jobs = [
                    (server.port, each, turn * 100_000 + n * 10_000, asked.new, asked.temperature)
                    for n in range(PROCESSES)
                ]
                steps = asyncio.run(_gauge(server.port, "steps_total"))
                inside = asyncio.run(_gauge(server.port, "step_seconds_total"))
                found = list(pool.map(_share, jobs))
                if turn == 0:  # it warms up
                    continue
                seconds = max(end for _, end, _, _ in found) - min(begin for begin, *_ in found)
                tokens = sum(made for _, _, made, _ in found)
                firsts = sorted(first for *_, some in found for first in some)
                p50, p99 = (firsts[int(len(firsts) * share)] for share in (0.5, 0.99))
                steps = asyncio.run(_gauge(server.port, "steps_total")) - steps
                inside = asyncio.run(_gauge(server.port, "step_seconds_total")) - inside
                yield said(
                    "serve",
                    case,
                    f"{tokens / seconds:,.0f} tokens/s ({tokens:,} in {seconds:.1f} s, {steps:.0f} "
                    f"steps of {1e3 * inside / max(steps, 1):.1f} ms in the engine); first token "
                    f"p50 {p50:.2f} s, p99 {p99:.2f} s",
                )


def _share(job: tuple[int, int, int, int, float]) -> tuple[float, float, int, list[float]]:
    """One process's clients: begin, end, tokens, and seconds to each first token."""
    port, clients, begin, new, temperature = job
    firsts: list[float] = []
    made = 0

    async def one(number: int) -> None:
        nonlocal made
        body = json.dumps(
            {
                "model": "m",
                "prompt": prompt(number),
                "max_tokens": new,
                "temperature": temperature,
                "seed": number,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        )
        started = time.perf_counter()
        reader, writer = await send(port, body.encode())
        waiting, tail = True, b""
        while data := await reader.read(1 << 16):
            if waiting and b"data: {" in data:
                waiting = False
                firsts.append(time.perf_counter() - started)
            tail = (tail + data)[-4_096:]
        writer.close()
        usage = tail[tail.rindex(b'"completion_tokens"') :].partition(b":")[2]
        made += int(usage.partition(b",")[0])

    async def all_of_them() -> None:
        await asyncio.gather(*(one(begin + n) for n in range(clients)))

    started = time.perf_counter()
    asyncio.run(all_of_them())
    return started, time.perf_counter(), made, firsts


async def _load(
    side: Server, count: int, at_once: int, begin: int, new: int
) -> tuple[float, list[float]]:
    """Tokens a second of `count` streams, and the seconds to the first token of each."""
    firsts = []
    made = 0

    async def one(number: int) -> None:
        nonlocal made
        body = side.body(
            prompt=prompt(number),
            max_tokens=new,
            stream=True,
            stream_options={"include_usage": True},
        )
        started = time.perf_counter()
        reader, writer = await send(side.port, body)
        first = None
        usage = 0
        async for line in _lines(reader):
            if line.startswith(b"data: {"):
                if first is None:
                    first = time.perf_counter() - started
                found = json.loads(line[6:])
                if found.get("usage"):
                    usage = found["usage"]["completion_tokens"]
        writer.close()
        assert first is not None, "an answer without a token"
        assert usage, "an answer without its counts"
        firsts.append(first)
        made += usage

    started = time.perf_counter()
    await together([lambda n=n: one(begin + n) for n in range(count)], at_once=at_once)
    return made / (time.perf_counter() - started), firsts


async def _lines(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while line := await reader.readline():
        yield line.strip()


def company(server: Server, asked: argparse.Namespace) -> Iterator[Row]:
    """The same seed alone and among others: how many answers are identical."""

    def request(number: int) -> bytes:
        return server.body(
            prompt=prompt(number, words=3 + number % 40),
            max_tokens=4 + number % 13,
            temperature=(0.0, 0.7, 1.0)[number % 3],
            top_p=(1.0, 0.9)[number % 2],
            seed=number,
            logprobs=0,
        )

    async def one(number: int) -> Any:
        status, data = await post(server.port, request(number))
        assert status == 200, data
        found = json.loads(data)["choices"][0]
        return found["text"], found["logprobs"]["token_logprobs"]

    async def both() -> tuple[list[Any], list[Any]]:
        work = [lambda n=n: one(n) for n in range(asked.answers)]
        many = await together(work, at_once=asked.clients)
        alone = await together(work, at_once=1)
        return alone, many

    alone, many = asyncio.run(both())
    same = sum(a == b for a, b in zip(alone, many, strict=True))
    case = f"the same seed alone and among {asked.clients}"
    yield said("serve", case, f"{same} of {asked.answers} answers and their logprobs identical")


#: Values of every type, for fields of any.
VALUES: list[Any] = [
    None, True, -1, 0, 1e308, -1e308, 2**63, 2**200, "", "x", "\ud800", "\x00", [], {}, [[]], [{}],
    {"a": 1}, [None], "x" * 5_000, [1] * 5_000, -0.5, 99, [[1, "a"]], [2**40], {"1": 5}, {"7": "x"},
    {"include_usage": 1}, [{"role": "user"}], [{"role": "tool", "content": []}], ["x", ""],
    [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
    [{"role": "user", "content": [{"type": "image_url"}]}], [{"type": "function", "function": {}}],
    {"type": "regex", "pattern": "(a|"}, {"type": "regex", "pattern": "a" * 30_000},
    {"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}},
    {"type": "json_schema", "json_schema": {"schema": {"type": ["array"], "items": 3}}},
    {"type": "json_object"}, {"type": "function", "function": {"name": "f"}}, "required", 1e-300,
]  # fmt: skip
FIELDS = (
    "prompt", "messages", "n", "stop", "seed", "temperature", "top_p", "max_tokens", "logprobs",
    "top_logprobs", "stream", "stream_options", "response_format", "tools", "tool_choice",
    "logit_bias", "user", "top_k", "min_p", "repetition_penalty", "echo", "suffix", "best_of",
    "input", "chat_template_kwargs", "metadata", "presence_penalty", "frequency_penalty",
    "parallel_tool_calls", "encoding_format", "dimensions", "pooling", "store", "service_tier",
    "max_completion_tokens", "modalities", "functions", "nonsense",
)  # fmt: skip
#: One of these makes a request wrong, whatever else it has; a name is looked up behind all checks.
WRONG: list[dict[str, Any]] = [
    {"model": "none"}, {"model": "none"}, {"model": "none"}, {"model": ""}, {"model": None},
    {"temperature": "hot"}, {"n": 0}, {"max_tokens": -1}, {"seed": "x"}, {"stop": [""]},
    {"logit_bias": {"x": 1}}, {"presence_penalty": 3}, {"response_format": {"type": "xml"}},
    {"stream": 1}, {"user": 5}, {"top_k": 0}, {"nonsense": 1},
]  # fmt: skip


def bad_bodies(server_model: str, count: int, seed: int = 0) -> Iterator[tuple[str, str, bytes]]:
    """Requests with something wrong: method, path and body."""
    chance = random.Random(seed)
    good = {"model": server_model, "prompt": "the model", "max_tokens": 1, "temperature": 0}
    chat = {"model": server_model, "messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
    vector = {"model": server_model, "input": "the model"}
    bases = {"/v1/completions": good, "/v1/chat/completions": chat, "/v1/embeddings": vector}
    for _ in range(count):
        path = chance.choice(list(bases))
        base = dict(bases[path])
        kind = chance.randrange(8)
        if kind < 4:
            for _ in range(chance.randrange(1, 4)):
                base[chance.choice(FIELDS)] = chance.choice(VALUES)
            body = json.dumps(base | chance.choice(WRONG)).encode()
        elif kind == 4:
            body = json.dumps(base).encode()
            cut = chance.randrange(len(body))
            body = body[:cut]
        elif kind == 5:
            body = bytes(chance.randrange(256) for _ in range(chance.randrange(200)))
        elif kind == 6:
            body = chance.choice((b"[" * 10_000, b'{"a":' * 5_000, b"NaN", b"1", b'"x"', b"null"))
        else:
            path = chance.choice(("/", "/v1", "/v1/models/none", "/v1/completions/", "/%00", "/.."))
            body = json.dumps(base).encode()
        yield chance.choice(("POST",) * 8 + ("PUT", "DELETE")), path, body


def bad_requests(server: Server, asked: argparse.Namespace) -> Iterator[Row]:
    """Fuzzed requests: only 4xx, and no growth."""

    async def work() -> tuple[dict[int, int], int, int]:
        counts: dict[int, int] = {}
        all_bad = list(bad_bodies("m", asked.bad))

        async def one(method: str, path: str, body: bytes) -> None:
            status, _ = await post(server.port, body, path=path, method=method)
            counts[status] = counts.get(status, 0) + 1

        warm = len(all_bad) // 5
        jobs = [lambda bad=bad: one(*bad) for bad in all_bad]
        await together(jobs[:warm], at_once=16)
        before = server.resident
        await together(jobs[warm:], at_once=16)
        return counts, before, server.resident

    counts, before, after = asyncio.run(work())
    good = sum(count for status, count in counts.items() if 400 <= status < 500)
    shown = ", ".join(f"{status}: {count}" for status, count in sorted(counts.items()))
    growth = (after - before) / before
    yield said("serve", f"{asked.bad} bad requests", f"{good} answered 4xx ({shown})")
    yield said("serve", f"{asked.bad} bad requests", f"memory {growth:+.2%}")


async def _gauge(port: int, name: str) -> float:
    _, text = await post(port, b"", path="/metrics", method="GET")
    lines = text.decode().splitlines()
    return float(next(x.split()[1] for x in lines if x.startswith(f"glass_{name}{{")))


def leaving(server: Server, asked: argparse.Namespace) -> Iterator[Row]:
    """Clients that vanish mid-stream, read nothing, or say nothing."""

    async def killed() -> tuple[float, str, str]:
        body = server.body(prompt=prompt(7), max_tokens=24, seed=1)
        before = await post(server.port, body)
        sizes = [str(server.port), str(asked.killed)]
        crowd = await asyncio.create_subprocess_exec(
            sys.executable, "-c", CROWD, *sizes, cwd=ROOT, stdout=asyncio.subprocess.PIPE
        )
        assert crowd.stdout is not None
        await crowd.stdout.readline()  # every client that fits into the slots has a token
        during = asyncio.create_task(post(server.port, body))
        await asyncio.sleep(0.05)
        crowd.kill()
        await crowd.wait()
        begun = time.perf_counter()
        while await _gauge(server.port, "running") + await _gauge(server.port, "waiting"):
            await asyncio.sleep(0.02)
            assert time.perf_counter() - begun < 60, "slots are not freed"
        answered = (before, await during)
        text = [json.loads(data)["choices"][0]["text"] for _, data in answered]
        return time.perf_counter() - begun, text[0], text[1]

    freed, before, during = asyncio.run(killed())
    case = f"a process with {asked.killed} clients is killed (-9) mid-stream"
    same = "identical" if before == during else "DIFFERENT"
    yield said("serve", case, f"slots free {freed:.2f} s later; an answer meanwhile: {same}")

    async def idle() -> tuple[float, float, int]:
        alone = await _seconds(server)
        quiet = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(asked.idle)]
        slow = [
            await send(server.port, server.body(prompt=prompt(n), max_tokens=200, stream=True))
            for n in range(4)
        ]
        while await _gauge(server.port, "running"):
            await asyncio.sleep(0.05)
        among = await _seconds(server)
        held = server.resident
        for _, writer in (*quiet, *slow):
            writer.close()
        return alone, among, held

    async def fill() -> None:
        """Use the memory of every slot, which the machine gives when it is first written to."""
        long = [server.body(prompt=prompt(100 + n), max_tokens=200) for n in range(asked.clients)]
        jobs = [lambda body=body: post(server.port, body) for body in long]
        await together(jobs, at_once=asked.clients)

    asyncio.run(fill())
    begin = server.resident
    crowds = [asyncio.run(idle()) for _ in range(CROWDS)]
    slower = statistics.median(among / alone for alone, among, _ in crowds)
    held = [each for *_, each in crowds]
    yield said(
        "serve",
        f"{asked.idle} idle connections and 4 readers that read nothing",
        f"an answer takes {slower:.2f} x its time without; memory {held[0] / begin - 1:+.2%} while "
        f"they are there, {held[-1] / held[1] - 1:+.2%} in the {CROWDS}th crowd beside the second "
        f"({', '.join(f'{each / 2**20:.1f}' for each in held)} MiB)",
    )


async def _seconds(server: Server) -> float:
    times = []
    for number in range(5):
        begin = time.perf_counter()
        await post(server.port, server.body(prompt=prompt(number), max_tokens=8))
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def short_requests(server: Server, asked: argparse.Namespace) -> Iterator[Row]:
    """Many short requests: does memory grow?"""

    def body(number: int) -> bytes:
        return server.body(prompt=prompt(number, words=2), max_tokens=1, temperature=1.0)

    async def some(numbers: range) -> None:
        """One client, on a connection that it keeps."""
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        for number in numbers:
            writer.write(request_head(server.port, body(number), "keep-alive") + body(number))
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200"), head
            length = head.lower().partition(b"content-length: ")[2].partition(b"\r")[0]
            await reader.readexactly(int(length))
        writer.close()

    async def work() -> tuple[list[int], float]:
        begun, resident = time.perf_counter(), []
        tenth = range(0, asked.short, max(asked.short // 10, 1))
        for first in tenth:
            shares = range(first, min(first + tenth.step, asked.short), ON_ONE_CONNECTION)
            ranges = [range(n, min(n + shares.step, shares.stop)) for n in shares]
            await together([lambda r=r: some(r) for r in ranges], at_once=asked.clients)
            resident.append(server.resident)
        return resident, asked.short / (time.perf_counter() - begun)

    resident, rate = asyncio.run(work())
    before, after = resident[1], resident[-1]  # a fifth warms up
    growth = (after - before) / before
    mebibytes = ", ".join(f"{each / 2**20:.1f}" for each in resident)
    yield said(
        "serve",
        f"{asked.short} short requests",
        f"memory {growth:+.2%} after the first fifth ({mebibytes} MiB); {rate:.0f} requests/s",
    )
