//! A checkpoint is there completely or not at all, and old ones go only when it is.
#![allow(clippy::unwrap_used, reason = "a test ends at the first error")]

mod common;

use std::fs;
use std::num::{NonZeroU64, NonZeroUsize};

use burn_shard_checkpoint::{
    Checkpoint, DType, Description, Error, Keep, RankReport, TensorName, TensorPart, Writer, tell,
    told, told_by_all,
};
use common::{assert_holds_its_step, describe, model, names, save, write_all};

fn last(count: usize) -> Keep {
    Keep::last(NonZeroUsize::new(count).unwrap())
}

#[test]
fn nothing_is_to_be_seen_until_it_is_published() {
    let root = tempfile::tempdir().unwrap();
    let writer = Writer::create(root.path(), 5).unwrap();
    let reports = write_all(&writer, &model(5), 2).unwrap();
    let none = Checkpoint::open(root.path()).unwrap_err();
    assert!(matches!(none, Error::NoCheckpoint { .. }), "{none}");
    let published = writer.publish(&reports, &describe(5), Keep::ALL).unwrap();
    assert_eq!(
        names(root.path()),
        [".lock", "latest", "step-0000000005.000001"]
    );
    let files = [
        "manifest.json",
        "manifest.xxh3",
        "rank-00000.safetensors",
        "rank-00001.safetensors",
    ];
    assert_eq!(names(&published.path), files);
    let latest = fs::read_to_string(root.path().join("latest")).unwrap();
    assert_eq!(latest, "step-0000000005.000001\n");
    assert_holds_its_step(&Checkpoint::open(root.path()).unwrap());
}

#[test]
fn a_rank_that_fails_is_told_to_all_and_the_checkpoint_before_stays() {
    let root = tempfile::tempdir().unwrap();
    save(root.path(), 1, 2, Keep::ALL).unwrap();
    let writer = Writer::create(root.path(), 2).unwrap();
    let prepared = told(&tell(0, &Ok(writer.prepared().clone()))).unwrap();
    let other = Writer::join(root.path(), &prepared).unwrap();
    let name = TensorName::parameter("w");
    let short = TensorPart::full(name, DType::F32, &[4], vec![0; 15]);
    let messages = [
        tell(0, &writer.write_rank(0, Vec::new())),
        tell(1, &other.write_rank(1, vec![short])),
    ];
    // Both ranks read the same bytes, and return the same.
    let error = told_by_all::<RankReport>(&messages).unwrap_err();
    assert_eq!(
        error.to_string(),
        "rank 1 could not save: w (parameter): 15 bytes for elements of 16"
    );
    writer.abandon().unwrap();
    assert_eq!(
        names(root.path()),
        [".lock", "latest", "step-0000000001.000001"]
    );
    assert_holds_its_step(&Checkpoint::open(root.path()).unwrap());
}

#[test]
fn what_does_not_fit_together_is_not_published_and_leaves_nothing() {
    let root = tempfile::tempdir().unwrap();
    save(root.path(), 1, 2, Keep::ALL).unwrap();
    let name = || TensorName::parameter("w");
    let part = |dtype: DType, shape: &[usize], range: std::ops::Range<usize>| {
        let bytes = vec![0; range.len() * dtype.size_bytes()];
        TensorPart::ranges(name(), dtype, shape, vec![range], bytes)
    };
    let publish = |parts: Vec<TensorPart<'_>>| {
        let writer = Writer::create(root.path(), 2).unwrap();
        let reports: Vec<_> = parts
            .into_iter()
            .enumerate()
            .map(|(rank, part)| writer.write_rank(rank, vec![part]).unwrap())
            .collect();
        let error = writer
            .publish(&reports, &Description::default(), last(1))
            .unwrap_err();
        assert_eq!(
            names(root.path()),
            [".lock", "latest", "step-0000000001.000001"],
            "{error}"
        );
        error.to_string()
    };
    use DType::{BF16, F32};
    assert_eq!(
        publish(vec![part(F32, &[8], 0..4), part(F32, &[8], 5..8)]),
        "w (parameter): no file holds elements 4..5"
    );
    assert_eq!(
        publish(vec![part(F32, &[8], 0..4), part(F32, &[8], 4..7)]),
        "w (parameter): no file holds elements 7..8"
    );
    assert_eq!(
        publish(vec![part(F32, &[8], 0..5), part(F32, &[8], 3..8)]),
        "w (parameter): elements 3..5 are held twice (what is replicated is written by one rank)"
    );
    assert_eq!(
        publish(vec![part(F32, &[8], 0..4), part(F32, &[2, 4], 4..8)]),
        "w (parameter): rank 1 says F32 [2, 4], a rank before it F32 [8]"
    );
    assert_eq!(
        publish(vec![part(F32, &[8], 0..4), part(BF16, &[8], 4..8)]),
        "w (parameter): rank 1 says BF16 [8], a rank before it F32 [8]"
    );
}

