//! `burn-shard estimate`: whether a model fits, and which strategy to take, before anything is written.
#![allow(clippy::doc_markdown, reason = "the comments are what --help prints")]

use std::fmt::Write as _;
use std::process::ExitCode;

use clap::Args;

use crate::estimate::{Gpu, Job, Precision, Strategy, Transformer};
use crate::report;

/// A model that takes less of the memory than this is not worth sharding.
const SMALL: f64 = 0.5;
/// Steps that differ by less are as fast.
const AS_FAST: f64 = 1.02;

#[derive(Args)]
pub(crate) struct Estimate {
    /// Parameters of the model: 336e6, 7e9.
    #[arg(long, value_name = "COUNT", value_parser = positive)]
    parameters: f64,
    /// Numbers of ranks, each with a GPU of its own.
    #[arg(long, value_name = "RANKS", num_args = 1.., default_values_t = [8], value_parser = ranks)]
    ranks: Vec<usize>,
    /// Type of computation; master weights are f32.
    #[arg(long, value_enum, default_value_t = Precision::Bf16)]
    precision: Precision,
    /// The GPU.
    #[arg(long, value_enum, default_value_t = Gpu::H100)]
    gpu: Gpu,
    /// Memory of a rank, in GB.
    #[arg(long, value_name = "GB", default_value_t = 80.0, value_parser = positive)]
    memory: f64,
    /// Bandwidth between machines, per rank, in GB/s; up to 8 ranks use NVLink.
    #[arg(long, value_name = "GB/s", default_value_t = 25.0, value_parser = positive)]
    link: f64,
    /// Tokens per rank and step [default: sequence times micro-batch, or 16384]
    #[arg(long, value_name = "COUNT", value_parser = positive)]
    tokens: Option<f64>,
    /// Layers are computed again in backward.
    #[arg(long)]
    activation_checkpointing: bool,
    /// Layers of a transformer, whose activations are counted then.
    #[arg(long, value_parser = positive, requires_all = ["hidden", "heads", "sequence"])]
    layers: Option<f64>,
    /// Width of a layer.
    #[arg(long, value_parser = positive, requires = "layers")]
    hidden: Option<f64>,
    /// Attention heads.
    #[arg(long, value_parser = positive, requires = "layers")]
    heads: Option<f64>,
    /// Tokens of a row.
    #[arg(long, value_parser = positive, requires = "layers")]
    sequence: Option<f64>,
    /// Rows per rank.
    #[arg(long, value_parser = positive, requires = "layers", default_value_t = 1.0)]
    micro_batch: f64,
}

pub(crate) fn run(options: &Estimate) -> ExitCode {
    report::print("estimate", &text(options))
}

fn text(options: &Estimate) -> String {
    let transformer = match (
        options.layers,
        options.hidden,
        options.heads,
        options.sequence,
    ) {
        (Some(layers), Some(hidden), Some(heads), Some(sequence)) => Some(Transformer {
            layers,
            hidden,
            heads,
            sequence,
            micro_batch: options.micro_batch,
        }),
        _ => None,
    };
    let recomputes = options.activation_checkpointing;
    let activations = transformer.map(|t| t.activations(options.precision, recomputes));
    let own_tokens = transformer.map(|t| t.sequence * t.micro_batch);
    let tokens = options.tokens.or(own_tokens).unwrap_or(16384.0);
    let mut out = String::new();
    let mut say =
        |line: String| writeln!(out, "{line}").expect("writing to a string should succeed");
    say(format!(
        "{} parameters, {}, Adam; {tokens:.0} tokens per rank and step on {:?}; GB and ms per rank, by formula{}",
        count(options.parameters),
        match options.precision {
            Precision::F32 => "f32",
            Precision::Bf16 => "bf16 with f32 master weights",
        },
        options.gpu,
        match activations {
            Some(_) => "",
            None => ", activations not counted (give --layers, --hidden, --heads, --sequence)",
        }
    ));
    for &ranks in &options.ranks {
        let job = Job {
            parameters: options.parameters,
            precision: options.precision,
            ranks,
            tokens,
            recomputes,
            gpu: options.gpu,
            network: options.link * 1e9,
        };
        say(String::new());
        say(format!(
            "{:<9} {:>10} {:>10} {:>10} {:>10} {:>12} {:>9} | {:>8} {:>8} {:>8}",
            format!("{ranks} ranks"),
            "parameters",
            "gradients",
            "optimizer",
            "unsharded",
            "activations",
            "together",
            "compute",
            "exposed",
            "step"
        ));
        let mut fitting = Vec::new();
        for strategy in Strategy::ALL {
            let (memory, time) = (job.memory(strategy), job.time(strategy));
            let together = memory.together() + activations.unwrap_or(0.0);
            let fits = together <= options.memory * 1e9;
            if fits {
                fitting.push((strategy, together, time.together()));
            }
            let gb = |bytes: f64| format!("{:.1}", bytes / 1e9);
            let ms = |seconds: f64| format!("{:.1}", seconds * 1e3);
            say(format!(
                "{strategy:<9} {:>10} {:>10} {:>10} {:>10} {:>12} {:>9} | {:>8} {:>8} {:>8}{}",
                gb(memory.parameters),
                gb(memory.gradients),
                gb(memory.optimizer),
                gb(memory.unsharded),
                activations.map_or("-".to_owned(), gb),
                gb(together),
                ms(time.compute),
                ms(time.exposed),
                ms(time.together()),
                if fits { "" } else { "  does not fit" }
            ));
        }
        say(advice(&fitting, options));
    }
    out
}

