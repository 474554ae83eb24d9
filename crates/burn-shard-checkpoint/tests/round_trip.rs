//! What was written is read, by any number of ranks, bit for bit.

mod common;

use burn_shard_checkpoint::{
    Checkpoint, DType, DTypePolicy, Description, Error, Keep, Renames, TensorName, TensorPart,
    Wanted, Writer, even_range,
};
use common::{assert_holds_its_step, describe, model, save, write_all};
use half::{bf16, f16};
use serde_json::json;

#[test]
fn any_number_of_ranks_reads_what_any_number_has_written() {
    for written_by in 1..=4 {
        let root = tempfile::tempdir().unwrap();
        save(root.path(), 3, written_by, Keep::ALL).unwrap();
        let checkpoint = Checkpoint::open(root.path()).unwrap();
        checkpoint.verify().unwrap();
        assert_eq!(checkpoint.manifest().world_size, written_by);
        for read_by in 1..=5 {
            for tensor in model(3) {
                let mut all = Vec::new();
                for rank in 0..read_by {
                    let range = even_range(tensor.numel(), rank, read_by);
                    let mut out = vec![0; range.len() * tensor.dtype.size_bytes()];
                    checkpoint
                        .read_range(&tensor.name, range, &mut out)
                        .unwrap();
                    all.extend(out);
                }
                assert_eq!(
                    all, tensor.bytes,
                    "{} {written_by} -> {read_by}",
                    tensor.name
                );
            }
        }
    }
}

#[test]
fn a_rank_may_hold_several_ranges_of_a_tensor() {
    let root = tempfile::tempdir().unwrap();
    let name = TensorName::parameter("w");
    let part = |ranges, bytes: &'static [u8]| {
        vec![TensorPart::ranges(
            name.clone(),
            DType::U8,
            &[10],
            ranges,
            bytes,
        )]
    };
    let writer = Writer::create(root.path(), 1).unwrap();
    let reports = [
        writer
            .write_rank(0, part(vec![0..2, 5..6, 8..10], b"abfij"))
            .unwrap(),
        writer
            .write_rank(1, part(vec![2..5, 6..8, 8..8], b"cdegh"))
            .unwrap(),
    ];
    writer
        .publish(&reports, &Description::default(), Keep::ALL)
        .unwrap();
    let checkpoint = Checkpoint::open(root.path()).unwrap();
    assert_eq!(checkpoint.read(&name).unwrap(), b"abcdefghij");
    for start in 0..=10 {
        for end in start..=10 {
            let mut out = vec![0; end - start];
            checkpoint.read_range(&name, start..end, &mut out).unwrap();
            assert_eq!(out, b"abcdefghij"[start..end]);
        }
    }
}

#[test]
fn ranks_write_and_join_at_the_same_time() {
    let root = tempfile::tempdir().unwrap();
    let writer = Writer::create(root.path(), 8).unwrap();
    let prepared = writer.prepared().clone();
    let reports: Vec<_> = std::thread::scope(|scope| {
        let rank = |rank| {
            let (prepared, root) = (&prepared, root.path());
            scope.spawn(move || {
                let writer = Writer::join(root, prepared).unwrap();
                let model = model(8);
                let parts = model.iter().map(|tensor| tensor.part(rank, 4)).collect();
                writer.write_rank(rank, parts).unwrap()
            })
        };
        let threads: Vec<_> = (0..4).map(rank).collect();
        threads
            .into_iter()
            .rev()
            .map(|thread| thread.join().unwrap())
            .collect()
    });
    let published = writer.publish(&reports, &describe(8), Keep::ALL).unwrap();
    assert_holds_its_step(&Checkpoint::open(&published.path).unwrap());
}

