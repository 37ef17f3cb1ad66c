"""A store like Ollama's, made by hand: manifests that name blobs by their hashes."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np

REGISTRY = "registry.ollama.ai"


@dataclass(frozen=True)
class OllamaStore:
    folder: Path

    def blob(self, content: bytes) -> str:
        """The content's digest, as manifests have it."""
        sha256 = hashlib.sha256(content).hexdigest()
        path = self.folder / "blobs" / f"sha256-{sha256}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        return f"sha256:{sha256}"

    def layer(self, kind: str, content: bytes) -> dict[str, Any]:
        media_type = f"application/vnd.ollama.image.{kind}"
        return {"mediaType": media_type, "digest": self.blob(content), "size": len(content)}

    def add(self, name: str, tag: str = "latest", **layers: bytes) -> Path:
        """A model; ``name`` is the way to its manifest below the registry's folder, or with a slash in front of it."""
        where = (
            Path(name[1:]) if name.startswith("/") else Path(REGISTRY) / (name if "/" in name else f"library/{name}")
        )
        manifest = self.folder / "manifests" / where / tag
        manifest.parent.mkdir(parents=True, exist_ok=True)
        config = {"mediaType": "application/vnd.docker.container.image.v1+json", "digest": self.blob(b"{}"), "size": 2}
        listed = [self.layer(kind, content) for kind, content in layers.items()]
        content = {
            "schemaVersion": 2,
            "mediaType": "application/vnd.docker.distribution.manifest.v2+json",
            "config": config,
            "layers": listed,
        }
        manifest.write_text(json.dumps(content))
        return manifest


def tiny_gguf(folder: Path) -> bytes:
    path = folder / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_tensor("a.weight", np.ones((2, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()
