//! Where a process stands, from environments as launchers leave them.
#![allow(clippy::unwrap_used, reason = "a test ends at the first error")]

use std::ffi::OsString;

use burn_shard_comm::{Launcher, Placement, PlacementError, Token};

/// Environment variables of one process, `NAME=value` by line.
fn read(environment: &str) -> Result<Option<Placement>, PlacementError> {
    Placement::from_vars(|name| find(environment, name))
}

fn placed(environment: &str) -> Placement {
    read(environment).unwrap().unwrap()
}

fn refused(environment: &str) -> PlacementError {
    read(environment).unwrap_err()
}

fn find(environment: &str, name: &str) -> Option<OsString> {
    environment.lines().find_map(|line| {
        let (found, value) = line.trim_start().split_once('=')?;
        (found == name).then(|| value.into())
    })
}

/// The names are those that torchrun of PyTorch 2.15 has set.
const TORCHRUN: &str = "RANK=5
    WORLD_SIZE=8
    LOCAL_RANK=1
    LOCAL_WORLD_SIZE=4
    GROUP_RANK=1
    MASTER_ADDR=gpu001
    MASTER_PORT=29500
    TORCHELASTIC_RUN_ID=none
    TORCHELASTIC_USE_AGENT_STORE=True";

/// Task 3 of `sbatch --nodes=2 --ntasks-per-node=2 scripts/slurm.sbatch`, recorded from Slurm 22.05.8
/// with two nodes on one machine.
const SLURM_TWO_HOSTS: &str = "SLURM_CPUS_ON_NODE=2
    SLURM_GTIDS=2,3
    SLURM_JOBID=2
    SLURM_JOB_CPUS_PER_NODE=2(x2)
    SLURM_JOB_ID=2
    SLURM_JOB_NODELIST=n[1-2]
    SLURM_JOB_NUM_NODES=2
    SLURM_LOCALID=1
    SLURM_NNODES=2
    SLURM_NODEID=1
    SLURM_NODELIST=n[1-2]
    SLURM_NPROCS=4
    SLURM_NTASKS=4
    SLURM_NTASKS_PER_NODE=2
    SLURM_PROCID=3
    SLURM_STEPID=0
    SLURM_STEP_ID=0
    SLURM_STEP_NODELIST=n[1-2]
    SLURM_STEP_NUM_NODES=2
    SLURM_STEP_NUM_TASKS=4
    SLURM_STEP_TASKS_PER_NODE=2(x2)
    SLURM_TASKS_PER_NODE=2(x2)";

/// A batch script's own shell in such a job, recorded likewise.
const SLURM_BATCH_SHELL: &str = "SLURM_JOB_ID=3
    SLURM_JOB_NODELIST=n[1-2]
    SLURM_LOCALID=0
    SLURM_NODEID=0
    SLURM_NODELIST=n[1-2]
    SLURM_NPROCS=4
    SLURM_NTASKS=4
    SLURM_NTASKS_PER_NODE=2
    SLURM_PROCID=0
    SLURM_TASKS_PER_NODE=2(x2)";

/// Task 9 of 13 on four hosts with 4, 4, 4 and 1 tasks, in the same form; not recorded.
const SLURM_FOUR_HOSTS: &str = "SLURM_JOB_ID=48213
    SLURM_JOBID=48213
    SLURM_STEP_ID=0
    SLURM_PROCID=9
    SLURM_LOCALID=1
    SLURM_NODEID=2
    SLURM_NTASKS=13
    SLURM_NPROCS=13
    SLURM_NNODES=4
    SLURM_JOB_NODELIST=gpu[001-003,007],login1
    SLURM_STEP_NODELIST=gpu[001-003,007]
    SLURM_NODELIST=gpu[001-003,007]
    SLURM_TASKS_PER_NODE=4(x3),1
    SLURM_STEP_TASKS_PER_NODE=4(x3),1";

const OPEN_MPI: &str = "OMPI_COMM_WORLD_RANK=2
    OMPI_COMM_WORLD_SIZE=3
    OMPI_COMM_WORLD_LOCAL_RANK=2
    OMPI_COMM_WORLD_LOCAL_SIZE=3
    OMPI_COMM_WORLD_NODE_RANK=2
    OMPI_UNIVERSE_SIZE=3
    PMIX_NAMESPACE=2204303361
    PMIX_RANK=2";

