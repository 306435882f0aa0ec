# /// script
# requires-python = ">=3.11"
# dependencies = ["litdata==0.2.76", "datasets==5.2.0", "moto[server]==5.2.5", "optuna==5.0.0",
#                 "scipy", "submitit==1.5.4", "torch"]
# ///
"""Asks other libraries for what our own readers and benchmarks promise, a line for each check.

    uv run scripts/tried_libraries.py                 # all of them; some wait for minutes
    uv run scripts/tried_libraries.py litdata_code    # one

docs/project/libraries.md has what they said.
"""

from __future__ import annotations

import io
import logging
import os
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

COUNT, EACH, CHUNK = 60, 10, "chunk-0-2.bin"


def say(check: str, do: Callable[[], Any]) -> None:
    begin = time.monotonic()
    try:
        found = str(do())
    except Exception as error:
        found = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
    print(f"{check}: {found} ({time.monotonic() - begin:.0f} s)", flush=True)


def image(index: int) -> bytes:
    """Stands for a file, whose content no check looks into."""
    return b"image %03d" % index


class Litdata:
    """A map-style data set: the order is drawn elsewhere, to resume within an epoch."""

    def __init__(self, path: Path | str, whole: bool = True) -> None:
        import litdata
        from litdata.streaming import downloader

        # Its client of S3 refuses a server without TLS otherwise.
        downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = "true"
        self.images = litdata.StreamingDataset(str(path), shuffle=False)
        self.images._on_demand_bytes = not whole

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> bool:
        return self.images[index] == {"image": image(index), "label": index // 20}

    def in_order(self, workers: int) -> str:
        from torch.utils.data import DataLoader

        order = [37 * i % COUNT for i in range(COUNT)]
        loader = DataLoader(self, 4, sampler=order, num_workers=workers, collate_fn=list)
        return f"{sum(right for batch in loader for right in batch)} of {len(self)} are right"


def written(root: Path, *samples: Any) -> Path:
    from litdata.streaming.writer import BinaryWriter

    writer = BinaryWriter(str(root), chunk_size=EACH)
    made = [{"image": image(i), "label": i // 20} for i in range(COUNT)]
    for index, sample in enumerate(samples or made):
        writer[index] = sample
    writer.done()
    writer.merge()
    return root


def litdata_order(root: Path) -> None:
    images = Litdata(written(root / "chunks"))
    for workers in (0, 2):
        say(f"a drawn order, {workers} workers", partial(images.in_order, workers))


def litdata_faults(root: Path) -> None:
    damages = {
        "missing": Path.unlink,
        "cut": lambda file: os.truncate(file, file.stat().st_size - 5),
        "changed": lambda file: file.write_bytes(file.read_bytes().replace(image(23), image(24))),
    }
    for name, damage in damages.items():
        damage(written(root / name) / CHUNK)
        say(f"a chunk is {name}", lambda name=name: Litdata(root / name)[23])


class Touch:
    """What calls a function when it is unpickled."""

    def __reduce__(self) -> Any:
        return Path.touch, (Path("ran"),)


def litdata_code(root: Path) -> None:
    os.chdir(root)
    Litdata(written(root / "chunks", {"image": Touch(), "label": 0}))[0]
    print("the code of a data set runs:", Path("ran").exists())


def litdata_mosaicml(_: Path) -> None:
    place = Path(__file__).resolve().parents[1] / "tests" / "data" / "mosaicml_shards"
    say("plain shards of MosaicML", lambda: len(Litdata(place)))


def serve(files: Path, port: int = 0) -> tuple[Any, Any]:
    """A server of S3 with the chunks in a bucket, and its client."""
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(port=port, verbose=False)
    server.start()
    given = {"ACCESS_KEY_ID": "a", "SECRET_ACCESS_KEY": "b", "DEFAULT_REGION": "us-east-1"}
    given["ENDPOINT_URL"] = "http://127.0.0.1:{1}".format(*server.get_host_and_port())
    os.environ |= {f"AWS_{key}": value for key, value in given.items()}
    client = boto3.client("s3")
    client.create_bucket(Bucket="bucket")
    for file in files.iterdir():
        client.upload_file(str(file), "bucket", f"chunks/{file.name}")
    return server, client


def litdata_s3(root: Path, case: str) -> None:
    server, client = serve(written(root / "chunks"))
    chunk = {"Bucket": "bucket", "Key": f"chunks/{CHUNK}"}
    if case == "a chunk is missing":
        client.delete_object(**chunk)
    if case == "a chunk is cut":
        client.put_object(**chunk, Body=(root / "chunks" / CHUNK).read_bytes()[:-5])
    images = Litdata("s3://bucket/chunks", whole=case != "one image")
    do: Callable[[], Any] = partial(images.__getitem__, 23)
    if case == "a drawn order":
        do = partial(images.in_order, 0)
    if case == "two workers after a first image":
        assert images[3]
        do = partial(images.in_order, 2)
    if case == "the server is killed":
        assert images[3]
        server.stop()
    say(f"S3, {case}", do)
    if case == "the server is killed":
        serve(root / "chunks", server.get_host_and_port()[1])
        say("S3, the server is back", lambda: images[43])


def datasets_tars(root: Path) -> None:
    import datasets

    datasets.disable_progress_bars()

    def load(name: str, streaming: bool = False, end: int | None = None) -> Any:
        place = root / name
        place.mkdir()
        for index in range(COUNT):
            with tarfile.open(place / f"train-{index // EACH}.tar", "a") as tar:
                for kind, content in (("bin", image(index)), ("cls", b"%d" % (index // 20))):
                    member = tarfile.TarInfo(f"{index:03}.{kind}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
        if end is not None:
            os.truncate(place / "train-2.tar", end)
        given = {"split": "train", "cache_dir": str(place / "cache"), "streaming": streaming}
        return datasets.load_dataset("webdataset", data_files=str(place / "*.tar"), **given)

    say("tars, images", lambda: len(load("whole")))
    print("tars, copies of all images:", *(f.name for f in (root / "whole").rglob("*.arrow")))
    say("tars, streaming, a length", lambda: len(load("streaming", streaming=True)))
    say("tars, one is cut within a file", lambda: len(load("within", end=5000)))
    say("tars, one is cut between two files", lambda: len(load("between", end=4096)))


def optuna_order(_: Path) -> None:
    import optuna

    lr = {"lr": optuna.distributions.FloatDistribution(0.03, 1.0, log=True)}

    def draws(sampler: Any, one_by_one: bool) -> list[float]:
        study, found = optuna.create_study(sampler=sampler), []
        for trial in (study.ask(lr) for _ in range(16)):
            found.append(trial.params["lr"])
            if one_by_one:
                study.tell(trial, found[-1])
        return found

    for kind in (optuna.samplers.TPESampler, optuna.samplers.QMCSampler):
        same = draws(kind(seed=0), True) == draws(kind(seed=0), False)
        print(f"{kind.__name__}, the same trials one by one and side by side:", same)
    for order in (range(8), range(7, -1, -1)):
        pruner = optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=4)
        study = optuna.create_study(direction="maximize", pruner=pruner)
        trials = [study.ask() for _ in order]
        kept = 0
        for score in order:
            trials[score].report(score, 1)
            kept += not trials[score].should_prune()
        print(f"halving, of the scores {list(order)} in this order go on:", kept)


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
    print("six jobs, two at a time; most at once:", most)


S3 = ("one image", "a drawn order", "two workers after a first image")
S3 += ("a chunk is missing", "a chunk is cut", "the server is killed")
EVERY = litdata_order, litdata_faults, litdata_code, litdata_mosaicml, datasets_tars, optuna_order
CHECKS: dict[str, Callable[[Path], None]] = {
    **{check.__name__: check for check in (*EVERY, submitit_at_once)},
    **{case: partial(litdata_s3, case=case) for case in S3},
}

if __name__ == "__main__":
    if sys.argv[1:2] == ["--here"]:
        logging.disable()
        CHECKS[sys.argv[2]](Path(sys.argv[3]))
        sys.stdout.flush()
        # Threads and workers of the libraries may wait for ever.
        os._exit(0)
    for check in sys.argv[1:] or CHECKS:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
            call = [sys.executable, __file__, "--here", check, scratch]
            subprocess.run(call, env={**os.environ, "LITDATA_CACHE_DIR": f"{scratch}/copies"})
