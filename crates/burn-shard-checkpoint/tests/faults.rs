//! Systems that refuse: a full disk, a limit, a directory that cannot be written. The error says so,
//! and the checkpoints before are as they were.
#![allow(clippy::unwrap_used, reason = "a test ends at the first error")]

mod common;

use std::fs;
use std::io::ErrorKind;
use std::num::NonZeroUsize;
use std::path::Path;
use std::process::Command;

use burn_shard_checkpoint::{Checkpoint, Content, Error, Keep, Writer, consolidate};
use common::{assert_holds_its_step, describe, model, names, save, write_all};

/// The directory in which the test below saves, in a process of its own.
const ROOT: &str = "BURN_SHARD_TEST_LIMITED_ROOT";

const ONE: Keep = Keep::last(NonZeroUsize::MIN);

fn assert_only_step_1_is_there(root: &Path) {
    assert_eq!(names(root), [".lock", "latest", "step-0000000001.000001"]);
    let checkpoint = Checkpoint::open(root).unwrap();
    checkpoint.verify().unwrap();
    assert_holds_its_step(&checkpoint);
}

/// Without [`ROOT`] a save without a limit; with it, one that is expected to fail.
#[test]
fn a_save_under_a_limit() {
    let Some(root) = std::env::var_os(ROOT) else {
        let root = tempfile::tempdir().unwrap();
        save(root.path(), 1, 2, ONE).unwrap();
        return assert_only_step_1_is_there(root.path());
    };
    let error = save(Path::new(&root), 2, 2, ONE).unwrap_err();
    assert!(
        matches!(
            &error,
            Error::Io {
                action: "write",
                ..
            }
        ),
        "{error:?}"
    );
    print!("refused: {error}");
}

/// A file system that takes so much and no more: without root, by the shell's limit of a file's size.
#[cfg(unix)]
#[test]
fn a_write_that_is_cut_short_is_told_and_the_checkpoint_before_stays() {
    let root = tempfile::tempdir().unwrap();
    save(root.path(), 1, 2, ONE).unwrap();
    // One block, of 512 or 1024 bytes: less than a rank's file.
    let output = Command::new("sh")
        .args([
            "-c",
            "trap '' XFSZ; ulimit -f 1; exec \"$0\" --exact --nocapture a_save_under_a_limit",
        ])
        .arg(std::env::current_exe().unwrap())
        .env(ROOT, root.path())
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success(),
        "{text} {}",
        String::from_utf8_lossy(&output.stderr)
    );
    assert!(text.contains("refused: cannot write "), "{text}");
    // The next save removes what it has left.
    assert_eq!(names(root.path()).len(), 4);
    Writer::create(root.path(), 3).unwrap().abandon().unwrap();
    assert_only_step_1_is_there(root.path());
}

#[test]
fn a_directory_that_cannot_be_made_is_told() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("file");
    fs::write(&file, "in the way").unwrap();
    let error = Writer::create(file.join("root"), 1).unwrap_err();
    assert!(
        matches!(
            &error,
            Error::Io {
                action: "create",
                ..
            }
        ),
        "{error}"
    );
    assert_eq!(fs::read_to_string(&file).unwrap(), "in the way");
}

#[test]
fn a_directory_that_is_taken_away_during_a_save_is_told() {
    let root = tempfile::tempdir().unwrap();
    save(root.path(), 1, 2, ONE).unwrap();
    let writer = Writer::create(root.path(), 2).unwrap();
    let reports = write_all(&writer, &model(2), 2).unwrap();
    let partial = names(root.path())
        .into_iter()
        .find(|name| name.ends_with("partial"))
        .unwrap();
    fs::remove_dir_all(root.path().join(partial)).unwrap();
    assert!(matches!(
        write_all(&writer, &model(2), 2).unwrap_err(),
        Error::Io { .. }
    ));
    let error = writer.publish(&reports, &describe(2), ONE).unwrap_err();
    assert!(matches!(error, Error::NotShared { .. }), "{error}");
    assert_only_step_1_is_there(root.path());
}