const HYDRA: &str = "PMI_RANK=1
    PMI_SIZE=2
    PMI_FD=7
    MPI_LOCALNRANKS=2
    MPI_LOCALRANKID=1";

#[test]
fn without_a_launcher_there_is_no_placement() {
    assert_eq!(
        read("HOME=/root\nMASTER_ADDR=gpu001\nMASTER_PORT=29500\nBURN_SHARD_TOKEN=x"),
        Ok(None)
    );
}

#[test]
fn torchrun_is_understood() {
    let expected = Placement {
        rank: 5,
        world_size: 8,
        local_rank: 1,
        local_world_size: Some(4),
        master_addr: "gpu001".into(),
        // 29500 is taken by torchrun's own store.
        master_port: 29501,
        job_id: "none".into(),
        token: None,
        launcher: Launcher::Torchrun,
    };
    assert_eq!(placed(TORCHRUN), expected);
    let ours = format!("{TORCHRUN}\nBURN_SHARD_JOB_ID=job 7\nBURN_SHARD_TOKEN=secret");
    let token = Some(Token::new("secret").unwrap());
    assert_eq!(
        placed(&ours),
        Placement {
            job_id: "job 7".into(),
            token,
            ..expected.clone()
        }
    );

    // Another launcher that sets the same variables: nobody listens there.
    let others = TORCHRUN.replace("USE_AGENT_STORE=True", "USE_AGENT_STORE=False");
    assert_eq!(placed(&others).master_port, 29500);
    let last = TORCHRUN.replace("29500", "65535");
    assert_eq!(placed(&last).master_port, 65534);
}

#[test]
fn slurm_as_recorded_is_understood() {
    let placement = placed(SLURM_TWO_HOSTS);
    assert_eq!(
        (placement.rank, placement.world_size, placement.local_rank),
        (3, 4, 1)
    );
    assert_eq!(
        (placement.local_world_size, placement.launcher),
        (Some(2), Launcher::Slurm)
    );
    assert_eq!(
        (placement.master_addr.as_str(), placement.job_id.as_str()),
        ("n1", "2.0")
    );
}

#[test]
fn the_shell_of_a_batch_script_is_no_task() {
    let error = refused(SLURM_BATCH_SHELL);
    assert_eq!(error, PlacementError::BatchShell { world_size: 4 });
    assert!(
        error.to_string().contains("start it with `srun`"),
        "{error}"
    );
    let mpirun_in_it = placed(&format!("{SLURM_BATCH_SHELL}\n{OPEN_MPI}"));
    assert_eq!((mpirun_in_it.rank, mpirun_in_it.world_size), (2, 3));
    let alone = SLURM_BATCH_SHELL
        .replace("NTASKS=4", "NTASKS=1")
        .replace("2(x2)", "1");
    assert_eq!(placed(&alone).world_size, 1);
}

#[test]
fn slurm_on_four_hosts_is_understood() {
    let placement = placed(SLURM_FOUR_HOSTS);
    let expected = Placement {
        rank: 9,
        world_size: 13,
        local_rank: 1,
        local_world_size: Some(4),
        master_addr: "gpu001".into(),
        master_port: placement.master_port,
        job_id: "48213.0".into(),
        token: None,
        launcher: Launcher::Slurm,
    };
    assert_eq!(placement, expected);
    assert!((20_000..32_000).contains(&placement.master_port));
}

#[test]
fn tasks_of_one_slurm_step_agree_on_a_port_and_other_steps_have_another() {
    let other_task = SLURM_FOUR_HOSTS
        .replace("PROCID=9", "PROCID=12")
        .replace("LOCALID=1", "LOCALID=0");
    let other_task = other_task.replace("NODEID=2", "NODEID=3");
    let other_step = SLURM_FOUR_HOSTS.replace("STEP_ID=0", "STEP_ID=1");
    let port = placed(SLURM_FOUR_HOSTS).master_port;
    assert_eq!(placed(&other_task).master_port, port);
    assert_eq!(placed(&other_task).local_world_size, Some(1));
    assert_ne!(placed(&other_step).master_port, port);
}