#[test]
fn a_lazy_part_is_fetched_when_it_is_written_and_its_failure_is_told() {
    let root = tempfile::tempdir().unwrap();
    let name = TensorName::parameter("w");
    let lazy = |fetch: fn() -> Result<Vec<u8>, burn_shard_checkpoint::SourceError>| {
        vec![TensorPart::lazy(
            name.clone(),
            DType::F32,
            &[2],
            vec![0..2],
            fetch,
        )]
    };
    let writer = Writer::create(root.path(), 1).unwrap();
    let error = writer
        .write_rank(1, lazy(|| Err("the device is gone".into())))
        .unwrap_err();
    assert_eq!(
        error.to_string(),
        "w (parameter): cannot be fetched: the device is gone"
    );
    let error = writer.write_rank(2, lazy(|| Ok(vec![0; 7]))).unwrap_err();
    assert!(
        matches!(
            error,
            Error::PartLength {
                expected_bytes: 8,
                found_bytes: 7,
                ..
            }
        ),
        "{error}"
    );
    let report = writer.write_rank(0, lazy(|| Ok(vec![5; 8]))).unwrap();
    writer
        .publish(&[report], &Description::default(), Keep::ALL)
        .unwrap();
    assert_eq!(
        Checkpoint::open(root.path()).unwrap().read(&name).unwrap(),
        [5; 8]
    );
}

#[test]
fn each_file_is_a_safetensors_file_with_plain_names() {
    let root = tempfile::tempdir().unwrap();
    let published = save(root.path(), 3, 2, Keep::ALL).unwrap();
    let bytes = std::fs::read(published.path.join("rank-00000.safetensors")).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let mut names = file.names();
    names.sort_unstable();
    let expected = [
        "embedding.weight",
        "empty",
        "ids",
        "mask",
        "moment_1/embedding.weight",
        "moment_2/embedding.weight",
        "norm.beta",
        "norm.gamma",
        "time/embedding.weight",
    ];
    assert_eq!(names, expected);
    // Half of 105 elements, flat; all of a scalar, of its shape.
    let weight = file.tensor("embedding.weight").unwrap();
    assert_eq!(
        (weight.shape(), weight.dtype()),
        (&[53][..], safetensors::Dtype::F32)
    );
    assert_eq!(weight.data(), &model(3)[0].bytes[..53 * 4]);
    assert_eq!(
        file.tensor("time/embedding.weight").unwrap().shape(),
        &[] as &[usize]
    );
    assert_eq!(file.tensor("empty").unwrap().shape(), [0, 3]);
}

