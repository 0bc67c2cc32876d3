"""Draw docs/operate/grafana.json as docs/operate/grafana.png, from ten minutes of pushes to two vLLM servers.

Usage: draw_dashboard.py FOLDER, where page.js is dashboard.jsx in one file. Prometheus and Chromium are needed.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch
import transformers
from engines import NOT_COMPILED
from faults import FaultyTransport
from prometheus_client import start_http_server
from test_dashboard import DASHBOARD, WINDOW, prometheus

from weightsync import WeightSync, WeightSyncError
from weightsync.engines.server import VllmServer
from weightsync.net.child import free_port

SIZES = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "num_key_value_heads": 4}


def push_for_ten_minutes(model: torch.nn.Module, first: VllmServer, second: VllmServer) -> None:
    """Push, and let a push fail, an engine end and start anew, and then each chunk take longer."""
    transport = FaultyTransport("ipc")
    restart = threading.Thread(target=second.start)
    events = [
        (120, lambda: setattr(transport, "flip_a_byte_of", 0)),
        (280, second.stop),
        (360, restart.start),
        (480, lambda: setattr(transport, "before_chunk", lambda _: time.sleep(0.3))),
        (530, lambda: setattr(transport, "before_chunk", None)),
    ]
    options = {"verify": "full", "on_engine_failure": "drop", "timeout_s": 20}
    begin = time.monotonic()
    with WeightSync("fsdp", transport, [first.url, second.url], **options) as sync:
        while (passed := time.monotonic() - begin) < 600:
            while events and passed > events[0][0]:
                events.pop(0)[1]()
            try:
                sync.push(model)
            except WeightSyncError as error:
                print(error)
                time.sleep(40)
            time.sleep(2.5)
    restart.join()


def draw(folder: Path, address: str, begin: float) -> None:
    head = '<meta charset="utf-8"><link rel="stylesheet" href="page.css">'
    (folder / "page.html").write_text(f'{head}<div id="root"></div><script src="page.js"></script>')
    page = f"{folder}/page.html?prometheus={address}&from={begin:.0f}&to={time.time():.0f}&window={WINDOW}"
    picture = f"--screenshot={DASHBOARD.with_suffix('.png')}", "--window-size=1600,1224", "--hide-scrollbars"
    files = "--allow-file-access-from-files", f"--user-data-dir={folder}/chromium"
    options = "--headless=new", "--no-sandbox", "--virtual-time-budget=15000", *picture, *files
    subprocess.run(["chromium", *options, f"file://{page}"], check=True, timeout=120)


def main(temporary: Path) -> None:
    assert shutil.which("chromium"), "no chromium: install it (Debian has it)"
    config = transformers.Qwen3Config(vocab_size=8192, max_position_embeddings=512, head_dim=64, **SIZES)
    model = transformers.Qwen3ForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(temporary / "model")
    trainer = free_port()
    start_http_server(trainer, "127.0.0.1")
    options = ("--skip-tokenizer-init", "--enforce-eager", "--max-model-len=64", "--dtype=bfloat16")
    environment = {**NOT_COMPILED, "VLLM_CPU_KVCACHE_SPACE": "1"}
    first, second = (VllmServer(temporary / "model", *options, environment=environment) for _ in range(2))
    with first, second:
        targets = {"node-0": trainer, "node-1": first.port, "node-2": second.port}
        with prometheus(temporary, **{name: f"127.0.0.1:{port}" for name, port in targets.items()}) as address:
            begin = time.time()
            push_for_ten_minutes(model, first, second)
            draw(Path(sys.argv[1]).resolve(), address, begin)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="weightsync-") as temporary:
        main(Path(temporary))