#[test]
fn slurm_on_one_host_stays_on_loopback() {
    let environment = "SLURM_JOB_ID=7
        SLURM_STEP_ID=3
        SLURM_PROCID=3
        SLURM_LOCALID=3
        SLURM_NODEID=0
        SLURM_NTASKS=4
        SLURM_JOB_NODELIST=node17
        SLURM_TASKS_PER_NODE=4";
    let placement = placed(environment);
    assert_eq!(placement.master_addr, "127.0.0.1");
    assert_eq!(placement.local_world_size, Some(4));
    assert!(placement.master_is_loopback());
    let told = placed(&format!(
        "{environment}\nMASTER_ADDR=node17\nMASTER_PORT=3000"
    ));
    assert_eq!(
        (told.master_addr.as_str(), told.master_port),
        ("node17", 3000)
    );
    assert!(!told.master_is_loopback());
}

#[test]
fn the_first_of_slurms_hosts_is_found() {
    let lists = [
        ("gpu001", Some("gpu001")),
        ("gpu[001-003,007],login1", Some("gpu001")),
        ("login1,gpu[001-003]", Some("login1")),
        ("rack[02-04]n[10,12]-ib", Some("rack02n10-ib")),
        (
            "node-a.cluster.example,node-b",
            Some("node-a.cluster.example"),
        ),
        ("gpu[001-003", None),
        ("gpu[]", None),
        ("gpu[a-b]", None),
        (",gpu2", None),
        ("(null)", None),
        ("None assigned", None),
    ];
    for (list, host) in lists {
        let environment = SLURM_FOUR_HOSTS.replace("gpu[001-003,007]", list);
        let environment = environment.replace(",login1", "");
        match (read(&environment), host) {
            (Ok(Some(placement)), Some(host)) => assert_eq!(placement.master_addr, host, "{list}"),
            (
                Err(PlacementError::BadList {
                    variable, value, ..
                }),
                None,
            ) => {
                assert_eq!((variable, value.as_str()), ("SLURM_STEP_NODELIST", list));
            }
            (other, _) => panic!("{list}: {other:?}"),
        }
    }
}

#[test]
fn open_mpi_on_one_host_is_understood() {
    let placement = placed(OPEN_MPI);
    assert_eq!(
        (placement.rank, placement.world_size, placement.local_rank),
        (2, 3, 2)
    );
    assert_eq!(
        (placement.master_addr.as_str(), placement.job_id.as_str()),
        ("127.0.0.1", "2204303361")
    );
    assert_eq!(placement.launcher, Launcher::OpenMpi);
    let older = OPEN_MPI.replace("PMIX_NAMESPACE", "NOTHING");
    assert!(
        refused(&older)
            .to_string()
            .contains("MASTER_PORT is not set"),
        "{}",
        refused(&older)
    );
}

#[test]
fn open_mpi_on_two_hosts_takes_the_master_from_slurm_or_asks_for_it() {
    let two = OPEN_MPI
        .replace("LOCAL_SIZE=3", "LOCAL_SIZE=2")
        .replace("LOCAL_RANK=2", "LOCAL_RANK=1");
    let error = refused(&two);
    assert_eq!(
        error,
        PlacementError::NoMaster {
            launcher: Launcher::OpenMpi,
            rank: 2,
            world_size: 3
        }
    );
    assert!(error.to_string().contains("-x MASTER_ADDR=HOST"), "{error}");
    let inside =
        format!("{two}\nSLURM_JOB_NODELIST=n[1-2]\nSLURM_JOB_ID=9\nSLURM_PROCID=1\nSLURM_NTASKS=2");
    let placement = placed(&inside);
    assert_eq!(
        (placement.master_addr.as_str(), placement.launcher),
        ("n1", Launcher::OpenMpi)
    );
}

#[test]
fn hydra_is_understood() {
    let placement = placed(&format!("{HYDRA}\nMASTER_PORT=29500"));
    assert_eq!(
        (placement.rank, placement.world_size, placement.local_rank),
        (1, 2, 1)
    );
    assert_eq!(placement.launcher, Launcher::Pmi);
    let error = refused(HYDRA).to_string();
    assert!(
        error.contains("MASTER_PORT is not set") && error.contains("-genv MASTER_PORT"),
        "{error}"
    );
}