#[test]
fn every_rank_reports_once_and_of_this_save() {
    let root = tempfile::tempdir().unwrap();
    let before = {
        let writer = Writer::create(root.path(), 1).unwrap();
        let reports = write_all(&writer, &model(1), 2).unwrap();
        writer.publish(&reports, &describe(1), Keep::ALL).unwrap();
        reports
    };
    let publish = |choose: &dyn Fn(Vec<RankReport>) -> Vec<RankReport>| {
        let writer = Writer::create(root.path(), 2).unwrap();
        let reports = choose(write_all(&writer, &model(2), 2).unwrap());
        writer
            .publish(&reports, &describe(2), Keep::ALL)
            .unwrap_err()
    };
    let error = publish(&|reports| vec![reports[1].clone()]);
    assert!(matches!(error, Error::Reports { rank: 0, .. }), "{error}");
    let error = publish(&|reports| vec![reports[0].clone(), reports[0].clone()]);
    assert!(
        matches!(error, Error::DuplicateFile { .. } | Error::Reports { .. }),
        "{error}"
    );
    let error = publish(&|_| Vec::new());
    assert!(matches!(error, Error::Reports { .. }), "{error}");
    let error = publish(&|reports| vec![reports[0].clone(), before[1].clone()]);
    assert!(matches!(error, Error::OtherSave { rank: 1, .. }), "{error}");
}

#[test]
fn only_rank_0_publishes_and_a_file_that_it_does_not_see_is_told() {
    let root = tempfile::tempdir().unwrap();
    let writer = Writer::create(root.path(), 1).unwrap();
    let joined = Writer::join(root.path(), writer.prepared()).unwrap();
    let error = joined.publish(&[], &describe(1), Keep::ALL).unwrap_err();
    assert!(matches!(error, Error::NotRankZero), "{error}");

    let elsewhere = tempfile::tempdir().unwrap();
    let error = Writer::join(elsewhere.path(), writer.prepared()).unwrap_err();
    assert!(matches!(error, Error::NotShared { .. }), "{error}");

    let reports = write_all(&writer, &model(1), 2).unwrap();
    let partial = names(root.path())
        .into_iter()
        .find(|name| name.ends_with("partial"))
        .unwrap();
    fs::remove_file(root.path().join(partial).join("rank-00001.safetensors")).unwrap();
    let error = writer
        .publish(&reports, &describe(1), Keep::ALL)
        .unwrap_err();
    assert!(matches!(error, Error::NotShared { .. }), "{error}");
}

#[test]
fn two_jobs_do_not_save_in_one_directory() {
    let root = tempfile::tempdir().unwrap();
    let writer = Writer::create(root.path(), 1).unwrap();
    let error = Writer::create(root.path(), 2).unwrap_err();
    assert!(matches!(error, Error::Locked { .. }), "{error}");
    // Its files were not taken for leftovers.
    let reports = write_all(&writer, &model(1), 1).unwrap();
    writer.publish(&reports, &describe(1), Keep::ALL).unwrap();
    save(root.path(), 2, 1, Keep::ALL).unwrap();
}

#[test]
fn leftovers_are_removed_by_the_next_save_and_nothing_else_is() {
    let root = tempfile::tempdir().unwrap();
    let writer = Writer::create(root.path(), 1).unwrap();
    write_all(&writer, &model(1), 1).unwrap();
    drop(writer);
    fs::create_dir(root.path().join(".step-0000000001.000001.partial")).unwrap();
    fs::create_dir(root.path().join("mine")).unwrap();
    save(root.path(), 1, 1, Keep::ALL).unwrap();
    assert_eq!(
        names(root.path()),
        [
            ".lock",
            ".step-0000000001.000001.partial",
            "latest",
            "mine",
            "step-0000000001.000001"
        ]
    );
}

#[test]
fn old_checkpoints_go_when_the_new_one_is_published() {
    let root = tempfile::tempdir().unwrap();
    let keep = last(2).and_every(NonZeroU64::new(30).unwrap());
    for step in [10, 20, 30, 40] {
        save(root.path(), step, 2, keep).unwrap();
    }
    let removed = save(root.path(), 50, 2, keep).unwrap().removed;
    assert_eq!(removed, Vec::<String>::new());
    let removed = save(root.path(), 60, 2, keep).unwrap().removed;
    assert_eq!(removed, ["step-0000000040.000004"]);
    assert_eq!(
        names(root.path()),
        [
            ".lock",
            "latest",
            "step-0000000030.000003",
            "step-0000000050.000005",
            "step-0000000060.000006"
        ]
    );
}