/// One sentence.
fn advice(fitting: &[(Strategy, f64, f64)], options: &Estimate) -> String {
    let memory = options.memory;
    let Some(&(first, first_bytes, _)) = fitting.first() else {
        let more = match options.activation_checkpointing {
            true => "more ranks, or a smaller micro-batch",
            false => "more ranks, a smaller micro-batch, or --activation-checkpointing",
        };
        return format!("nothing fits in {memory} GB: {more}");
    };
    if first == Strategy::Replicated && first_bytes < SMALL * memory * 1e9 {
        return format!("do not shard: a whole copy takes less than half of {memory} GB (ddp)");
    }
    let seconds = fitting.iter().map(|&(_, _, seconds)| seconds);
    let fastest = seconds.fold(f64::INFINITY, f64::min);
    let as_fast = |&&(_, _, seconds): &&(Strategy, f64, f64)| seconds <= AS_FAST * fastest;
    // Of those that are as fast, the one that leaves the most memory.
    let best = fitting
        .iter()
        .filter(as_fast)
        .min_by(|a, b| a.1.total_cmp(&b.1));
    let (best, bytes, _) = best.expect("the fastest is as fast as itself");
    format!(
        "{best}: of what fits in {memory} GB the fastest within {:.0} %, and {:.0} GB stay free",
        (AS_FAST - 1.0) * 100.0,
        memory - bytes / 1e9
    )
}

fn count(parameters: f64) -> String {
    match parameters {
        p if p >= 1e9 => format!("{:.1} B", p / 1e9),
        p if p >= 1e6 => format!("{:.1} M", p / 1e6),
        p => format!("{p:.0}"),
    }
}

fn positive(text: &str) -> Result<f64, String> {
    let value: f64 = text.parse().map_err(|_| "not a number".to_owned())?;
    if value.is_finite() && value > 0.0 {
        return Ok(value);
    }
    Err("not above 0".to_owned())
}

fn ranks(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(ranks @ 1..=32_768) => Ok(ranks),
        _ => Err("not from 1 to 32768".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        estimate: Estimate,
    }

    fn said(arguments: &str) -> String {
        let line = ["estimate"].into_iter().chain(arguments.split(' '));
        text(&Line::try_parse_from(line).unwrap().estimate)
    }

    #[test]
    fn the_advice_is_one_sentence_for_each_number_of_ranks() {
        let text = said("--parameters 7e9 --ranks 8 64 --memory 80");
        // Of 7 B parameters 126 GB would be whole on every rank: 4 P of masters, gradients and each moment, 2 P of bf16.
        assert!(
            text.contains(
                "ddp             28.0       28.0       56.0       14.0            -     126.0 |"
            ),
            "{text}"
        );
        assert_eq!(text.matches("does not fit").count(), 2, "{text}");
        assert_eq!(
            text.matches(": of what fits in 80 GB the fastest within 2 %")
                .count(),
            2
        );
        let small = said("--parameters 110e6 --precision f32");
        assert!(
            small.ends_with("do not shard: a whole copy takes less than half of 80 GB (ddp)\n"),
            "{small}"
        );
        let huge = said("--parameters 1e12 --ranks 2");
        assert!(huge.contains("nothing fits in 80 GB: more ranks"), "{huge}");
        assert!(huge.contains("activations not counted"), "{huge}");
    }

    #[test]
    fn activations_of_a_transformer_are_counted() {
        let sizes = "--parameters 336e6 --layers 24 --hidden 1024 --heads 16 --sequence 512 --micro-batch 32";
        let kept = said(sizes);
        assert!(!kept.contains("not counted"), "{kept}");
        let recomputed = said(&format!("{sizes} --activation-checkpointing"));
        let activations = |text: &str| {
            let row = text
                .lines()
                .find(|line| line.starts_with("zero3"))
                .unwrap()
                .to_owned();
            row.split_whitespace()
                .nth(5)
                .unwrap()
                .parse::<f64>()
                .unwrap()
        };
        assert!(
            activations(&recomputed) < activations(&kept) / 8.0,
            "{kept}{recomputed}"
        );
    }

    #[test]
    fn numbers_that_make_no_sense_are_refused() {
        for arguments in [
            "--parameters 0",
            "--parameters nan",
            "--parameters 1e9 --ranks 0",
            "--parameters 1e9 --layers 3",
            "--parameters 1e9 --memory -1",
        ] {
            let line = ["estimate"].into_iter().chain(arguments.split(' '));
            assert!(Line::try_parse_from(line).is_err(), "{arguments}");
        }
    }
}
