#!/usr/bin/env python3
"""Prints the tables of docs/performance.md: its formulas with its assumptions. No GPU is needed.

    scripts/performance.py            the tables
    scripts/performance.py --check    fails if the document has others
"""

import pathlib
import sys

GROUP_BYTES = 25 << 20
# Peak of the tensor cores, bandwidth of memory, bandwidth of NVLink, per second.
GPUS = {
    "A100": {"bf16": 312e12, "f32": 156e12, "memory": 1.9e12, "nvlink": 230e9},
    "H100": {"bf16": 989e12, "f32": 495e12, "memory": 3.2e12, "nvlink": 370e9},
    "H200": {"bf16": 989e12, "f32": 495e12, "memory": 4.6e12, "nvlink": 370e9},
}
NETWORK = 25e9
REACHED = 0.4
# Name, parameters, tokens per rank and step, dtype of computing and of the wire, bytes on the wire.
MODELS = [
    ("BERT-large, f32 (TF32), 32 x 512 tokens", 335e6, 32 * 512, "f32", 4),
    ("BERT-large, bf16, 32 x 512 tokens", 335e6, 32 * 512, "bf16", 2),
    ("7 B, bf16, 4 x 4096 tokens", 7e9, 4 * 4096, "bf16", 2),
]
RANKS = [2, 8, 16, 64, 256, 1024]
STRATEGIES = ["Replicated", "OptimizerState", "Gradients", "Full"]


def collectives(gpu, parameters, wire_bytes, ranks):
    """Seconds of one collective set, and of one group of it."""
    within = ranks <= 8
    bandwidth = GPUS[gpu]["nvlink"] if within else NETWORK
    # A ring of all ranks; beyond 64 ranks NCCL's trees and its PAT keep latency near a logarithm.
    hops = ranks - 1 if ranks <= 64 else 64
    latency = hops * (5e-6 if within else 15e-6)
    total_bytes = parameters * wire_bytes
    groups = max(1, round(total_bytes / GROUP_BYTES))
    whole = (ranks - 1) / ranks * total_bytes / bandwidth + groups * latency
    return whole, whole / groups


def step(gpu, model, strategy, ranks):
    """Seconds of computing, communicating, communicating exposed, stepping."""
    _, parameters, tokens, dtype, wire_bytes = model
    compute = 6 * parameters * tokens / (GPUS[gpu][dtype] * REACHED)
    whole, one = collectives(gpu, parameters, wire_bytes, ranks)
    forward, backward = compute / 3, 2 * compute / 3
    late = {
        "Replicated": max(0, 2 * whole - backward) + 2 * one,
        "OptimizerState": max(0, 2 * whole - backward) + 2 * one + whole,
        "Gradients": max(0, whole - backward) + one + whole,
        "Full": max(0, whole - forward) + max(0, 2 * whole - backward) + 2 * one,
    }[strategy]
    sets = {"Replicated": 2, "OptimizerState": 3, "Gradients": 2, "Full": 3}[strategy]
    stepped = parameters if strategy == "Replicated" else parameters / ranks
    adam = (28 + (2 if wire_bytes == 2 else 0)) * stepped / GPUS[gpu]["memory"]
    return compute, sets * whole, late, adam


def tables():
    lines = []
    for model in MODELS:
        lines += [f"### {model[0]}", ""]
        for gpu in GPUS:
            compute = step(gpu, model, "Full", 2)[0]
            lines += [
                f"{gpu}: computing {compute * 1e3:.0f} ms. Communicating / of that exposed / Adam, in ms; step, in ms:",
                "",
                "| N | " + " | ".join(STRATEGIES) + " |",
                "|---|" + "---|" * len(STRATEGIES),
            ]
            for ranks in RANKS:
                cells = []
                for strategy in STRATEGIES:
                    compute, all_of_it, late, adam = step(gpu, model, strategy, ranks)
                    parts = " / ".join(f"{1e3 * part:.1f}" for part in (all_of_it, late, adam))
                    cells.append(f"{parts}; **{1e3 * (compute + late + adam):.0f}**")
                lines.append(f"| {ranks} | " + " | ".join(cells) + " |")
            lines.append("")
    return "\n".join(lines)


def main():
    if sys.argv[1:] != ["--check"]:
        print(tables())
        return
    document = pathlib.Path(__file__).parent.parent / "docs" / "performance.md"
    if tables().strip() not in document.read_text():
        sys.exit("docs/performance.md has not the tables of scripts/performance.py")


if __name__ == "__main__":
    main()
