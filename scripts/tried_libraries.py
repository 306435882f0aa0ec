# /// script
# requires-python = ">=3.11"
# dependencies = ["litdata==0.2.76", "datasets==5.2.0", "moto[server]==5.2.5", "optuna==5.0.0",
#                 "submitit==1.5.4", "torch", "torchvision", "pillow"]
# ///
"""Asks other libraries for what our own readers and benchmarks promise.

    uv run scripts/tried_libraries.py                  # every check; waits for litdata take minutes
    uv run scripts/tried_libraries.py litdata_code     # one of them

It prints a line for each check. docs/project/libraries.md has what they said.
"""

from __future__ import annotations

import io
import json
import os
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

COUNT, EACH = 60, 10
ORDER = [(37 * i) % COUNT for i in range(COUNT)]


def png(level: int) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", (6, 6), (level, 2 * level, 255 - level)).save(file, "PNG")
    return file.getvalue()


class Touch:
    """What runs a command when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return Path.touch, (self.file,)


def outcome(do: Callable[[], Any]) -> str:
    begin = time.monotonic()
    try:
        found = str(do())
    except Exception as error:
        found = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
    return f"{found} ({time.monotonic() - begin:.0f} s)"


# litdata.


def write_chunks(root: Path, samples: list[Any]) -> Path:
    from litdata.streaming.writer import BinaryWriter

    writer = BinaryWriter(str(root), chunk_size=EACH)
    for index, sample in enumerate(samples):
        writer[index] = sample
    writer.done()
    writer.merge()
    return root


class Litdata:
    """A map-style data set: a run draws the order itself, to resume within an epoch."""

    def __init__(self, path: Path | str, whole: bool = True) -> None:
        import litdata
        from litdata.streaming import downloader

        # Without it the client of S3 refuses a server without TLS.
        downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = "true"
        self.images = litdata.StreamingDataset(str(path), shuffle=False)
        self.images._on_demand_bytes = not whole

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> bool:
        sample = self.images[index]
        return (sample["image"], sample["label"]) == (png(index), index // 20)


def chunks(root: Path) -> Path:
    return write_chunks(root / "c", [{"image": png(i), "label": i // 20} for i in range(COUNT)])


def all_right(images: Any, workers: int = 0) -> str:
    from torch.utils.data import DataLoader

    loader = DataLoader(images, 4, sampler=ORDER, num_workers=workers, collate_fn=list)
    return f"{sum(ok for batch in loader for ok in batch)} of {len(images)} are right"


def litdata_order(root: Path) -> None:
    images = Litdata(chunks(root))
    print("a drawn order, here:", outcome(lambda: all_right(images)))
    print("with two workers:", outcome(lambda: all_right(images, 2)))


def litdata_faults(root: Path) -> None:
    for name, damage in {
        "missing": lambda file: file.unlink(),
        "cut": lambda file: file.write_bytes(file.read_bytes()[:-5]),
        "overwritten": lambda file: file.write_bytes(b"\xff" * file.stat().st_size),
    }.items():
        place = chunks(root / name)
        damage(place / "chunk-0-2.bin")
        print(f"a chunk is {name}:", outcome(lambda place=place: Litdata(place)[23]))


def litdata_code(root: Path) -> None:
    """Data whose index names the format pickle for a column."""
    write_chunks(root / "c", [{"image": Touch(root / "ran"), "label": 0}] * 3)
    outcome(lambda: Litdata(root / "c")[0])
    print("code in a data set runs:", (root / "ran").exists())


def litdata_mosaicml(root: Path) -> None:
    place = Path(__file__).resolve().parents[1] / "tests" / "data" / "mosaicml_shards"
    print("shards of MosaicML that are not compressed:", outcome(lambda: len(Litdata(place))))


class Server:
    """A server of S3 that holds the chunks in memory."""

    def __init__(self, files: Path, port: int | None = None) -> None:
        import boto3

        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = port = port or free.getsockname()[1]
        os.environ |= {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
        os.environ |= {"AWS_DEFAULT_REGION": "us-east-1"}
        os.environ["AWS_ENDPOINT_URL"] = f"http://127.0.0.1:{port}"
        words = [sys.executable, "-m", "moto.server", "-p", str(port)]
        null = subprocess.DEVNULL
        self.process = subprocess.Popen(words, stdout=null, stderr=null)
        while True:
            with socket.socket() as tried:
                if not tried.connect_ex(("127.0.0.1", port)):
                    break
            time.sleep(0.1)
        self.client = boto3.client("s3")
        self.client.create_bucket(Bucket="bucket")
        for file in files.iterdir():
            self.put(file.name, file.read_bytes())

    def put(self, name: str, content: bytes) -> None:
        self.client.put_object(Bucket="bucket", Key=f"c/{name}", Body=content)


def on_s3(root: Path, use: Callable[[Server], None]) -> None:
    server = Server(chunks(root))
    try:
        use(server)
    finally:
        server.process.kill()


def litdata_s3_one(root: Path) -> None:
    on_s3(
        root,
        lambda _: print("S3, one image:", outcome(lambda: Litdata("s3://bucket/c", False)[23])),
    )


def litdata_s3_order(root: Path) -> None:
    on_s3(
        root,
        lambda _: print("S3, whole chunks:", outcome(lambda: all_right(Litdata("s3://bucket/c")))),
    )


def litdata_s3_workers(root: Path) -> None:
    """Training reads an image before its loaders start their workers."""

    def use(server: Server) -> None:
        images = Litdata("s3://bucket/c")
        assert images[3]
        print("S3, two workers after a first image:", outcome(lambda: all_right(images, 2)))

    on_s3(root, use)


def litdata_s3_missing(root: Path) -> None:
    def use(server: Server) -> None:
        server.client.delete_object(Bucket="bucket", Key="c/chunk-0-2.bin")
        print("S3, a chunk is missing:", outcome(lambda: Litdata("s3://bucket/c")[23]))

    on_s3(root, use)


def litdata_s3_cut(root: Path) -> None:
    def use(server: Server) -> None:
        server.put("chunk-0-2.bin", (root / "c" / "chunk-0-2.bin").read_bytes()[:-5])
        print("S3, a chunk is cut:", outcome(lambda: Litdata("s3://bucket/c")[23]))

    on_s3(root, use)


def litdata_s3_killed(root: Path) -> None:
    def use(server: Server) -> None:
        images = Litdata("s3://bucket/c")
        assert images[3]
        server.process.send_signal(signal.SIGKILL)
        print("S3, the server is killed:", outcome(lambda: images[33]))
        again = Server(root / "c", server.port)
        print("S3, it is back:", outcome(lambda: images[43]))
        again.process.kill()

    on_s3(root, use)


# datasets.


def load(root: Path, change: Callable[[Path], object], streaming: bool = False) -> Any:
    import datasets

    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    datasets.disable_progress_bars()
    for shard in range(COUNT // EACH):
        with tarfile.open(root / f"train-{shard}.tar", "w") as tar:
            for index in range(shard * EACH, (shard + 1) * EACH):
                for kind, content in (("png", png(index)), ("cls", b"%d" % (index // 20))):
                    member = tarfile.TarInfo(f"{index:03}.{kind}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
    change(root)
    given = {"split": "train", "cache_dir": str(root / "cache"), "streaming": streaming}
    return datasets.load_dataset("webdataset", data_files=str(root / "*.tar"), **given)


def datasets_tars(root: Path) -> None:
    def cut(end: int) -> Callable[[Path], object]:
        def change(place: Path) -> None:
            os.truncate(place / "train-2.tar", end)

        return change

    def fresh(name: str) -> Path:
        (root / name).mkdir()
        return root / name

    whole = fresh("whole")
    print("tars, images:", outcome(lambda: len(load(whole, lambda _: None))))
    copies = [file.name for file in (whole / "cache").rglob("*.arrow")]
    print("tars, copies of all images that it writes:", copies)
    print(
        "tars, streaming, a length:", outcome(lambda: len(load(fresh("s"), lambda _: None, True)))
    )
    print("tars, cut within a file:", outcome(lambda: load(fresh("within"), cut(5000))))
    print("tars, cut between files:", outcome(lambda: len(load(fresh("between"), cut(4096)))))


# Optuna and submitit.


def optuna_order(_: Path) -> None:
    import optuna

    optuna.logging.set_verbosity(optuna.logging.CRITICAL)
    lr = {"lr": optuna.distributions.FloatDistribution(0.03, 1.0, log=True)}

    def draws(at_once: int, sampler: Any) -> list[float]:
        study, found, open_ = optuna.create_study(sampler=sampler), list[float](), list[Any]()
        for _ in range(8):
            open_.append(study.ask(lr))
            found.append(open_[-1].params["lr"])
            if len(open_) == at_once:
                for trial in open_:
                    study.tell(trial, trial.params["lr"])
                open_.clear()
        return found

    for name in ("TPESampler", "QMCSampler"):
        kind = getattr(optuna.samplers, name)
        given = {"seed": 0, **({"n_startup_trials": 2} if name == "TPESampler" else {})}
        same = draws(1, kind(**given)) == draws(4, kind(**given))
        print(f"{name}, the same trials one after another and four at a time: {same}")

    def kept(order: range) -> list[int]:
        study = optuna.create_study(
            direction="maximize", pruner=optuna.pruners.SuccessiveHalvingPruner(1, 4)
        )
        trials, goes_on = [study.ask() for _ in order], []
        for number in order:
            trials[number].report(number, 1)
            if not trials[number].should_prune():
                goes_on.append(number)
        return sorted(goes_on)

    both = kept(range(8)), kept(range(7, -1, -1))
    print("halving, which of eight trials go on, the best last and the best first:", *both)


def wait(_: int) -> tuple[float, float]:
    begin = time.time()
    time.sleep(3)
    return begin, time.time()


def submitit_at_once(root: Path) -> None:
    import submitit

    executor = submitit.AutoExecutor(folder=root, cluster="local")
    executor.update_parameters(timeout_min=5, slurm_array_parallelism=2)
    times = [job.result() for job in executor.map_array(wait, range(6))]
    most = max(sum(begin <= moment < end for begin, end in times) for moment, _ in times)
    print("six jobs, two of them at a time; most at once:", most)


NAMES = ("litdata_", "datasets_", "optuna_", "submitit_")
CHECKS = {name: made for name, made in list(globals().items()) if name.startswith(NAMES)}

if __name__ == "__main__":
    if sys.argv[1:2] == ["--here"]:
        CHECKS[sys.argv[2]](Path(sys.argv[3]))
        sys.stdout.flush()
        # Threads and workers of the libraries may wait for ever.
        os._exit(0)
    for check in sys.argv[1:] or CHECKS:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
            own = {**os.environ, "LITDATA_CACHE_DIR": f"{scratch}/copies"}
            call = [sys.executable, __file__, "--here", check, scratch]
            done = subprocess.run(call, env=own, stderr=subprocess.PIPE, text=True, timeout=900)
            if done.returncode:
                print(check, json.dumps(done.stderr[-500:]))