#[test]
fn the_inner_launcher_wins_and_the_log_says_so() {
    let all = format!("{TORCHRUN}\n{OPEN_MPI}\n{SLURM_FOUR_HOSTS}");
    assert_eq!(placed(&all).launcher, Launcher::Torchrun);
    assert_eq!(
        placed(&format!("{OPEN_MPI}\n{SLURM_FOUR_HOSTS}")).launcher,
        Launcher::OpenMpi
    );
    let log = Placement::explain(|name| find(&all, name));
    assert!(
        log.contains("torchrun's variables say rank 5 of 8"),
        "{log}"
    );
    assert!(
        log.contains("SLURM says rank 9 of 13: torchrun wins"),
        "{log}"
    );
    assert!(
        log.contains("OpenMPI says rank 2 of 3: torchrun wins"),
        "{log}"
    );
    assert!(log.contains("OMPI_COMM_WORLD_LOCAL_SIZE  \"3\""), "{log}");
}

#[test]
fn pmi_wins_over_slurm_only_where_they_disagree() {
    let alike = format!("{SLURM_FOUR_HOSTS}\nPMI_RANK=9\nPMI_SIZE=13");
    assert_eq!(placed(&alike).launcher, Launcher::Slurm);
    let hydra_in_srun = format!("{HYDRA}\n{SLURM_FOUR_HOSTS}");
    assert_eq!(placed(&hydra_in_srun).launcher, Launcher::Pmi);
    let as_many = hydra_in_srun.replace("PMI_SIZE=2", "PMI_SIZE=13");
    assert_eq!(
        (placed(&as_many).launcher, placed(&as_many).rank),
        (Launcher::Pmi, 1)
    );
    let hydra_in_salloc = format!("{HYDRA}\nSLURM_NTASKS=4\nSLURM_JOB_ID=5");
    assert_eq!(placed(&hydra_in_salloc).launcher, Launcher::Pmi);
}

#[test]
fn half_a_family_is_refused() {
    let cases = [
        ("WORLD_SIZE=8", "WORLD_SIZE is \"8\", but RANK is not set"),
        ("RANK=3", "RANK is \"3\", but WORLD_SIZE is not set"),
        (
            "RANK=3\nWORLD_SIZE=8",
            "RANK is \"3\", but LOCAL_RANK is not set",
        ),
        (
            "RANK=3\nWORLD_SIZE=8\nLOCAL_RANK=0",
            "RANK is \"3\", but MASTER_ADDR is not set",
        ),
        (
            "RANK=3\nWORLD_SIZE=8\nLOCAL_RANK=0\nMASTER_ADDR=a",
            "RANK is \"3\", but MASTER_PORT is not set",
        ),
        (
            "SLURM_NTASKS=4\nSLURM_JOB_ID=5",
            "SLURM_PROCID is not set (start with `srun`",
        ),
        (
            "OMPI_COMM_WORLD_RANK=1",
            "OMPI_COMM_WORLD_SIZE is not set (start with OpenMPI's mpirun",
        ),
        ("PMI_SIZE=2", "PMI_RANK is not set (start with mpiexec"),
    ];
    for (environment, expected) in cases {
        let error = refused(environment);
        assert!(matches!(error, PlacementError::Half { .. }), "{error:?}");
        assert!(error.to_string().contains(expected), "{error}");
        let log = Placement::explain(|name| find(environment, name));
        assert!(log.contains(&error.to_string()), "{log}");
    }
    // Another launcher's complete variables do not excuse it: who set these meant something.
    let error = refused(&format!("WORLD_SIZE=8\n{SLURM_FOUR_HOSTS}")).to_string();
    assert!(error.contains("unset WORLD_SIZE"), "{error}");
}

