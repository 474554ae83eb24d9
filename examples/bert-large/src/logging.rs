//! What the libraries log goes to stderr, as `RUST_LOG` says (`RUST_LOG=info`, or
//! `burn_shard_comm=debug`). Without it, warnings.

use std::io::Write;

use env_filter::Filter;
use log::{Log, Metadata, Record};

/// `env_logger` would do this, but switches features of `log` on that build all of Burn again.
struct Stderr(Filter);

impl Log for Stderr {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        self.0.enabled(metadata)
    }

    fn log(&self, record: &Record<'_>) {
        if self.0.matches(record) {
            let (level, target) = (record.level(), record.target());
            // One call: lines of ranks must not mix. Nobody may read stderr any more.
            let line = format!("{level:<5} {target}: {}\n", record.args());
            std::io::stderr().write_all(line.as_bytes()).ok();
        }
    }

    fn flush(&self) {}
}

/// Installs the logger of this process, unless it has one.
///
/// # Errors
/// `RUST_LOG` is none of its directives.
pub fn install() -> Result<(), String> {
    let directives = std::env::var("RUST_LOG").unwrap_or_else(|_| "warn".into());
    let mut builder = env_filter::Builder::new();
    builder
        .try_parse(&directives)
        .map_err(|error| format!("RUST_LOG is {directives:?}: {error}"))?;
    let filter = builder.build();
    let most = filter.filter();
    let logger: &'static Stderr = Box::leak(Box::new(Stderr(filter)));
    if log::set_logger(logger).is_ok() {
        log::set_max_level(most);
    }
    Ok(())
}
