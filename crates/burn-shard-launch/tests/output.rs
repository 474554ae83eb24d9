//! What ranks write arrives whole, in its bytes, and on its stream.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, reason = "a test ends at the first error")]

mod common;

use common::{Job, text};

#[test]
fn streams_stay_apart_and_bytes_as_they_are() {
    let script = r"printf '\351t\351 \000\033[1m\r|\n\nno end'; echo warning >&2";
    let output = Job::new("-n 1", script).run();
    assert_eq!(
        output.stdout,
        b"[0] \xe9t\xe9 \0\x1b[1m\r|\n[0] \n[0] no end\n"
    );
    let err = text(&output.stderr);
    let err: Vec<&str> = err
        .lines()
        .filter(|line| !line.starts_with("[launch] "))
        .collect();
    assert_eq!(err, ["[0] warning"]);
}

#[test]
fn lines_of_many_ranks_stay_whole_even_in_one_file() {
    // Longer than a pipe takes at once: without order, parts of lines would alternate.
    let script = "line=$(head -c 200000 /dev/zero | tr '\\0' $RANK)
        for i in $(seq 5); do echo o$line; echo e$line >&2; done";
    let mut job = Job::new("-n 4", script);
    job.wrap("exec \"$@\" 2>&1");
    let output = job.run();
    let lines: Vec<&str> = text(&output.stdout).lines().collect();
    let lines: Vec<&str> = lines
        .into_iter()
        .filter(|line| !line.starts_with("[launch]"))
        .collect();
    assert_eq!(lines.len(), 4 * 10);
    for rank in 0..4 {
        let digits = rank.to_string().repeat(200_000);
        for stream in ["o", "e"] {
            let expected = format!("[{rank}] {stream}{digits}");
            let found = lines.iter().filter(|line| **line == expected).count();
            assert_eq!(found, 5, "lines of rank {rank}, stream {stream}");
        }
    }
}

#[test]
fn a_line_of_a_megabyte_is_one_line() {
    let script = "head -c 1048576 /dev/zero | tr '\\0' x; echo";
    let output = Job::new("-n 2", script).run();
    let lines: Vec<usize> = text(&output.stdout).lines().map(str::len).collect();
    assert_eq!(lines, [(1 << 20) + 4; 2]);
    let output = Job::new("-n 1", &format!("{script}; exit 3")).run();
    let err = text(&output.stderr);
    let (_, tail) = err.split_once("last lines of rank 0:\n").unwrap();
    assert_eq!(tail, format!("    {}\n", "x".repeat(500)), "{}", err.len());
}

#[test]
fn a_rank_may_close_its_output_and_go_on() {
    let output = Job::new(
        "-n 2",
        "echo said; exec >&- 2>&-; sleep 1; exit $((RANK * 6))",
    )
    .run();
    assert_eq!(output.status.code(), Some(6), "{}", text(&output.stderr));
    assert_eq!(text(&output.stdout).matches("said").count(), 2);
}

#[test]
fn a_slow_reader_gets_everything() {
    let mut running = Job::new("-n 1", "head -c 100000 /dev/zero | tr '\\0' '\\n'").start();
    running.wait_for("[0]", 1);
    // Longer than the launcher waits for output that nobody writes.
    std::thread::sleep(std::time::Duration::from_secs(8));
    let (status, out, err) = running.end();
    assert!(status.success(), "{err}");
    assert_eq!(out.lines().count(), 100_000 - 1, "{err}");
}

#[test]
fn a_job_goes_on_when_nobody_reads_its_output() {
    // More than pipes hold, so that the ranks are not done before the reader is gone.
    let script = "head -c 300000 /dev/zero | tr '\\0' '\\n'; echo end >&2";
    let mut running = Job::new("-n 2", script).start();
    running.wait_for("]", 1);
    // A pipe without a reader.
    running.out = std::io::BufReader::new(closed());
    let mut launcher = running.launcher;
    let err = std::io::read_to_string(launcher.stderr.take().unwrap()).unwrap();
    assert!(launcher.wait().unwrap().success(), "{err}");
    assert_eq!(err.matches("] end").count(), 2, "{err}");
    assert!(err.contains("what ranks write there is lost"), "{err}");
    running.job.assert_gone();
}

/// The output of a process that has none.
fn closed() -> std::process::ChildStdout {
    let mut child = std::process::Command::new("true")
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    child.wait().unwrap();
    child.stdout.take().unwrap()
}