#[test]
fn contradictions_and_garbage_are_refused_by_name_and_value() {
    let cases = [
        (
            "RANK=5",
            "RANK=8",
            "RANK is 8, but WORLD_SIZE is 8 (ranks are counted from 0",
        ),
        (
            "RANK=5",
            "RANK=five",
            "RANK is \"five\", which is not a number",
        ),
        ("RANK=5", "RANK=-1", "RANK is \"-1\", which is not a number"),
        ("RANK=5", "RANK=", "RANK is set, but empty"),
        (
            "WORLD_SIZE=8",
            "WORLD_SIZE=0",
            "RANK is 5, but WORLD_SIZE is 0",
        ),
        (
            "WORLD_SIZE=8",
            "WORLD_SIZE=99999999999999999999",
            "which is not a number",
        ),
        (
            "LOCAL_RANK=1",
            "LOCAL_RANK=4",
            "LOCAL_RANK is 4, but LOCAL_WORLD_SIZE is 4",
        ),
        (
            "LOCAL_WORLD_SIZE=4",
            "LOCAL_WORLD_SIZE=9",
            "gives 9 processes on this host, but WORLD_SIZE is 8",
        ),
        (
            "MASTER_PORT=29500",
            "MASTER_PORT=0",
            "MASTER_PORT is \"0\", which is not a port",
        ),
        (
            "MASTER_PORT=29500",
            "MASTER_PORT=65536",
            "MASTER_PORT is \"65536\", which is not a port",
        ),
        (
            "MASTER_ADDR=gpu001",
            "MASTER_ADDR= ",
            "MASTER_ADDR is set, but empty",
        ),
        (
            "GROUP_RANK=1",
            "BURN_SHARD_TOKEN=",
            "BURN_SHARD_TOKEN is set, but empty",
        ),
    ];
    for (from, to, expected) in cases {
        let environment = TORCHRUN.replace(&format!("    {from}\n"), &format!("    {to}\n"));
        let environment = if from.starts_with("RANK") {
            TORCHRUN.replacen(from, to, 1)
        } else {
            environment
        };
        assert_ne!(environment, TORCHRUN);
        let error = refused(&environment).to_string();
        assert!(error.contains(expected), "{from} -> {to}: {error}");
    }
    let counts = ["4(x3,1", "4(y3)", "four", "4(x3),", ""];
    for count in counts {
        let list = format!("SLURM_STEP_TASKS_PER_NODE={count}");
        let environment = SLURM_FOUR_HOSTS.replace("SLURM_STEP_TASKS_PER_NODE=4(x3),1", &list);
        let error = refused(&environment).to_string();
        assert!(error.contains("SLURM_STEP_TASKS_PER_NODE is"), "{error}");
    }
}

#[test]
fn one_process_needs_neither_master_nor_port() {
    for environment in [
        "RANK=0\nWORLD_SIZE=1",
        "SLURM_PROCID=0\nSLURM_NTASKS=1",
        "PMI_RANK=0\nPMI_SIZE=1",
    ] {
        let placement = placed(environment);
        assert_eq!(
            (placement.rank, placement.world_size, placement.local_rank),
            (0, 1, 0)
        );
        assert!(placement.master_is_loopback());
    }
}

#[test]
fn the_token_is_in_no_log() {
    let environment = format!("{TORCHRUN}\nBURN_SHARD_TOKEN=opensesame");
    let log = Placement::explain(|name| find(&environment, name));
    assert!(
        log.contains("BURN_SHARD_TOKEN            (set, not shown)"),
        "{log}"
    );
    let debug = format!("{:?}", placed(&environment));
    assert!(
        !log.contains("opensesame") && !debug.contains("opensesame"),
        "{log}\n{debug}"
    );
}

#[test]
#[cfg(unix)]
fn what_is_no_text_is_refused_and_a_token_may_be_any_bytes() {
    use std::os::unix::ffi::OsStringExt;

    let with = |variable: &'static str, bytes: &'static [u8]| {
        move |name: &str| match name == variable {
            true => Some(OsString::from_vec(bytes.to_vec())),
            false => find(TORCHRUN, name),
        }
    };
    let token = |bytes| {
        let placement = Placement::from_vars(with("BURN_SHARD_TOKEN", bytes));
        placement.unwrap().unwrap().token.unwrap()
    };
    assert_eq!(token(b"\xff"), Token::new(*b"\xff").unwrap());
    assert_ne!(token(b"\xff"), token(b"\xfe"));
    for variable in ["RANK", "MASTER_ADDR", "BURN_SHARD_JOB_ID"] {
        let error = Placement::from_vars(with(variable, b"\xff")).unwrap_err();
        let expected = PlacementError::NotUnicode {
            variable,
            value: OsString::from_vec(b"\xff".to_vec()),
        };
        assert_eq!(error, expected);
    }
}
