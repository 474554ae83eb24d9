//! What processes on one machine share: MPI, cores, memory and its limits.

use std::{env, fs, thread};

use libloading::Library;

use super::Finding;

/// NCCL and others keep rings there.
const SHM_BYTES: u64 = 1 << 30;
/// Sockets of a few thousand ranks.
const OPEN_FILES: u64 = 4096;
const MPI: [&str; 3] = ["libmpi.so.40", "libmpi.so.12", "libmpi.so"];

pub(super) fn findings() -> Vec<Finding> {
    let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
    let limits = read("/proc/self/limits");
    vec![
        mpi(),
        cores(),
        huge_pages(&read("/sys/kernel/mm/transparent_hugepage/enabled")),
        shared_memory(&read("/proc/mounts")),
        locked_memory(&limits),
        open_files(&limits),
    ]
}

fn mpi() -> Finding {
    const WHAT: &str = "MPI";
    // SAFETY: what has one of these names is MPI, whose initializers are made for this.
    let library = MPI
        .iter()
        .find(|name| unsafe { Library::new(**name) }.is_ok());
    let paths = env::var_os("PATH").unwrap_or_default();
    let starter = env::split_paths(&paths)
        .map(|folder| folder.join("mpirun"))
        .find(|file| file.is_file());
    let lack = "no `--comm mpi`, no mpirun; TCP and `burn-shard launch` need neither (Debian: libopenmpi-dev, openmpi-bin)";
    match (library, starter) {
        (Some(library), Some(starter)) => {
            Finding::good(WHAT, format!("{library}, {}", starter.display()))
        }
        (Some(library), None) => Finding::lack(WHAT, format!("{library}, no mpirun"), lack),
        (None, Some(starter)) => {
            Finding::lack(WHAT, format!("no library, {}", starter.display()), lack)
        }
        (None, None) => Finding::lack(WHAT, "not found", lack),
    }
}

pub(super) fn cores() -> Finding {
    match thread::available_parallelism() {
        Ok(cores) => Finding::good("cores", format!("{cores} that this process may use")),
        Err(error) => Finding::lack(
            "cores",
            format!("unknown: {error}"),
            "set RAYON_NUM_THREADS to the cores of each rank",
        ),
    }
}

fn huge_pages(enabled: &str) -> Finding {
    const WHAT: &str = "huge pages";
    let chosen = enabled
        .split_whitespace()
        .find_map(|word| word.strip_prefix('[')?.strip_suffix(']'));
    match chosen {
        Some(chosen @ ("always" | "madvise")) => Finding::good(WHAT, chosen),
        chosen => Finding::lack(
            WHAT,
            chosen.unwrap_or("unknown"),
            "training on the CPU spends more time on page faults (echo madvise > /sys/kernel/mm/transparent_hugepage/enabled, as root)",
        ),
    }
}

fn shared_memory(mounts: &str) -> Finding {
    const WHAT: &str = "/dev/shm";
    let mount = mounts.lines().find_map(|line| {
        let mut fields = line.split_whitespace().skip(1);
        (fields.next()? == WHAT).then(|| fields.nth(1).unwrap_or_default())
    });
    let Some(options) = mount else {
        return Finding::lack(
            WHAT,
            "not mounted",
            "NCCL fails between ranks of one machine",
        );
    };
    let size = options
        .split(',')
        .find_map(|option| option.strip_prefix("size="));
    let Some(size) = size else {
        return Finding::good(WHAT, "half of the machine's memory");
    };
    match bytes(size) {
        Some(bytes) if bytes < SHM_BYTES => Finding::lack(
            WHAT,
            format!("{} MiB", bytes >> 20),
            "NCCL can fail between ranks of one machine, as can MPI (in a container: `--shm-size 1g`)",
        ),
        Some(bytes) => Finding::good(WHAT, format!("{} MiB", bytes >> 20)),
        None => Finding::good(WHAT, size),
    }
}

/// The bytes of a size as it is in the options of a mount: 65536k.
fn bytes(size: &str) -> Option<u64> {
    let (digits, unit) = size.split_at(
        size.find(|c: char| !c.is_ascii_digit())
            .unwrap_or(size.len()),
    );
    let shift = match unit {
        "" => 0,
        "k" => 10,
        "m" => 20,
        "g" => 30,
        _ => return None,
    };
    digits.parse::<u64>().ok()?.checked_mul(1 << shift)
}

fn locked_memory(limits: &str) -> Finding {
    const WHAT: &str = "locked memory";
    match soft_limit(limits, "Max locked memory") {
        Some("unlimited") => Finding::good(WHAT, "unlimited"),
        Some(bytes) => Finding::lack(
            WHAT,
            format!("{bytes} bytes"),
            "NCCL and MPI cannot register memory with InfiniBand (ulimit -l unlimited; in a container: `--ulimit memlock=-1`); nothing else needs it",
        ),
        None => Finding::lack(WHAT, "unknown", "see `ulimit -l`"),
    }
}

fn open_files(limits: &str) -> Finding {
    const WHAT: &str = "open files";
    match soft_limit(limits, "Max open files") {
        Some("unlimited") => Finding::good(WHAT, "unlimited"),
        Some(files) if files.parse::<u64>().is_ok_and(|files| files >= OPEN_FILES) => {
            Finding::good(WHAT, files)
        }
        Some(files) => Finding::lack(
            WHAT,
            files,
            "a group of as many ranks over TCP fails: each holds a connection to each (ulimit -n 65536)",
        ),
        None => Finding::lack(WHAT, "unknown", "see `ulimit -n`"),
    }
}

/// The soft limit of that name in the text of `/proc/self/limits`.
fn soft_limit<'a>(limits: &'a str, name: &str) -> Option<&'a str> {
    let line = limits.lines().find_map(|line| line.strip_prefix(name))?;
    line.split_whitespace().next()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_container_with_little_shared_memory_is_told() {
        let docker = "overlay / overlay rw 0 0\nshm /dev/shm tmpfs rw,nosuid,size=65536k 0 0\n";
        let finding = shared_memory(docker);
        assert!(!finding.is_good());
        assert_eq!(finding.found, "64 MiB");
        assert!(finding.lack.contains("--shm-size"));
        let host = "tmpfs /dev/shm tmpfs rw,nosuid,nodev 0 0";
        assert!(shared_memory(host).is_good());
        assert!(shared_memory("tmpfs /dev/shm tmpfs rw,size=8g 0 0").is_good());
        assert!(!shared_memory("").is_good());
    }

    #[test]
    fn limits_are_read_from_their_table() {
        let table = "Limit                     Soft Limit           Hard Limit           Units     \n\
                     Max open files            1024                 1048576              files     \n\
                     Max locked memory         8388608              unlimited            bytes     \n";
        assert_eq!(open_files(table).found, "1024");
        assert!(!open_files(table).is_good());
        assert!(!locked_memory(table).is_good());
        assert!(open_files(&table.replace("1024 ", "65536")).is_good());
        assert!(locked_memory("Max locked memory         unlimited  unlimited  bytes").is_good());
    }

    #[test]
    fn huge_pages_are_those_in_brackets() {
        assert!(huge_pages("always [madvise] never").is_good());
        assert!(!huge_pages("always madvise [never]").is_good());
        assert!(!huge_pages("").is_good());
    }
}
