#!/usr/bin/env python3
"""One measurement of a PyTorch data-parallel trainer on CPU, over gloo: BERT, masked tokens, f32, fused Adam.

Prints one JSON object: seconds of each measured step (rank 0, barrier to barrier) and the peak resident set above what the
process had after its imports, the largest over the ranks.

modes: ddp_view (DDP, gradient_as_bucket_view), zero1 (DDP views + ZeroRedundancyOptimizer), sdp (FairScale OSS + ShardedDDP),
fsdp2 (fully_shard per layer)
"""

import argparse
import json
import os
import socket
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from transformers import BertConfig, BertForMaskedLM

SHAPES = {"large": (24, 1024, 16), "base": (12, 768, 12), "small": (4, 256, 4)}


def status(key):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(key))


def build(args):
    layers, hidden, heads = SHAPES[args.model]
    config = BertConfig(
        vocab_size=30522, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads,
        intermediate_size=4 * hidden, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )
    torch.manual_seed(0)
    return BertForMaskedLM(config).train()


def wrap(args, model):
    adam = dict(lr=1e-4, eps=1e-8)
    if args.mode == "ddp_view":
        from torch.nn.parallel import DistributedDataParallel

        optimizer = torch.optim.Adam(model.parameters(), fused=True, **adam)
        return DistributedDataParallel(model, gradient_as_bucket_view=True), optimizer
    if args.mode == "zero1":
        from torch.distributed.optim import ZeroRedundancyOptimizer
        from torch.nn.parallel import DistributedDataParallel

        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.Adam, parameters_as_bucket_view=True, fused=True, **adam)
        return DistributedDataParallel(model, gradient_as_bucket_view=True), optimizer
    if args.mode == "sdp":
        from fairscale.nn.data_parallel import ShardedDataParallel
        from fairscale.optim import OSS

        optimizer = OSS(model.parameters(), optim=torch.optim.Adam, fused=True, **adam)
        return ShardedDataParallel(model, optimizer), optimizer
    if args.mode == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (args.world_size,))
        for layer in model.bert.encoder.layer:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model, torch.optim.Adam(model.parameters(), fused=True, **adam)
    raise SystemExit(f"unknown mode {args.mode}")


def rank_main(rank, args, port, results):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=args.world_size)
    imported = status("VmRSS:")
    model, optimizer = wrap(args, build(args))
    generator = torch.Generator().manual_seed(rank)
    ids = torch.randint(10, 30522, (args.micro_batch, args.seq_len), generator=generator)
    seconds = []
    for step in range(args.warmup + args.steps):
        dist.barrier()
        if step == args.warmup:
            with open("/proc/self/clear_refs", "w") as file:
                file.write("5")
        start = time.perf_counter()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        # FairScale's buckets need the wrapper's own zero_grad: the optimizer's cuts them off.
        (model if args.mode == "sdp" else optimizer).zero_grad()
        dist.barrier()
        if step >= args.warmup:
            seconds.append(time.perf_counter() - start)
    results.put((rank, seconds, status("VmHWM:") - imported))
    dist.barrier()
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", required=True)
    parser.add_argument("--model", default="large", choices=SHAPES)
    parser.add_argument("--seq-len", type=int, default=32)
    parser.add_argument("--micro-batch", type=int, default=1)
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--world-size", type=int, default=2)
    args = parser.parse_args()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = mp.get_context("spawn")
    results = context.SimpleQueue()
    processes = [
        context.Process(target=rank_main, args=(rank, args, port, results)) for rank in range(args.world_size)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(900)
        if process.exitcode != 0:
            for other in processes:
                other.kill()
            raise SystemExit(f"a rank of {args.mode} ended with {process.exitcode}")
    ranks = sorted(results.get() for _ in processes)
    print(json.dumps({
        "mode": args.mode,
        "step_seconds": ranks[0][1],
        "resident_peak_bytes_per_rank": max(peak for _, _, peak in ranks),
    }))


if __name__ == "__main__":
    main()