#[test]
fn the_manifest_is_for_people_too() {
    let root = tempfile::tempdir().unwrap();
    let published = save(root.path(), 3, 2, Keep::ALL).unwrap();
    let text = std::fs::read_to_string(published.path.join("manifest.json")).unwrap();
    let line = r#"    {"path":"norm.gamma","role":"parameter","dtype":"BF16","shape":[17],"parts":[{"file":0,"start":0,"end":9},{"file":1,"start":9,"end":17}]}"#;
    assert!(
        text.lines()
            .any(|found| found.trim_end_matches(',') == line),
        "{text}"
    );
    assert!(text.contains("\"step\": 3,"), "{text}");
    assert!(text.contains(r#""strategy":"full""#), "{text}");
}

#[test]
fn user_state_that_json_would_change_is_refused_and_other_numbers_stay() {
    let root = tempfile::tempdir().unwrap();
    let publish = |user| {
        let writer = Writer::create(root.path(), 1).unwrap();
        let reports = write_all(&writer, &model(1), 1).unwrap();
        writer.publish(
            &reports,
            &Description {
                user,
                ..Description::default()
            },
            Keep::ALL,
        )
    };
    let user =
        json!({ "seed": u64::MAX, "low": i64::MIN, "rate": 0.001, "tiny": 5e-324, "n": null });
    publish(user.clone()).unwrap();
    assert_eq!(
        Checkpoint::open(root.path())
            .unwrap()
            .manifest()
            .description
            .user,
        user
    );

    // Which floats a parser rounds is its own affair: whatever is accepted is read back.
    let mut state = 1_u64;
    for _ in 0..2000 {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        let float = f64::from_bits(state);
        if !float.is_finite() {
            continue;
        }
        let json = serde_json::to_string(&json!(float)).unwrap();
        let again: f64 = serde_json::from_str(&json).unwrap();
        if again.to_bits() != float.to_bits() {
            let error = publish(json!({ "schedule": [1, { "rate": float }] })).unwrap_err();
            assert!(error.to_string().contains("schedule: rate: "), "{error}");
            break;
        }
    }
}

#[test]
fn user_state_is_refused_if_it_is_nested_deeper_than_readers_go() {
    let root = tempfile::tempdir().unwrap();
    let publish = |lists: usize| {
        let description = Description {
            user: (0..lists).fold(json!(1), |user, _| json!([user])),
            ..Description::default()
        };
        let writer = Writer::create(root.path(), 1).unwrap();
        let reports = write_all(&writer, &model(1), 1).unwrap();
        writer.publish(&reports, &description, Keep::ALL)
    };
    // The parser goes 127 deep, two of which are the manifest and its description.
    let published = publish(125).unwrap();
    Checkpoint::open(published.path).unwrap();
    let error = publish(126).unwrap_err();
    assert!(matches!(error, Error::UserState { .. }), "{error}");
}

#[test]
fn f32_bf16_and_f16_are_converted_on_request_only() {
    let root = tempfile::tempdir().unwrap();
    let values = [1.0_f32, -0.1, 3e-5, 65504.0];
    let name = TensorName::parameter("w");
    let bytes: Vec<u8> = values
        .iter()
        .flat_map(|value| value.to_le_bytes())
        .collect();
    let writer = Writer::create(root.path(), 1).unwrap();
    let part = TensorPart::full(name.clone(), DType::F32, &[4], bytes);
    let report = writer.write_rank(0, vec![part]).unwrap();
    writer
        .publish(&[report], &Description::default(), Keep::ALL)
        .unwrap();
    let checkpoint = Checkpoint::open(root.path()).unwrap();

    let read = |dtype: DType, policy| {
        let mut out = vec![0; 2 * dtype.size_bytes()];
        checkpoint
            .read_range_as(&name, 1..3, (dtype, policy), &mut out)
            .map(|()| out)
    };
    let error = read(DType::BF16, DTypePolicy::Strict).unwrap_err();
    assert!(matches!(error, Error::DTypeMismatch { .. }), "{error}");
    let error = read(DType::I32, DTypePolicy::Cast).unwrap_err();
    assert!(matches!(error, Error::DTypeMismatch { .. }), "{error}");
    let expected = [
        bf16::from_f32(-0.1).to_le_bytes(),
        bf16::from_f32(3e-5).to_le_bytes(),
    ];
    assert_eq!(
        read(DType::BF16, DTypePolicy::Cast).unwrap(),
        expected.concat()
    );
    let expected = [
        f16::from_f32(-0.1).to_le_bytes(),
        f16::from_f32(3e-5).to_le_bytes(),
    ];
    assert_eq!(
        read(DType::F16, DTypePolicy::Cast).unwrap(),
        expected.concat()
    );
    let expected = [(-0.1_f32).to_le_bytes(), 3e-5_f32.to_le_bytes()];
    assert_eq!(
        read(DType::F32, DTypePolicy::Strict).unwrap(),
        expected.concat()
    );
}

#[test]
fn a_conversion_of_more_than_a_buffer_converts_every_element() {
    let root = tempfile::tempdir().unwrap();
    let numel = 1_300_001_u32;
    let name = TensorName::parameter("w");
    // Every 16-bit pattern that widens to a number and back.
    let value = |i: u32| bf16::from_f32((i % 251) as f32 - 125.0);
    let halves: Vec<u8> = (0..numel).flat_map(|i| value(i).to_le_bytes()).collect();
    let writer = Writer::create(root.path(), 1).unwrap();
    let shape = [numel as usize];
    let part = TensorPart::full(name.clone(), DType::BF16, &shape, halves);
    let report = writer.write_rank(0, vec![part]).unwrap();
    writer
        .publish(&[report], &Description::default(), Keep::ALL)
        .unwrap();
    let checkpoint = Checkpoint::open(root.path()).unwrap();
    let mut out = vec![0; (numel as usize - 1) * 4];
    let as_f32 = (DType::F32, DTypePolicy::Cast);
    checkpoint
        .read_range_as(&name, 1..numel as usize, as_f32, &mut out)
        .unwrap();
    for (i, bytes) in (1..numel).zip(out.chunks(4)) {
        assert_eq!(bytes, value(i).to_f32().to_le_bytes(), "element {i}");
    }
}

#[test]
fn loading_is_strict_and_says_all_that_differs() {
    let root = tempfile::tempdir().unwrap();
    save(root.path(), 3, 2, Keep::ALL).unwrap();
    let checkpoint = Checkpoint::open(root.path()).unwrap();
    let mut wanted: Vec<Wanted> = model(3)
        .into_iter()
        .map(|tensor| Wanted {
            name: tensor.name,
            dtype: tensor.dtype,
            shape: tensor.shape,
        })
        .collect();
    let resolve = |wanted: &[Wanted], policy| {
        checkpoint
            .resolve(wanted, &Renames::new(), policy)
            .unwrap()
            .strict()
    };
    assert_eq!(resolve(&wanted, DTypePolicy::Strict).unwrap().matched(), 9);

    wanted[0].shape = vec![15, 7];
    wanted[4].dtype = DType::F32;
    wanted[7].name = TensorName::parameter("musk");
    let error = resolve(&wanted, DTypePolicy::Strict).unwrap_err();
    assert_eq!(
        error.to_string(),
        "the checkpoint does not fit: missing: musk (parameter); unexpected: mask (parameter); \
         different: embedding.weight (parameter) is F32 [7, 15], wanted F32 [15, 7], \
         norm.gamma (parameter) is BF16 [17], wanted F32 [17] \
         (rename by pattern, or load what matches)"
    );
    let resolution = checkpoint
        .resolve(&wanted, &Renames::new(), DTypePolicy::Cast)
        .unwrap();
    assert_eq!(resolution.mismatched.len(), 1);
    assert_eq!(resolution.matched(), 7);
    assert_eq!(resolution.source(&wanted[4].name), Some(&wanted[4].name));
    assert_eq!(resolution.source(&wanted[7].name), None);
}

#[test]
fn modules_are_renamed_by_pattern_with_their_states_and_collisions_are_refused() {
    let root = tempfile::tempdir().unwrap();
    save(root.path(), 3, 2, Keep::ALL).unwrap();
    let checkpoint = Checkpoint::open(root.path()).unwrap();
    let renames = Renames::new().rule("^embedding", "tokens").unwrap();
    let wanted = Wanted {
        name: TensorName::state("tokens.weight", "moment_1"),
        dtype: DType::F32,
        shape: vec![7, 15],
    };
    let resolution = checkpoint
        .resolve(std::slice::from_ref(&wanted), &renames, DTypePolicy::Strict)
        .unwrap();
    let source = resolution.source(&wanted.name).unwrap();
    assert_eq!(source, &TensorName::state("embedding.weight", "moment_1"));

    let renames = Renames::new().rule("gamma|beta", "scale").unwrap();
    let error = checkpoint
        .resolve(&[], &renames, DTypePolicy::Strict)
        .unwrap_err();
    assert_eq!(
        error.to_string(),
        "norm.beta (parameter) and norm.gamma (parameter) are both renamed to norm.scale (parameter)"
    );
    assert!(matches!(
        Renames::new().rule("(", "").unwrap_err(),
        Error::BadPattern { .. }
    ));
}

#[test]
fn requests_that_do_not_fit_are_refused() {
    let root = tempfile::tempdir().unwrap();
    save(root.path(), 3, 2, Keep::ALL).unwrap();
    let checkpoint = Checkpoint::open(root.path()).unwrap();
    let name = TensorName::parameter("ids");
    let mut out = [0; 16];
    let error = checkpoint.read_range(&name, 7..9, &mut out).unwrap_err();
    assert_eq!(error.to_string(), "ids (parameter): elements 7..9 of 8");
    #[allow(clippy::reversed_empty_ranges, reason = "that is the point")]
    let error = checkpoint.read_range(&name, 5..3, &mut out).unwrap_err();
    assert!(matches!(error, Error::Range { .. }), "{error}");
    let error = checkpoint.read_range(&name, 5..8, &mut out).unwrap_err();
    assert_eq!(
        error.to_string(),
        "ids (parameter): 16 bytes for elements of 24"
    );
    let error = checkpoint
        .read(&TensorName::state("ids", "moment_1"))
        .unwrap_err();
    assert!(
        error.to_string().ends_with("has no ids (moment_1)"),
        "{error}"
    );
}
