#!/usr/bin/env python3
"""Runs burn-shard and its PyTorch peers in turn, A B A B, and prints a table of ratios within a round.

usage: compare.py PATH/TO/vs_ddp [--rounds 3] [--model large] ...   (from a Python with torch, transformers and fairscale)
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
PEERS = ["ddp_view", "zero1", "sdp", "fsdp2"]
OURS = ["ddp", "zero1", "zero2", "zero3"]


def run(command):
    output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    return json.loads(output.strip().splitlines()[-1])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("vs_ddp", help="the benchmark binary, built with --release")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", default="large")
    parser.add_argument("--seq-len", default="32")
    parser.add_argument("--micro-batch", default="1")
    parser.add_argument("--warmup", default="1")
    parser.add_argument("--steps", default="4")
    parser.add_argument("--peers", default=",".join(PEERS))
    parser.add_argument("--ours", default=",".join(OURS))
    args = parser.parse_args()
    workload = ["--model", args.model, "--seq-len", args.seq_len, "--micro-batch", args.micro_batch,
                "--warmup", args.warmup, "--steps", args.steps]
    commands = {}
    for peer, ours in itertools.zip_longest(args.peers.split(","), args.ours.split(",")):
        if peer:
            commands[f"torch {peer}"] = [sys.executable, f"{HERE}/peer.py", "--mode", peer, *workload]
        if ours:
            commands[f"burn-shard {ours}"] = [
                args.vs_ddp, "--child", "--strategies", ours, "--world-sizes", "2", *workload]
    rounds = {name: [] for name in commands}
    for number in range(args.rounds):
        for name, command in commands.items():
            result = run(command)
            seconds = statistics.median(result["step_seconds"])
            peak = result["resident_peak_bytes_per_rank"]
            rounds[name].append((seconds, peak))
            print(f"round {number}: {name}: {seconds:.3f} s/step, load {os.getloadavg()[0]:.1f}", file=sys.stderr)
    reference = next(iter(commands))
    print(f"| trainer | s/step, median | step / {reference} (range over rounds) | resident peak GiB per rank |")
    print("|---|---|---|---|")
    for name, measured in rounds.items():
        ratios = [ours[0] / theirs[0] for ours, theirs in zip(measured, rounds[reference])]
        print(f"| {name} | {statistics.median(s for s, _ in measured):.3f} | {statistics.median(ratios):.2f} "
              f"({min(ratios):.2f}-{max(ratios):.2f}) | {statistics.median(p for _, p in measured) / 2**30:.2f} |")


if __name__ == "__main__":
    main()
