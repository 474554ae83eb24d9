//! The CUDA lowering of every kernel: compiles, assembles, moves 16 bytes at once, spills nothing.
//!
//! Without a GPU, a driver, or CUDA's toolkit. With `WRITE_PTX_REPORT=1` the table goes to
//! `docs/ptx.md`.

#![cfg(feature = "ptx")]
#![allow(clippy::unwrap_used, reason = "a test ends at the first error")]

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use burn_shard_kernels::cube::ptx::{Ptx, compile_all};

/// A100 and H100.
const ARCHS: [u32; 2] = [80, 90];

/// What the assembler says of a kernel.
struct Report {
    registers: usize,
    stack_bytes: usize,
    spill_bytes: usize,
}

fn ptxas() -> PathBuf {
    let path = std::env::var_os("PTXAS").map_or_else(|| "ptxas".into(), PathBuf::from);
    let works = Command::new(&path).arg("--version").output();
    assert!(
        works.is_ok_and(|output| output.status.success()),
        "{} does not run: this test needs an assembler of CUDA 12.8 or later \
         (PTXAS=$(scripts/ptxas.sh) fetches one)",
        path.display()
    );
    path
}

fn assemble(ptxas: &Path, arch: u32, ptx: &Ptx) -> Report {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let file = folder.join("kernel.ptx");
    std::fs::write(&file, &ptx.text).unwrap();
    // As the text targets it: some features of sm_90 are of sm_90a.
    let target = ptx
        .text
        .lines()
        .find_map(|line| line.strip_prefix(".target "))
        .unwrap()
        .split(',')
        .next()
        .unwrap();
    assert!(
        target.starts_with(&format!("sm_{arch}")),
        "{}: {target}",
        ptx.name
    );
    let output = Command::new(ptxas)
        .arg("-v")
        .arg(format!("-arch={target}"))
        .arg("-o")
        .arg(folder.join("kernel.cubin"))
        .arg(&file)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned()
        + &String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success(),
        "{} for sm_{arch}: {said}\n{}",
        ptx.name,
        ptx.text
    );
    let number_before = |what: &str| -> usize {
        let before = &said[..said
            .find(what)
            .unwrap_or_else(|| panic!("no `{what}` in {said}"))];
        before
            .split_whitespace()
            .next_back()
            .unwrap()
            .parse()
            .unwrap()
    };
    Report {
        registers: number_before(" registers"),
        stack_bytes: number_before(" bytes stack frame"),
        spill_bytes: number_before(" bytes spill stores") + number_before(" bytes spill loads"),
    }
}

/// Instructions that load or store 16 bytes of global memory at once.
fn wide(text: &str, instruction: &str) -> usize {
    text.lines()
        .map(str::trim_start)
        .filter(|line| line.starts_with(instruction))
        .filter(|line| {
            let name = line.split_whitespace().next().unwrap_or_default();
            [
                "v4.b32", "v4.f32", "v4.u32", "v2.b64", "v2.f64", "v2.u64", "b128",
            ]
            .iter()
            .any(|width| name.ends_with(width))
        })
        .count()
}

#[test]
fn every_kernel_assembles_without_spills_and_moves_16_bytes_at_once() {
    let ptxas = ptxas();
    let mut table = String::new();
    for arch in ARCHS {
        for ptx in compile_all(arch) {
            let report = assemble(&ptxas, arch, &ptx);
            let loads = wide(&ptx.text, "ld.global");
            let stores = wide(&ptx.text, "st.global");
            let fma = ptx.text.matches("fma.rn").count();
            let approximate =
                ptx.text.matches(".approx").count() + ptx.text.matches("div.full").count();
            writeln!(
                table,
                "| {} | sm_{arch} | {} | {} | {loads} | {stores} | {fma} |",
                ptx.name, report.registers, report.spill_bytes
            )
            .unwrap();
            let what = format!("{} for sm_{arch}", ptx.name);
            assert_eq!(report.spill_bytes, 0, "{what}: bytes spilled");
            assert_eq!(report.stack_bytes, 0, "{what}: bytes of stack");
            assert!(
                !ptx.text.contains(".local"),
                "{what} has local memory:\n{}",
                ptx.text
            );
            assert_eq!(
                approximate, 0,
                "{what}: approximate divisions or roots:\n{}",
                ptx.text
            );
            // One for each buffer, more where a loop was unrolled, none beside them.
            assert!(
                loads >= ptx.wide_loads && (loads > 0) == (ptx.wide_loads > 0),
                "{what}: {loads} loads of 16 bytes, expected {}:\n{}",
                ptx.wide_loads,
                ptx.text
            );
            assert!(
                stores >= ptx.wide_stores && (stores > 0) == (ptx.wide_stores > 0),
                "{what}: {stores} stores of 16 bytes, expected {}:\n{}",
                ptx.wide_stores,
                ptx.text
            );
        }
    }
    println!("{HEAD}{table}");
    if std::env::var_os("WRITE_PTX_REPORT").is_some() {
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/ptx.md");
        std::fs::write(file, format!("{HEAD}{table}")).unwrap();
    }
}

const HEAD: &str = "\
# The kernels on CUDA

What CubeCL 0.11.3 makes of the kernels for CUDA, and `ptxas` 12.9 of that. Nothing here was run: it is
what can be known without a GPU. Written by

```sh
PTXAS=$(scripts/ptxas.sh) WRITE_PTX_REPORT=1 \\
    cargo test -p burn-shard-kernel-checks --features ptx --test ptx
```

which fails where a kernel does not compile, spills registers, has local memory or an approximate division
or root, or loads or stores less than 16 bytes where it is meant to.

`loads` and `stores` are instructions of 16 bytes (`v4.b32`); those of bf16 and of single values are
narrower and do not count. `fma` is what was contracted: these are the operations that may differ from
the scalar loops in the last bit. `64-bit` is for buffers beyond 2^31 elements.

| kernel | for | registers | spilled bytes | loads | stores | fma |
|---|---|---|---|---|---|---|
";
