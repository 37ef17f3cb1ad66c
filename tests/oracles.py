"""llama.cpp's sources, for what they carry: vocabularies with expected ids, chat templates, and its model converter."""

import fcntl
import subprocess
import sys
import tarfile
from pathlib import Path

from paceline.models import catalog

PACKAGE = "llama-cpp-python==0.3.36"


def llama_cpp_source() -> Path:
    """The unpacked ``llama.cpp`` folder, downloaded once (77 MB) from the package index."""
    folder = catalog.cache_folder() / "oracles" / PACKAGE
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = folder / "done"
        if not done.exists():
            # without isolation pip asks the environment's own scikit-build-core for the package's metadata
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
            command += ["--no-build-isolation", "--dest", str(folder), PACKAGE]
            subprocess.run(command, check=True, timeout=250)
            (archive,) = folder.glob("*.tar.gz")
            with tarfile.open(archive) as tar:
                tar.extractall(folder, filter="data")
            archive.unlink()
            done.touch()
    (source,) = folder.glob("*/vendor/llama.cpp")
    return source
