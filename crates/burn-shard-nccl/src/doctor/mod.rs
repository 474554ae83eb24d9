//! What of a machine training needs, and what each lack means: the command `burn-shard doctor`.
//!
//! Nothing is linked: drivers and libraries are looked for as training will look for them.

mod gpu;
mod host;

use std::fmt;

/// What was found, in the order in which it matters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    findings: Vec<Finding>,
}

/// One thing that was looked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// What was looked for.
    pub what: &'static str,
    /// What was found, in one line.
    pub found: String,
    /// What follows from what is missing, and how it is mended; empty if nothing is.
    pub lack: String,
}

impl Finding {
    fn good(what: &'static str, found: impl Into<String>) -> Self {
        Self {
            what,
            found: found.into(),
            lack: String::new(),
        }
    }

    fn lack(what: &'static str, found: impl Into<String>, lack: impl Into<String>) -> Self {
        Self {
            what,
            found: found.into(),
            lack: lack.into(),
        }
    }

    /// Whether all is there.
    #[must_use]
    pub fn is_good(&self) -> bool {
        self.lack.is_empty()
    }
}

impl Report {
    /// Looks at this machine, as this process sees it. Takes as long as starting the driver does.
    #[must_use]
    pub fn new() -> Self {
        let findings = if cfg!(target_os = "linux") {
            [gpu::findings(), host::findings()].concat()
        } else {
            vec![host::cores(), not_linux()]
        };
        Self { findings }
    }

    /// What was looked for.
    #[must_use]
    pub fn findings(&self) -> &[Finding] {
        &self.findings
    }
}

/// What is looked for, and where, is Linux's.
fn not_linux() -> Finding {
    Finding::lack(
        "system",
        std::env::consts::OS,
        "drivers, NCCL, MPI, huge pages, shared memory and limits are looked for on Linux only, and NCCL is for Linux only; ranks as threads and over TCP need none of it",
    )
}

impl Default for Report {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Display for Report {
    /// One line for each, and one below it for what a lack means.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for finding in &self.findings {
            let mark = if finding.is_good() { "ok" } else { "--" };
            writeln!(f, "{mark}  {:<14} {}", finding.what, finding.found)?;
            if !finding.is_good() {
                writeln!(f, "    {:<14} -> {}", "", finding.lack)?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_lack_says_what_it_means() {
        let report = Report {
            findings: vec![
                Finding::good("cores", "8"),
                Finding::lack("driver", "none", "no training on GPUs"),
            ],
        };
        assert_eq!(
            report.to_string(),
            "ok  cores          8\n--  driver         none\n                   -> no training on GPUs\n"
        );
    }

    #[test]
    fn another_system_is_told_what_is_not_looked_for() {
        let finding = not_linux();
        assert!(!finding.is_good());
        assert!(finding.lack.contains("on Linux only"), "{finding:?}");
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_machine_is_described_whatever_it_lacks() {
        let report = Report::new();
        let names: Vec<_> = report.findings().iter().map(|one| one.what).collect();
        for what in [
            "driver",
            "libdevice",
            "NCCL",
            "MPI",
            "cores",
            "huge pages",
            "/dev/shm",
            "locked memory",
            "open files",
        ] {
            assert!(names.contains(&what), "{what} in {names:?}");
        }
        assert!(report.findings().iter().all(|one| !one.found.is_empty()));
    }
}