#[test]
fn a_run_that_goes_back_saves_a_step_again_and_that_one_is_the_latest() {
    let root = tempfile::tempdir().unwrap();
    save(root.path(), 10, 2, Keep::ALL).unwrap();
    save(root.path(), 20, 2, Keep::ALL).unwrap();
    save(root.path(), 10, 1, last(2)).unwrap();
    let checkpoint = Checkpoint::open(root.path()).unwrap();
    assert_eq!(
        (checkpoint.manifest().step, checkpoint.manifest().sequence),
        (10, 3)
    );
    assert_eq!(
        names(root.path()),
        [
            ".lock",
            "latest",
            "step-0000000010.000003",
            "step-0000000020.000002"
        ]
    );
}

#[test]
fn latest_is_followed_and_if_it_leads_nowhere_the_newest_is_opened() {
    let root = tempfile::tempdir().unwrap();
    save(root.path(), 10, 1, Keep::ALL).unwrap();
    save(root.path(), 20, 1, Keep::ALL).unwrap();
    let step = || Checkpoint::open(root.path()).unwrap().manifest().step;
    let latest = root.path().join("latest");
    fs::write(&latest, "step-0000000010.000001").unwrap();
    assert_eq!(step(), 10);
    for nonsense in [
        "",
        "step-0000000030.000003\n",
        "../elsewhere",
        "/",
        &"x".repeat(4096),
    ] {
        fs::write(&latest, nonsense).unwrap();
        assert_eq!(step(), 20);
    }
    fs::remove_file(&latest).unwrap();
    assert_eq!(step(), 20);
}

#[test]
fn the_newest_intact_checkpoint_is_found_behind_damaged_ones() {
    let root = tempfile::tempdir().unwrap();
    for step in [1, 2, 3] {
        save(root.path(), step, 2, Keep::ALL).unwrap();
    }
    let file = root
        .path()
        .join("step-0000000003.000003/rank-00001.safetensors");
    let mut bytes = fs::read(&file).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&file, bytes).unwrap();
    fs::remove_file(root.path().join("step-0000000002.000002/manifest.json")).unwrap();

    // It opens, as nothing was read; it does not verify.
    Checkpoint::open(root.path()).unwrap().verify().unwrap_err();
    let intact = Checkpoint::open_newest_intact(root.path()).unwrap();
    assert_eq!(intact.checkpoint.manifest().step, 1);
    assert_holds_its_step(&intact.checkpoint);
    assert!(matches!(
        intact.refused[0].1,
        Error::Checksum {
            part: "contents",
            ..
        }
    ));
    assert!(matches!(intact.refused[1].1, Error::Io { .. }));

    fs::write(
        root.path().join("step-0000000001.000001/manifest.json"),
        "{}",
    )
    .unwrap();
    let error = Checkpoint::open_newest_intact(root.path()).unwrap_err();
    assert!(
        matches!(error, Error::NoneIntact { count: 3, .. }),
        "{error}"
    );
}

#[test]
fn parts_that_cannot_be_are_refused_before_anything_is_written() {
    let root = tempfile::tempdir().unwrap();
    let writer = Writer::create(root.path(), 1).unwrap();
    let refused = |parts: Vec<TensorPart<'_>>| {
        let error = writer.write_rank(0, parts).unwrap_err();
        let partial = names(root.path())
            .into_iter()
            .find(|name| name.ends_with("partial"));
        assert_eq!(
            names(&root.path().join(partial.unwrap())),
            Vec::<String>::new()
        );
        error
    };
    let part = |name: TensorName, shape: &[usize], ranges| {
        TensorPart::ranges(name, DType::U8, shape, ranges, vec![])
    };
    let w = || TensorName::parameter("w");
    let error = refused(vec![part(w(), &[4], vec![2..5])]);
    assert!(matches!(error, Error::Range { .. }), "{error}");
    let error = refused(vec![part(w(), &[4], vec![2..4, 0..1])]);
    assert!(matches!(error, Error::Overlap { .. }), "{error}");
    let error = refused(vec![part(w(), &[usize::MAX, 2], vec![])]);
    assert!(matches!(error, Error::ShapeOverflow { .. }), "{error}");
    let error = refused(vec![part(w(), &[1], vec![]), part(w(), &[1], vec![])]);
    assert!(matches!(error, Error::DuplicateTensor { .. }), "{error}");
    // A parameter whose path looks like another's state.
    let state = TensorName::state("w", "moment_1");
    let odd = TensorName::parameter("moment_1/w");
    let error = refused(vec![part(state, &[1], vec![]), part(odd, &[1], vec![])]);
    assert!(matches!(error, Error::DuplicateTensor { .. }), "{error}");
    for name in [
        TensorName::parameter(""),
        TensorName::parameter("a\nb"),
        TensorName::parameter("__metadata__"),
        TensorName::state("w", ""),
        TensorName::state("w", "a/b"),
    ] {
        let error = refused(vec![part(name, &[1], vec![])]);
        assert!(matches!(error, Error::BadName { .. }), "{error}");
    }
}
