//! What SLURM writes in notations of its own.
//!
//! A *step* (one `srun`) may use part of the job's hosts: variables of the step come first.

use super::{PlacementError, Vars};

/// First host of the step, or of the job: the one that runs task 0 unless the distribution was chosen
/// by hand.
pub(super) fn first_host(vars: Vars<'_>) -> Result<Option<String>, PlacementError> {
    for variable in ["SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"] {
        if let Some(value) = vars.text(variable)? {
            let expected = "a list of hosts such as gpu[001-003,007],login1 (set MASTER_ADDR to the host of rank 0)";
            let host = first_of(&value);
            let bad = || PlacementError::BadList {
                variable,
                value: value.clone(),
                expected,
            };
            return host.map(Some).ok_or_else(bad);
        }
    }
    Ok(None)
}

/// `gpu001` of `gpu[001-003,007],login1`.
fn first_of(list: &str) -> Option<String> {
    let mut host = String::new();
    let mut rest = list;
    loop {
        let end = rest.find(['[', ',']).unwrap_or(rest.len());
        host.push_str(&rest[..end]);
        if !rest[end..].starts_with('[') {
            break;
        }
        let (range, after) = rest[end + 1..].split_once(']')?;
        let first = range.split([',', '-']).next()?;
        if first.is_empty() || !first.bytes().all(|byte| byte.is_ascii_digit()) {
            return None;
        }
        host.push_str(first);
        rest = after;
    }
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    (!host.is_empty() && host.bytes().all(allowed)).then_some(host)
}

/// Tasks on this host, and the variable that told; `None` if SLURM does not tell.
pub(super) fn local_world_size(
    vars: Vars<'_>,
) -> Result<(&'static str, Option<usize>), PlacementError> {
    for variable in ["SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"] {
        if let Some(value) = vars.text(variable)? {
            let node = vars.number::<usize>("SLURM_NODEID")?.unwrap_or(0);
            let expected = "a list of counts such as 4(x2),3 (unset it)";
            let tasks = tasks_at(&value, node);
            let bad = || PlacementError::BadList {
                variable,
                value: value.clone(),
                expected,
            };
            return Ok((variable, tasks.map_err(|NotAList| bad())?));
        }
    }
    let variable = "SLURM_NTASKS_PER_NODE";
    Ok((variable, vars.number(variable)?))
}

struct NotAList;

/// Entry `node` of `4(x2),3`, which is short for 4, 4, 3.
fn tasks_at(list: &str, node: usize) -> Result<Option<usize>, NotAList> {
    let mut left = node;
    let mut found = None;
    for part in list.split(',') {
        let (tasks, hosts) = match part.split_once("(x") {
            Some((tasks, hosts)) => (tasks, hosts.strip_suffix(')').ok_or(NotAList)?),
            None => (part, "1"),
        };
        let tasks: usize = tasks.parse().map_err(|_| NotAList)?;
        let hosts: usize = hosts.parse().map_err(|_| NotAList)?;
        if found.is_none() && left < hosts {
            found = Some(tasks);
        }
        left = left.saturating_sub(hosts);
    }
    Ok(found)
}

/// `1234.0`, job and step: two steps of one job are two jobs to us. Empty if SLURM does not tell.
///
/// The shell of a batch script has rank and size of a task, but no step, and no other task will come.
pub(super) fn job_id(vars: Vars<'_>, world_size: usize) -> Result<String, PlacementError> {
    match (vars.text("SLURM_JOB_ID")?, vars.text("SLURM_STEP_ID")?) {
        (_, None) if world_size > 1 => Err(PlacementError::BatchShell { world_size }),
        (Some(job), Some(step)) => Ok(format!("{job}.{step}")),
        (job, _) => Ok(job.unwrap_or_default()),
    }
}
