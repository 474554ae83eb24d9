//! A shell that outlives the launcher by a moment: it kills the ranks' process groups if the launcher
//! is gone without a word.
//!
//! The kernel kills the ranks themselves in that case (`ranks.rs`), but not what they have started.

use std::{
    io::{self, Write},
    os::unix::process::CommandExt,
    path::Path,
    process::{Child, ChildStdin, Command, Stdio},
};

use rustix::process::Pid;

/// Reads a process group per line; the line `done` comes from a launcher that has ended its job. The end of
/// the input without that line is the launcher's death: then the groups are killed, and the folder in the
/// first argument is removed.
const SCRIPT: &str = r#"trap '' INT TERM HUP USR1 USR2
groups=
while read -r group; do
    [ "$group" = done ] && exit 0
    groups="$groups -$group"
done
[ -n "$groups" ] && kill -s KILL -- $groups
rm -rf -- "$1"
"#;

#[derive(Debug)]
pub(crate) struct Watch {
    shell: Child,
    pipe: ChildStdin,
}

impl Watch {
    /// `folder` is removed if the launcher dies.
    pub(crate) fn start(folder: &Path) -> io::Result<Self> {
        let mut shell = Command::new("/bin/sh")
            .args(["-c", SCRIPT, "burn-shard-watch"])
            .arg(folder)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .current_dir("/")
            .process_group(0)
            .spawn()?;
        let pipe = shell
            .stdin
            .take()
            .expect("the standard input should be a pipe");
        Ok(Self { shell, pipe })
    }

    pub(crate) fn add(&mut self, group: Pid) -> io::Result<()> {
        writeln!(self.pipe, "{}", group.as_raw_nonzero())
    }

    /// Dropping a watch without this call kills the groups.
    pub(crate) fn done(mut self) {
        // If somebody has ended the shell before, there is nothing to dismiss.
        writeln!(self.pipe, "done").ok();
        self.shell.wait().ok();
    }
}
