"""Writes the files of many hand-over plans, and lets the servers' own parsers read them.

    python -m examples.benchmarks.server_files write DIR   with edgekit
    VLLM_PYTHON examples/benchmarks/server_files.py parse DIR   in an environment with vLLM, Ray or SGLang

`parse` prints a line for each file: the number of arguments or deployments, or the error. It starts no server.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DENSE: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 128256, "hidden_size": 8192, "intermediate_size": 28672,
    "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128,
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "hidden_act": "silu",
    "tie_word_embeddings": False,
}  # fmt: skip
EXPERTS: dict[str, Any] = {
    "model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144,
    "moe_intermediate_size": 768, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4,
    "head_dim": 128, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0,
    "hidden_act": "silu", "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
    "tie_word_embeddings": False,
}  # fmt: skip
BESIDE = {"adapters": ("/adapters/law",), "adapter_rank": 20, "draft": "small"}
CASES: dict[str, tuple[dict[str, Any], str, dict[str, Any], dict[str, Any]]] = {
    "whole": (DENSE, "H100x4", {}, {}),
    "fp8-cache": (DENSE, "H100x8", {"kv_format": "fp8", "sequences": 64}, {}),
    "split": (DENSE, "H100x8", {"disaggregate": True}, {}),
    "copies": (DENSE, "H200x8", {"sequences": 256, "context": 2048}, {}),
    "experts": (EXPERTS, "H100x4", {"expert_parallel": True}, {}),
    "experts-split": (EXPERTS, "H100x4", {"expert_parallel": True, "disaggregate": True}, {}),
    "adapter-and-draft": (DENSE, "H100x4", {}, BESIDE),
}


def write(folder: Path) -> None:
    """Write the files of every case for the servers that have a parser of their own."""
    from edgekit.apps.handover.bundle import FILES
    from edgekit.apps.handover.gpus import gpu_group
    from edgekit.apps.handover.servers.layouts import ServerSubject
    from edgekit.apps.handover.servers.request import ServerRequest
    from edgekit.apps.handover.servers.resolver import resolve_server
    from edgekit.contracts.recipe import named_recipe
    from edgekit.errors import Unsupported
    from edgekit.model.families import model_from_config
    from edgekit.quant.vllm_compat import handover

    for name, (config, gpu, wishes, beside) in CASES.items():
        subject = ServerSubject(
            model_from_config(config, name, name), name, "0" * 64, handover(named_recipe("s4-g128"))
        )
        for server in ("vllm", "sglang", "ray"):
            request = ServerRequest.model_validate({"to": server, "sequences": 4, **wishes})
            plan = resolve_server(subject, [gpu_group(gpu)], request).model_copy(update=beside)
            try:
                files = FILES[plan.server](plan)
            except Unsupported as error:
                print(f"{name}: {error}")
                continue
            for file, text in files.items():
                place = folder / name / file
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_text(text)


def parse(folder: Path) -> Iterator[str]:
    """Yield a line for each file that a server which is installed here reads."""
    for path in sorted(folder.glob("*/*.yaml")):
        os.chdir(path.parent)
        read = _READERS[path.stem.partition("-")[0]]
        try:
            told = read(path.name)
        except ImportError as error:
            told = f"not read: {error}"
        except (Exception, SystemExit) as error:
            told = f"REFUSED: {type(error).__name__} {str(error)[:300]}"
        yield f"{path.parent.name}/{path.name}: {told}"


def _vllm(file: str) -> str:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser())
    given = parser.parse_args(["serve", "--config", file])
    validate_parsed_serve_args(given)
    return f"taken, {given.tensor_parallel_size=}, {given.max_model_len=}".replace("given.", "")


def _sglang(file: str) -> str:
    from sglang.srt.server_args import prepare_server_args

    command = Path(file).read_text().partition("sglang.launch_server ")[2].partition(", from this folder")[0]
    given = prepare_server_args(command.split())
    return f"taken, {given.tp_size=}, {given.context_length=}".replace("given.", "")


def _ray(file: str) -> str:
    import yaml
    from ray.serve import llm
    from ray.serve.schema import ServeDeploySchema

    data = yaml.safe_load(Path(file).read_text())
    (application,) = ServeDeploySchema.model_validate(data).applications
    build = getattr(llm, application.import_path.partition(":")[2])
    return f"taken, builds {type(build(application.args)).__name__}"


_READERS = {"vllm": _vllm, "sglang": _sglang, "ray": _ray}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=["write", "parse"])
    parser.add_argument("folder", type=Path)
    given = parser.parse_args()
    if given.step == "write":
        write(given.folder)
        return
    for line in parse(given.folder.resolve()):
        print(line, flush=True)
    sys.stdout.flush()
    os._exit(0)  # the parsers of servers leave threads behind


if __name__ == "__main__":
    main()