#[test]
fn an_error_while_publishing_takes_the_name_back() {
    let root = tempfile::tempdir().unwrap();
    save(root.path(), 1, 2, ONE).unwrap();
    // Nothing can be renamed over a directory that is not empty.
    let latest = root.path().join("latest");
    fs::remove_file(&latest).unwrap();
    fs::create_dir_all(latest.join("in the way")).unwrap();
    let error = save(root.path(), 2, 2, ONE).unwrap_err();
    assert!(
        matches!(
            &error,
            Error::Io {
                action: "replace",
                ..
            }
        ),
        "{error}"
    );
    fs::remove_dir_all(&latest).unwrap();
    let left = names(root.path());
    assert_eq!(left, [".latest.partial", ".lock", "step-0000000001.000001"]);
    assert_holds_its_step(&Checkpoint::open(root.path()).unwrap());
    save(root.path(), 2, 2, ONE).unwrap();
    assert_eq!(
        names(root.path()),
        [".lock", "latest", "step-0000000002.000002"]
    );
}

/// A file system of its own, as small and as read-only as a test needs it.
struct Mount(tempfile::TempDir);

impl Mount {
    fn new(options: &str) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let mount = Self(directory);
        mount.mount(options);
        mount
    }

    fn mount(&self, options: &str) {
        let status = Command::new("mount")
            .args(["-t", "tmpfs", "-o", options, "tmpfs"])
            .arg(self.0.path())
            .status()
            .unwrap();
        assert!(
            status.success(),
            "this test mounts a tmpfs, which only root may do"
        );
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let status = Command::new("umount").arg(self.0.path()).status();
        assert!(status.is_ok_and(|status| status.success()) || std::thread::panicking());
    }
}

#[test]
#[ignore = "mounts a tmpfs: needs root"]
fn a_full_disk_is_told_at_whatever_point_it_is_full_and_the_checkpoint_before_stays() {
    let mut failed = 0;
    // In pages: from too little for the second save's directory to enough for all of it.
    for pages in 6..40 {
        let mount = Mount::new(&format!("size={}", pages * 4096));
        let root = mount.0.path().join("root");
        let before = match save(&root, 1, 2, ONE) {
            Ok(_) => true,
            Err(Error::Io { source, .. }) if source.kind() == ErrorKind::StorageFull => false,
            Err(other) => panic!("{other:?}"),
        };
        match save(&root, 2, 2, ONE) {
            Ok(_) => {
                let checkpoint = Checkpoint::open(&root).unwrap();
                checkpoint.verify().unwrap();
                assert_eq!(checkpoint.manifest().step, 2);
            }
            Err(error) => {
                let full = matches!(&error, Error::Io { source, .. } if source.kind() == ErrorKind::StorageFull);
                assert!(full, "{error:?}");
                assert!(
                    error
                        .to_string()
                        .ends_with("(free some space, or keep fewer checkpoints)")
                );
                if before {
                    failed += 1;
                    let checkpoint = Checkpoint::open(&root).unwrap();
                    checkpoint.verify().unwrap();
                    assert_eq!(checkpoint.manifest().step, 1);
                    assert_holds_its_step(&checkpoint);
                }
            }
        }
    }
    assert!(
        failed >= 3,
        "the disk was full in the second save {failed} times only"
    );
}

#[test]
#[ignore = "mounts a tmpfs: needs root"]
fn a_read_only_file_system_is_told_and_can_be_read() {
    let mount = Mount::new("size=1m");
    let root = mount.0.path().join("root");
    save(&root, 1, 2, ONE).unwrap();
    let mut remount = Command::new("mount");
    assert!(
        remount
            .args(["-o", "remount,ro"])
            .arg(mount.0.path())
            .status()
            .unwrap()
            .success()
    );
    let error = save(&root, 2, 2, ONE).unwrap_err();
    assert!(
        error
            .to_string()
            .ends_with("(the file system is mounted read-only)"),
        "{error}"
    );
    let checkpoint = Checkpoint::open(&root).unwrap();
    let out = mount.0.path().join("model.safetensors");
    let error = consolidate(&checkpoint, out, Content::Everything).unwrap_err();
    assert!(
        error
            .to_string()
            .ends_with("(the file system is mounted read-only)"),
        "{error}"
    );
    assert_only_step_1_is_there(&root);
}

#[cfg(unix)]
#[test]
#[ignore = "root may write everywhere: needs another user"]
fn a_directory_without_permission_is_told_and_can_be_read() {
    use std::os::unix::fs::PermissionsExt;

    let root = tempfile::tempdir().unwrap();
    save(root.path(), 1, 2, ONE).unwrap();
    let mode = |mode| fs::set_permissions(root.path(), fs::Permissions::from_mode(mode)).unwrap();
    mode(0o500);
    let error = save(root.path(), 2, 2, ONE).unwrap_err();
    let told = error.to_string();
    assert_only_step_1_is_there(root.path());
    mode(0o700);
    assert!(
        told.ends_with("(the user of this job needs to write there)"),
        "{told}"
    );
}
