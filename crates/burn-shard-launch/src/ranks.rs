//! The processes of this host: started, signalled and, last of all, reaped.
//!
//! An ended rank stays a zombie until [`Ranks::reap`]. Until then its number is its own, and a signal to
//! its process group cannot meet a stranger.

use std::{
    ffi::OsString,
    io,
    os::unix::process::CommandExt,
    process::{Child, ChildStderr, ChildStdout, Command, Stdio},
};

use rustix::{
    io::Errno,
    process::{Pid, Signal, WaitId, WaitIdOptions, kill_process_group, waitid},
};

use crate::{options::Options, outcome::Ending};

#[derive(Debug, Default)]
pub(crate) struct Ranks(Vec<Child>);

impl Ranks {
    /// Starts the next rank as leader of a process group.
    ///
    /// The thread that calls this has to outlive the rank: `PR_SET_PDEATHSIG` is about that thread.
    pub(crate) fn start(
        &mut self,
        options: &Options,
        variables: &[(&'static str, OsString)],
        removed: &[OsString],
    ) -> io::Result<(Pid, ChildStdout, ChildStderr)> {
        let mut command = Command::new(&options.program);
        for name in removed {
            command.env_remove(name);
        }
        command
            .args(&options.args)
            .envs(variables.iter().map(|(name, value)| (name, value)))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .process_group(0);
        die_with_launcher(&mut command);
        let mut child = command.spawn()?;
        let pipes = (child.stdout.take(), child.stderr.take());
        let pid = pid_of(&child);
        self.0.push(child);
        let (Some(out), Some(err)) = pipes else {
            unreachable!("both streams should be pipes");
        };
        Ok((pid, out, err))
    }

    /// Sends a signal to the process groups of the ranks that `to` picks, by their number on this host.
    pub(crate) fn signal(&self, signal: Signal, to: impl Fn(usize) -> bool) {
        for (_, child) in self.0.iter().enumerate().filter(|(index, _)| to(*index)) {
            // It fails if nobody is left in the group, or only another user's processes.
            kill_process_group(pid_of(child), signal).ok();
        }
    }

    pub(crate) fn pid(&self, local_rank: usize) -> u32 {
        self.0[local_rank].id()
    }

    /// Kills what is left in the groups, and lets their numbers go. Call it once all ranks have ended.
    pub(crate) fn reap(mut self) {
        self.signal(Signal::KILL, |_| true);
        for mut child in self.0.drain(..) {
            // Nothing can fail here that the ending, which is known, does not tell.
            child.wait().ok();
        }
    }
}

impl Drop for Ranks {
    fn drop(&mut self) {
        self.signal(Signal::KILL, |_| true);
    }
}

/// Waits for the process to end, and leaves it a zombie.
pub(crate) fn wait(pid: Pid) -> io::Result<Ending> {
    let options = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
    loop {
        match waitid(WaitId::Pid(pid), options) {
            Ok(Some(status)) => {
                let signal = status.terminating_signal().map(Ending::Signaled);
                let code = status.exit_status().map(Ending::Exited);
                return Ok(signal.or(code).unwrap_or(Ending::Exited(1)));
            }
            Ok(None) | Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

fn pid_of(child: &Child) -> Pid {
    Pid::from_child(child)
}

/// Lets the kernel kill the process when the launcher dies.
#[cfg(target_os = "linux")]
#[allow(
    unsafe_code,
    reason = "no crate can make `pre_exec` safe for any closure"
)]
fn die_with_launcher(command: &mut Command) {
    use rustix::process::{getpid, getppid, set_parent_process_death_signal};

    let launcher = getpid();
    // SAFETY: between fork and exec only what is safe in a signal handler may be called. The closure
    // makes two system calls, and neither allocates nor takes a lock: errors from numbers do not.
    unsafe {
        command.pre_exec(move || {
            set_parent_process_death_signal(Some(Signal::KILL))?;
            // The launcher may have died before: then no signal comes.
            if getppid() == Some(launcher) {
                Ok(())
            } else {
                Err(Errno::SRCH.into())
            }
        });
    }
}

#[cfg(not(target_os = "linux"))]
fn die_with_launcher(_: &mut Command) {}
